"""Source: files under an http(s) URL, by range requests. ``index.json`` there (a converted checkpoint), or a shard
index or ``model.safetensors`` (a model as it was published), says what they are."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import quote

from sllm_loaderd.convert.shards import decode_shard_index
from sllm_loaderd.files import ONE_FILE, SHARD_INDEX, SMALL_NAMES
from sllm_loaderd.sources import MAX_ENTRIES, Entry
from sllm_loaderd.sources.listing import fingerprint
from sllm_loaderd.sources.remote import Remote
from sllm_loaderd.sources.remote_object import RemoteObject, entity_tag
from sllm_runtime.protocol.checkpoint import INDEX_NAME, MAX_INDEX, decode_index, partition_name
from sllm_runtime.protocol.errors import Forbidden, InvalidCheckpoint, ModelNotFound, SllmError, UnsupportedModel
from sllm_runtime.protocol.loader import path_of

_ABSENT: Final = (ModelNotFound, Forbidden)
"""What a server says of a file that it has not: S3 and CloudFront say 403 to who may not list what is there. One that
refuses everything refuses the weights, which have to be there."""
_NOWHERE: Final = "sllm-asks-for-what-is-not-there"


class HttpSource:
    """The files directly under ``uri``. An ETag that a server gives is held against every answer."""

    def __init__(self, uri: str, remote: Remote | None = None, base: str | None = None) -> None:
        self.uri = uri
        self._base = (base or uri).rstrip("/") + "/"
        self._remote = remote or Remote(path_of(uri))
        self.path = self._remote.path
        self._refuses: dict[str, bool] = {}
        """By the end of a name: whether what is not there is refused."""

    def fingerprint(self) -> str:
        """Names, sizes and entity tags."""
        return fingerprint(self.entries())

    def local(self) -> Path | None:
        return None

    def entries(self) -> list[Entry]:
        names = self._converted() or self._published()
        return sorted((self._entry(name) for name in names), key=lambda entry: entry.name)

    def open(self, entry: Entry) -> RemoteObject:
        return RemoteObject(self._remote, self._url(entry.name), entry)

    def close(self) -> None:
        self._remote.close()

    def _url(self, name: str) -> str:
        return self._base + quote(name)

    def _get(self, name: str, most: int) -> bytes | None:
        try:
            return self._remote.get(self._url(name), most)[1]
        except _ABSENT as error:
            self._require_absent(name, error)
            return None

    def _converted(self) -> list[str]:
        data = self._get(INDEX_NAME, MAX_INDEX)
        if data is None:
            return []
        try:
            index = decode_index(data)
        except InvalidCheckpoint:  # as ``formats.is_converted``: others may have an index.json that is none
            if not self._there(partition_name(0)) and (self._there(ONE_FILE) or self._there(SHARD_INDEX)):
                return []
            raise
        return [INDEX_NAME, *(partition_name(p.rank) for p in index.partitions), *(file.name for file in index.files)]

    def _published(self) -> list[str]:
        # One file goes before an index, as everywhere (``convert.formats.source_files``).
        data = None if self._there(ONE_FILE) else self._get(SHARD_INDEX, MAX_INDEX)
        if data is not None:
            shards = decode_shard_index(data, self._url(SHARD_INDEX))[1]
            if len(shards) > MAX_ENTRIES:
                raise InvalidCheckpoint(f"{self._url(SHARD_INDEX)} names {len(shards)} shards")
            weights = [SHARD_INDEX, *shards]
        else:
            weights = [ONE_FILE]
        return weights + [name for name in SMALL_NAMES if self._there(name)]

    def _there(self, name: str) -> bool:
        try:
            self._remote.head(self._url(name))
        except _ABSENT as error:
            self._require_absent(name, error)
            return False
        return True

    def _require_absent(self, name: str, error: SllmError) -> None:
        """Raises ``error`` where a file is refused by a server that says 404 of what it has not: this one is there, and
        a model without it (its template, what ends its outputs) would be another one."""
        end = PurePosixPath(name).suffix
        if not isinstance(error, Forbidden):
            self._refuses[end] = False  # it says 404 of such: one that is refused is there, or all are for a moment
            return
        if end not in self._refuses:
            try:
                self._remote.head(self._url(_NOWHERE + end))
            except _ABSENT as nowhere:
                self._refuses[end] = isinstance(nowhere, Forbidden)
            else:
                self._refuses[end] = True  # whatever is asked for is there, it says
        if not self._refuses[end]:
            raise error

    def _entry(self, name: str) -> Entry:
        head = self._remote.head(self._url(name))
        if head.length is None:
            raise UnsupportedModel(
                f"{self._url(name)}: the server does not say its length; it has to serve plain files", field="model"
            )
        return Entry(name, head.length, entity_tag(head))

"""The models that a node knows: `<data>/models/<hex of digest>/`, and which source gave which digest.

A model whose source is remote and converted already has only its index and small files there; copies of its partitions
are the SSD tier's.

Everything appears by a rename; what a killed process left half-made is removed at the next start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from sllm_loaderd.files import sync_directory, write_durable
from sllm_loaderd.learnt import LearntDigests
from sllm_loaderd.origins import Origins, SourceRecord, fixed
from sllm_loaderd.pool import F_ADD_SEALS
from sllm_loaderd.reader import ByteSource, ChunkSource
from sllm_loaderd.sources import SourceSettings
from sllm_loaderd.ssd.tier import SsdDirectory
from sllm_loaderd.verify import Checkpoint, open_checkpoint, read_small_file
from sllm_runtime.protocol.checkpoint import INDEX_NAME, CheckpointIndex, block_chunks, digest_hex, partition_name
from sllm_runtime.protocol.errors import CorruptCheckpoint, ModelNotFound, Unavailable
from sllm_runtime.protocol.loader import DISK, FileEntry

_READ_ONLY_SEALS = 0x1 | 0x2 | 0x4 | 0x8
_THERE = (errno.ENOTEMPTY, errno.EEXIST)
"""What a rename to a directory that has files says; which of them, the file system chooses."""


class StoredModel:
    """An opened model of the store. ``fd`` is a sealed memfd with the index and the small files, for sandboxes."""

    def __init__(self, checkpoint: Checkpoint, store: ModelStore) -> None:
        self._store = store
        self.checkpoint = checkpoint
        self.index = checkpoint.index
        """As in the checkpoint; where that has no digests, with those that are known by now."""
        self.block_chunks = tuple(tuple(block_chunks(self.index, p.rank)) for p in self.index.partitions)
        self._learnt: LearntDigests | None = None
        if self.index.segments:
            self._learnt = LearntDigests(store.digest_notes(checkpoint.digest), self.index)
            self._refresh(self._learnt)
        self.files, self.fd = self._pack()

    def learn(self, rank: int, number: int, found: str) -> CorruptCheckpoint | None:
        """A chunk was read and has the digest ``found``. An error if that is not the one of an earlier load."""
        if self._learnt is None:
            return None
        error = self._learnt.learn(rank, number, found)
        if all(self._learnt.of(rank)):
            self._refresh(self._learnt)
        return error

    def doubt(self, rank: int, path: str) -> None:
        """Bytes that came by ``path`` had another digest than they should: an SSD copy is not used again."""
        if path == DISK:
            self._store.ssd.drop(self.checkpoint.digest, rank)

    def _refresh(self, learnt: LearntDigests) -> None:
        parts = (msgspec.structs.replace(part, digests=learnt.of(part.rank)) for part in self.index.partitions)
        self.index = msgspec.structs.replace(self.index, partitions=tuple(parts))

    def open_sources(self, rank: int, *, direct: bool = True) -> list[ChunkSource]:
        """Where the partition's bytes come from, best first; the caller closes them. Blocking; raises typed errors."""
        return self._store.open_sources(self.checkpoint, rank, direct=direct)

    def close(self) -> None:
        """Close the memfd; sandboxes that have it keep theirs."""
        os.close(self.fd)

    def _pack(self) -> tuple[tuple[FileEntry, ...], int]:
        contents = [(INDEX_NAME, self.checkpoint.encoded)]
        contents += [(r.name, read_small_file(self.checkpoint.directory, r)) for r in self.index.files]
        entries, offset = [], 0
        fd = os.memfd_create("sllm-files", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for name, data in contents:
                entries.append(FileEntry(name, offset, len(data)))
                done = 0
                while done < len(data):
                    done += os.write(fd, memoryview(data)[done:])
                offset += len(data)
            fcntl.fcntl(fd, F_ADD_SEALS, _READ_ONLY_SEALS)
        except BaseException:
            os.close(fd)
            raise
        return tuple(entries), fd


class ModelStore:
    """The directory of one node. Blocking calls; safe to use from several threads for different models."""

    def __init__(self, data: Path, *, ssd_bytes: int | None = None, sources: SourceSettings | None = None) -> None:
        """``ssd_bytes``: limit of the SSD tier, None: half of what is free now or its own, 0: none."""
        self.models = data / "models"
        self._sources = data / "sources"
        self._notes = data / "digests"
        self._replaced = data / "replaced"
        self.cache = data / "cache"
        for directory in (self.models, self._sources, self._notes, self._replaced, self.cache):
            directory.mkdir(parents=True, exist_ok=True)
        self.lock = _lock(data / "lock")
        self.device = self.models.stat().st_dev
        """Of the disk that models lie on: stores with the same share it."""
        self.ssd = SsdDirectory(data / "ssd", _half_of_disk(data) if ssd_bytes is None else ssd_bytes)
        self.origins = Origins(self.ssd, sources or SourceSettings())
        for path in self.models.iterdir():
            if path.name.startswith("."):  # staging and removed directories of a process that is gone
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Let another loaderd have the directory."""
        self.origins.close()
        os.close(self.lock)

    def digests(self) -> list[str]:
        """Models that are there, ascending."""
        return sorted(f"sha256:{path.name}" for path in self.models.iterdir() if not path.name.startswith("."))

    def remote(self, digests: Iterable[str]) -> list[str]:
        """Those of ``digests`` whose first partition is not in the store, nor that of what stands for them."""
        return [d for d in digests if not (self._has_bytes(d) or self._has_bytes(self.replacement(d)))]

    def _has_bytes(self, digest: str | None) -> bool:
        return digest is not None and (self.models / digest_hex(digest) / partition_name(0)).exists()

    def directory(self, digest: str) -> Path:
        """Where a model is. Raises ``ModelNotFound``, or ``InvalidCheckpoint`` for what is no digest."""
        path = self.models / digest_hex(digest)
        if not path.is_dir():
            raise ModelNotFound(f"model {digest} is not on this node; register its source first", field="model")
        return path

    def open(self, digest: str) -> StoredModel:
        """Open a model: index and small files checked. Raises ``ModelNotFound`` or ``InvalidCheckpoint``."""
        return StoredModel(open_checkpoint(self.directory(digest), digest), self)

    def open_latest(self, digest: str) -> StoredModel:
        """As ``open``, in the form of a later conversion if there is one."""
        return self.open_replaced(digest) or self.open(digest)

    def open_replaced(self, digest: str) -> StoredModel | None:
        """The model ``digest`` in the form that a later conversion gave it, still under its own digest; None: none."""
        converted = self.replacement(digest)
        if converted is None:
            return None
        checkpoint = open_checkpoint(self.directory(converted), converted)
        return StoredModel(dataclasses.replace(checkpoint, digest=digest), self)

    def replacement(self, digest: str) -> str | None:
        """The converted model that stands for one that was loaded as it was."""
        try:
            converted = (self._replaced / digest_hex(digest)).read_text().strip()
        except FileNotFoundError:
            return None
        return converted if (self.models / digest_hex(converted)).is_dir() else None

    def replace(self, digest: str, converted: str) -> None:
        """From now on ``converted`` stands for ``digest``: the same tensors, laid out for loading."""
        temporary = self._replaced / f".{secrets.token_hex(8)}"
        write_durable(temporary, converted.encode())
        os.rename(temporary, self._replaced / digest_hex(digest))
        sync_directory(self._replaced)

    def digest_notes(self, digest: str) -> Path:
        """Where the digests of a model that came without are kept."""
        return self._notes / f"{digest_hex(digest)}.json"

    def stated(self, checkpoint: Checkpoint) -> CheckpointIndex:
        """Its index; where that has no digests, with those that loads have noted."""
        index = checkpoint.index
        if not index.segments:
            return index
        noted = LearntDigests(self.digest_notes(checkpoint.digest), index)
        parts = (msgspec.structs.replace(part, digests=noted.of(part.rank)) for part in index.partitions)
        return msgspec.structs.replace(index, partitions=tuple(parts))

    def is_direct(self, digest: str) -> bool:
        """Whether a model was not converted."""
        return bool(open_checkpoint(self.directory(digest), digest).index.segments)

    def files(self) -> list[Path]:
        """The files of partitions on this disk: models', and whole copies of the SSD tier. Blocking."""
        return [*self.models.glob("[!.]*/partition_*.bin"), *self.ssd.files()]

    def open_sources(self, checkpoint: Checkpoint, rank: int, *, direct: bool = True) -> list[ChunkSource]:
        """As ``Origins.open``."""
        return self.origins.open(checkpoint, rank, lambda: self.sources(checkpoint.digest), direct=direct)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A name for a directory about to be made; whatever is there at the end of the block is removed."""
        path = self.models / f".staging-{secrets.token_hex(8)}"
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def adopt(self, staged: Path, digest: str) -> Path:
        """Make a complete, durable checkpoint visible under its digest. What is there already wins.

        One whose partitions were remote so far gets those that ``staged`` has.
        """
        target = self.models / digest_hex(digest)
        try:
            os.rename(staged, target)
        except OSError as error:
            if error.errno not in _THERE:
                raise
        else:
            sync_directory(self.models)
            return target
        for partition in sorted(staged.glob("partition_*.bin")):
            if not (target / partition.name).exists():
                os.rename(partition, target / partition.name)
        sync_directory(target)
        return target

    def delete(self, digest: str) -> None:
        """Remove a model and forget its sources. Raises ``ModelNotFound``."""
        path, converted = self.directory(digest), self.replacement(digest)
        for record in self.sources(digest):
            self._source_path(record.uri).unlink(missing_ok=True)
            self.origins.forget(fixed(record))
        gone = self.models / f".deleted-{secrets.token_hex(8)}"
        os.rename(path, gone)
        sync_directory(self.models)
        shutil.rmtree(gone)
        self.ssd.delete(digest)
        self.digest_notes(digest).unlink(missing_ok=True)
        (self._replaced / digest_hex(digest)).unlink(missing_ok=True)
        if converted is not None and not self.sources(converted):
            self.delete(converted)

    def remember(self, record: SourceRecord) -> None:
        """Note which model a source gave; connections to what it was before end."""
        former = self._record(record.uri)
        if former is not None and former.fingerprint != record.fingerprint:  # else they are to what it still is
            self.origins.forget(fixed(former))
        path = self._source_path(record.uri)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        temporary.write_bytes(msgspec.json.encode(record))
        os.rename(temporary, path)

    def recall(self, uri: str) -> SourceRecord | None:
        """What ``uri`` gave the last time, if that model is still there."""
        record = self._record(uri)
        return record if record is not None and (self.models / digest_hex(record.digest)).is_dir() else None

    def _record(self, uri: str) -> SourceRecord | None:
        try:
            return msgspec.json.decode(self._source_path(uri).read_bytes(), type=SourceRecord)
        except (OSError, msgspec.MsgspecError):
            return None

    def sources(self, digest: str) -> list[SourceRecord]:
        """Sources that gave this model, by URI."""
        return [record for record in self._records() if record.digest == digest]

    def stores(self, uri: str = "") -> list[ByteSource]:
        """As ``Origins.largest``, of every source that gave a model, or of ``uri`` alone. Blocking."""
        if not uri:
            return self.origins.largest(self._records())
        record = self.recall(uri)
        return self.origins.largest([record] if record is not None else [])

    def _records(self) -> Iterator[SourceRecord]:
        for path in sorted(self._sources.glob("*.json")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                yield msgspec.json.decode(path.read_bytes(), type=SourceRecord)

    def disk_free(self) -> int:
        """Bytes that can still be written."""
        return shutil.disk_usage(self.models).free

    def _source_path(self, uri: str) -> Path:
        return self._sources / f"{hashlib.sha256(uri.encode()).hexdigest()}.json"


def _half_of_disk(data: Path) -> int:
    """Half of what the SSD tier could have: what is free, and what it has."""
    own = sum(file.stat().st_size for file in (data / "ssd").glob("*")) if (data / "ssd").is_dir() else 0
    return (shutil.disk_usage(data).free + own) // 2


def _lock(path: Path) -> int:
    """Hold the node's directory: two loaderds in one would remove each other's staging."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise Unavailable(f"another loaderd uses {path.parent}; stop it or give this one --data of its own") from error
    return fd

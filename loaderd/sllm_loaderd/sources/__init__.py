"""Where models are. A source is one file behind one interface: what is there, and the bytes of each object by range."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from sllm_loaderd.reader import ByteSource
from sllm_runtime.protocol.errors import InvalidCheckpoint

PEER_TOKEN = "SLLM_PEER_TOKEN"
"""The variable that has the token of this cluster's nodes; it stands on no command line."""
MAX_ENTRIES = 10_000
"""Files of one model; more are refused, since each costs memory here."""


class Entry(msgspec.Struct, frozen=True):
    """One file of a model. ``etag`` changes with its content; empty where the source has none."""

    name: str
    nbytes: int
    etag: str = ""


class Source(Protocol):
    """A model at a URI. Blocking calls, from several threads at once; typed errors."""

    @property
    def path(self) -> str:
        """Its I/O path: ``disk``, ``s3 bucket``, ``http host``, ``peer host``."""

    @property
    def uri(self) -> str:
        """What a person would give to have it."""

    def fingerprint(self) -> str:
        """Changes when the content does; cheap: no weights are read. Raises typed errors if it is not there."""

    def local(self) -> Path | None:
        """The directory on this machine that has the files already, if there is one."""

    def entries(self) -> list[Entry]:
        """The model's files by name, ascending; code is never among them. Raises ``ModelNotFound`` for none."""

    def open(self, entry: Entry) -> ByteSource:
        """The bytes of one of ``entries``. An object that has changed since is refused when it is read."""

    def close(self) -> None:
        """Give back connections and end what reads; repeatable."""


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """What sources need beside a URI. ``peer_token`` opens other nodes' loaderd; it is no part of any message, it signs
    them."""

    peer_token: str = field(default="", repr=False)


def open_source(uri: str, settings: SourceSettings | None = None) -> Source:
    """The source for ``uri``: a directory, ``hf://``, ``s3://``, ``http(s)://`` or ``peer://``.

    Raises ``InvalidCheckpoint`` for what is none of these.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        from sllm_loaderd.sources.directory import DirectorySource

        return DirectorySource(Path(rest if separator else uri))
    if scheme == "hf":
        from sllm_loaderd.sources.hub import HubSource

        return HubSource(rest)
    if scheme == "s3":
        from sllm_loaderd.sources.s3 import S3Source

        return S3Source(rest)
    if scheme in ("http", "https"):
        from sllm_loaderd.sources.http import HttpSource

        return HttpSource(uri)
    if scheme == "peer":
        from sllm_loaderd.sources.peer import peer_source

        return peer_source(rest, (settings or SourceSettings()).peer_token)
    raise InvalidCheckpoint(
        f"{uri!r} is no model source; give a directory, hf://org/name@revision, s3://bucket/prefix,"
        " https://host/prefix or peer://host:port/digest",
        field="model",
    )

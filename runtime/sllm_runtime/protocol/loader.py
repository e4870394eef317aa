"""What is said on loaderd's sockets: a u32 length (big-endian), then one msgpack message of a tagged union.

Two kinds of connection. The **control** socket (a unix path, mode 0600) is for the node's invoker. A
**sandbox** connection is one end of a socketpair that ``Grant`` made and that has rights to one model only.
Descriptors travel by SCM_RIGHTS with the bytes of the message that announces them in ``fds``.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.limits import PROTOCOL_VERSION

START: Final = "start"
PREWARM: Final = "prewarm"
WRITE_BACK: Final = "write-back"
PRIORITIES: Final = (START, PREWARM, WRITE_BACK)
"""Classes of the queue of one path, first served first."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of every message: the class name is the tag."""


class Request(Message, frozen=True, kw_only=True):
    """Base of what expects an answer; the answers carry the same ``request`` number."""

    request: int


class Hello(Message, frozen=True, kw_only=True):
    """First message of a client. A version that is not served is answered by ``Failed`` and the end."""

    version: int = PROTOCOL_VERSION
    name: str = ""


class Welcome(Message, frozen=True, kw_only=True):
    """First message of loaderd. ``model`` and ``partitions``: what a sandbox connection has rights to."""

    version: int = PROTOCOL_VERSION
    node: str = ""
    model: str = ""
    partitions: tuple[int, ...] = ()


# --- control: requests ----------------------------------------------------------------------------
class Register(Request, frozen=True, kw_only=True):
    """Have the model at ``uri`` in the store, converting it if it is not there. Answers: ``Progress``…, ``ModelInfo``.

    ``digest``, where given, is the content expected; another one is ``digest_mismatch``.
    """

    uri: str
    digest: str = ""


class ListModels(Request, frozen=True, kw_only=True):
    """Answer: ``ModelList``."""


class Describe(Request, frozen=True, kw_only=True):
    """Answer: ``ModelInfo``."""

    model: str


class Validate(Request, frozen=True, kw_only=True):
    """Read every byte and compare digests. Answers: ``Progress``…, ``Done``; or ``Failed`` naming chunk and tensors."""

    model: str


class Delete(Request, frozen=True, kw_only=True):
    """Remove from disk and, as soon as no sandbox holds it, from memory. Answer: ``Done``."""

    model: str


class Load(Request, frozen=True, kw_only=True):
    """Bring blocks into memory. ``blocks``: ordered ranges [first, last], empty for all.

    Answers on a sandbox connection: ``Files``, ``Chunks``…, ``Ready``… and ``Progress``…, ``Done``. On the
    control socket (a prefetch): ``Progress``…, ``Done``.
    """

    model: str = ""
    partition: int = 0
    blocks: tuple[tuple[int, int], ...] = ()
    device: str = "cpu"
    priority: str = START


class Pin(Request, frozen=True, kw_only=True):
    """Keep the model in memory (once it is there) until unpinned. Answer: ``Done``."""

    model: str
    pinned: bool = True


class Evict(Request, frozen=True, kw_only=True):
    """Drop the model from memory; chunks that a sandbox has had retire until it is dead. Answer: ``Done``."""

    model: str


class Reserve(Request, frozen=True, kw_only=True):
    """Keep ``nbytes`` of the pool free for ``model``, evicting others now; 0 ends it. Answer: ``Done``."""

    model: str
    nbytes: int


class Grant(Request, frozen=True, kw_only=True):
    """A sandbox's own connection with rights to just this model. Answer: ``Granted`` with one descriptor.

    ``holder`` names the sandbox; what it holds is used again only after ``Gone(holder)``, or when the process of the
    pidfd that may come with the message (``fds`` 1) has ended.
    """

    holder: str
    model: str
    partitions: tuple[int, ...] = ()
    fds: int = 0


class Gone(Request, frozen=True, kw_only=True):
    """Every process of the sandbox ``holder`` has ended. Answer: ``Done``; a holder unknown is no error."""

    holder: str


class GetStatus(Request, frozen=True, kw_only=True):
    """Answer: ``Status``."""


class Cancel(Message, frozen=True, kw_only=True):
    """Stop working on ``request`` of this connection; it is answered by ``Failed`` (``cancelled``)."""

    request: int


# --- sandbox: requests beside Load and Cancel -------------------------------------------------------
class Detach(Message, frozen=True, kw_only=True):
    """The sandbox has unmapped what ``Load`` number ``request`` gave it. The chunks stay its own till it is dead."""

    request: int


# --- answers --------------------------------------------------------------------------------------
class Done(Message, frozen=True, kw_only=True):
    """The request is complete; for ``Load``: every block asked for is ready."""

    request: int


class Failed(Message, frozen=True, kw_only=True):
    """The request (0: the connection) ended with this error."""

    request: int
    error: ErrorBody


class LoadProgress(Message, frozen=True, kw_only=True):
    """Bytes there of bytes asked for (``total`` 0: not known). ``stage``: fetch, convert, validate, load."""

    request: int
    stage: str
    done: int
    total: int
    detail: str = ""


class FileEntry(msgspec.Struct, frozen=True):
    """Where a small file lies in the descriptor that ``Files`` carries."""

    name: str
    offset: int
    nbytes: int


class Files(Message, frozen=True, kw_only=True):
    """The index (always the first entry) and the small files, all in one read-only memfd."""

    request: int
    files: tuple[FileEntry, ...]
    fds: int = 1


class Chunks(Message, frozen=True, kw_only=True):
    """Descriptors of the chunks ``numbers``, in this order. Their bytes may not be read before ``Ready``."""

    request: int
    numbers: tuple[int, ...]
    chunk_bytes: int
    fds: int
    last: bool


class Ready(Message, frozen=True, kw_only=True):
    """Every byte of this block is there and its digests are right."""

    request: int
    block: int


class Granted(Message, frozen=True, kw_only=True):
    """Carries the sandbox's end of its connection."""

    request: int
    fds: int = 1


class BlockInfo(msgspec.Struct, frozen=True):
    """A block, for people and plans."""

    rank: int
    nbytes: int
    layers: tuple[int, int] | None


class ModelInfo(Message, frozen=True, kw_only=True):
    """What ``describe`` says of a model. ``dtype`` is the one most bytes have."""

    request: int = 0
    model: str
    nbytes: int
    partitions: tuple[int, ...]
    tensors: int
    dtype: str
    dtypes: dict[str, int]
    """Bytes by dtype."""
    architecture: str = ""
    layout: str = "hf"
    order: str = "offset"
    blocks: tuple[BlockInfo, ...] = ()
    biggest: tuple[tuple[str, int], ...] = ()
    files: tuple[str, ...] = ()
    aliases: int = 0
    sources: tuple[str, ...] = ()
    resident: int = 0
    """Bytes of it in the DRAM pool."""


class ModelList(Message, frozen=True, kw_only=True):
    """Digests in the store, ascending. The whole of a model comes by ``Describe``."""

    request: int
    models: tuple[str, ...]


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the chunk pool by state; ``prefaulted`` are free ones that already have their pages."""

    chunk_bytes: int
    limit: int
    free: int
    prefaulted: int
    used: int
    held: int
    retiring: int
    reserved: int


class ResidentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A partition in memory. ``nbytes`` of ``total`` are there and checked."""

    model: str
    partition: int
    nbytes: int
    total: int
    pinned: bool
    holders: tuple[str, ...]


class PathStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A path's moving bandwidth (bytes/s; 0: never used) and the bytes that wait in its queue, by class."""

    path: str
    bandwidth: float
    queued: dict[str, int]


class Status(Message, frozen=True, kw_only=True):
    """The node's storage as the scheduler sees it."""

    request: int
    pid: int
    pool: PoolStatus
    resident: tuple[ResidentStatus, ...]
    paths: tuple[PathStatus, ...]
    models: tuple[str, ...]
    disk_free: int


ControlRequest: TypeAlias = (
    Hello | Register | ListModels | Describe | Validate | Delete | Load | Pin | Evict | Reserve | Grant | Gone
    | GetStatus | Cancel
)  # fmt: skip
SandboxRequest: TypeAlias = Hello | Load | Detach | Cancel
Answer: TypeAlias = (
    Welcome | Done | Failed | LoadProgress | Files | Chunks | Ready | Granted | ModelInfo | ModelList | Status
)  # fmt: skip

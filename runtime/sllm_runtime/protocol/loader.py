"""What is said on loaderd's sockets: a u32 length (big-endian), then one msgpack message of a tagged union.

Two kinds of connection. The **control** socket (a unix path, mode 0600) is for the node's invoker. A
**sandbox** connection is one end of a socketpair that ``Grant`` made and that has rights to one model only.
Descriptors travel by SCM_RIGHTS with the bytes of the message that announces them in ``fds``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import msgspec

from sllm_runtime.protocol.codec import pack
from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.limits import PROTOCOL_VERSION

START: Final = "start"
PREWARM: Final = "prewarm"
WRITE_BACK: Final = "write-back"
PRIORITIES: Final = (START, PREWARM, WRITE_BACK)
"""Classes of the queue of one path, first served first."""
CPU: Final = "cpu"
"""The device whose memory is the chunks themselves."""
CUDA: Final = "cuda"
"""GPU 0 is the device ``cuda:0``."""
FAKE: Final = "fake"
"""A device in shared memory, ``fake:0``, which stands in for a GPU where there is none."""
MEMFD: Final = "memfd"
POSIX_FD: Final = "posix_fd"
CUDA_IPC: Final = "cuda_ipc"
"""Ways to hand over device memory: shared memory (fake devices), a descriptor of a CUDA VMM allocation, a CUDA IPC
handle."""


DISK: Final = "disk"
"""The path that every local file comes by."""
_LINK: Final = "link "


def link_of(device: str) -> str:
    """The path that bytes come to a device by."""
    return _LINK + device


def is_link(path: str) -> bool:
    """Whether it is that of a device."""
    return path.startswith(_LINK)


def unused_bandwidth(path: str) -> float:
    """Bytes per second that a path is taken to have of which nothing has come yet: too little rather than too much, one
    load corrects it."""
    return 1e9 if path == DISK else 1e8


@lru_cache(maxsize=4096)
def path_of(uri: str) -> str:
    """The path that the bytes of a model at ``uri`` come by: whatever shares a path shares its bandwidth."""
    scheme, found, rest = uri.partition("://")
    place = rest.partition("/")[0]
    if not found or scheme == "file":
        return DISK
    if scheme == "hf":
        return "hub"
    return f"{'http' if scheme == 'https' else scheme} {place}"


def place_of(rank: int, devices: Sequence[str]) -> str:
    """Which of ``devices`` a partition goes to: they take turns, by rank; memory where nothing else is named."""
    others = [device for device in devices if device != CPU]
    return others[rank % len(others)] if others else CPU


CONVERT_NOW: Final = "now"
CONVERT_LATER: Final = "later"
CONVERT_NEVER: Final = "never"
CONVERT: Final = (CONVERT_NOW, CONVERT_LATER, CONVERT_NEVER)
"""When a model of safetensors is converted: before it can be loaded, behind its first use, or not at all."""

MOST_REQUESTS: Final = 256
"""Of one control connection that are under way; further ones are answered by ``unavailable``."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of every message: the class name is the tag."""


class Request(Message, frozen=True, kw_only=True):
    """Base of what expects an answer; the answers carry the same ``request`` number. ``traceparent``: of the call that
    it is for (W3C Trace Context)."""

    request: int
    traceparent: str = ""


class Hello(Message, frozen=True, kw_only=True):
    """First message of a client. A version that is not served is answered by ``Failed`` and the end.

    ``keeps``: this control client keeps duplicates of chunk descriptors (``Store``) and brings them back (``Adopt``).
    """

    version: int = PROTOCOL_VERSION
    name: str = ""
    keeps: bool = False


class Welcome(Message, frozen=True, kw_only=True):
    """First message of loaderd. ``model``, its ``partitions``, ``adapters``: what a sandbox connection may load."""

    version: int = PROTOCOL_VERSION
    node: str = ""
    model: str = ""
    partitions: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()


# --- control: requests ----------------------------------------------------------------------------
class Register(Request, frozen=True, kw_only=True):
    """Have the model at ``uri`` in the store, converting it if it is not there. Answers: ``Progress``…, ``ModelInfo``.

    ``digest``, where given, is the content expected; another one is ``digest_mismatch``. ``convert``: one of
    ``CONVERT``, empty for what the node is set to; a model that is loaded as it is has another digest than converted.
    """

    uri: str
    digest: str = ""
    convert: str = ""


class ListModels(Request, frozen=True, kw_only=True):
    """Answer: ``ModelList``, with those of ``among`` that are there; none named: all."""

    among: tuple[str, ...] = ()


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

    Answers on a sandbox connection: ``Files``, ``Chunks``… (on a device other than ``cpu``: one ``DeviceMemory``),
    ``Ready``… and ``Progress``…, ``Done``. On the control socket (a prefetch): ``Progress``…, ``Done``.
    """

    model: str = ""
    partition: int = 0
    blocks: tuple[tuple[int, int], ...] = ()
    device: str = "cpu"
    priority: str = START


class Copy(Request, frozen=True, kw_only=True):
    """Have every partition of the model on this node's disk, on the SSD tier if it is not in the store, with nothing of
    it staying in memory. Answers: ``Progress``…, ``Done``."""

    model: str


class Keep(Request, frozen=True, kw_only=True):
    """The models whose copies the SSD tier gives up last, in place of those named before. Answer: ``Done``."""

    models: tuple[str, ...]


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
    pidfd that may come with the message (``fds`` 1) has ended. ``adapters``: models (LoRA) that it may load beside.
    ``devices``: where it may load to; none named: everywhere. ``sources``: URIs of adapters that this node may lack, by
    digest; they are registered when the sandbox first asks for them.
    """

    holder: str
    model: str
    partitions: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    sources: dict[str, tuple[str, ...]] = {}
    fds: int = 0


class Gone(Request, frozen=True, kw_only=True):
    """Every process of the sandbox ``holder`` has ended. Answer: ``Done``; a holder unknown is no error."""

    holder: str


class Adopt(Request, frozen=True, kw_only=True):
    """Chunks that an earlier loaderd handed out, from the client that kept them. Answer: ``Adopted``.

    ``ids[i]`` (from ``Store``) is chunk ``numbers[i]`` of the partition, its descriptor comes with the message.
    ``holders``: living sandboxes that were given them. A chunk is trusted only after its seals, size and digest were
    checked.
    """

    model: str
    partition: int
    chunk_bytes: int
    numbers: tuple[int, ...]
    ids: tuple[int, ...]
    holders: tuple[str, ...]
    fds: int


class AdoptDevice(Request, frozen=True, kw_only=True):
    """Device memory that an earlier loaderd handed out, from the client that kept it (``StoreDevice``). Answer:
    ``Adopted``; it is checked as chunks are, where only loaderd could write to it, and else counted."""

    id: int
    model: str
    partition: int
    device: str
    nbytes: int
    size: int
    holders: tuple[str, ...]
    fds: int = 1


class Stored(Message, frozen=True, kw_only=True):
    """The descriptors of ``Store`` number ``batch`` are kept."""

    batch: int


class GetStatus(Request, frozen=True, kw_only=True):
    """Answer: ``Status``. ``begun``: the node has, and from now on disk and stores of which no load has told may be
    measured."""

    begun: bool = False


class Cancel(Message, frozen=True, kw_only=True):
    """Stop working on ``request`` of this connection; it is answered by ``Failed`` (``cancelled``)."""

    request: int


# --- sandbox: requests beside Load and Cancel -------------------------------------------------------
class Detach(Message, frozen=True, kw_only=True):
    """The sandbox has unmapped what ``Load`` number ``request`` gave it. The chunks stay its own till it is dead."""

    request: int


class Reorder(Message, frozen=True, kw_only=True):
    """The blocks of these ranges first, in this order, while ``Load`` number ``request`` runs; the others keep theirs.

    Not answered, but by ``Failed`` (and the load's end) for blocks that are not there.
    """

    request: int
    blocks: tuple[tuple[int, int], ...]


# --- answers --------------------------------------------------------------------------------------
class Done(Message, frozen=True, kw_only=True):
    """The request is complete; for ``Load``: every block asked for is ready."""

    request: int


class Failed(Message, frozen=True, kw_only=True):
    """The request (0: the connection) ended with this error."""

    request: int
    error: ErrorBody


class LoadProgress(Message, frozen=True, kw_only=True):
    """Bytes there of bytes asked for (``total`` 0: not known). ``stage``: fetch, convert, validate, load, copy."""

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
    """Descriptors of the chunks ``numbers``, in this order. Their bytes may not be read before ``Ready``.

    ``huge_pages``: they have pages of 2 MiB, as far as the kernel had them."""

    request: int
    numbers: tuple[int, ...]
    chunk_bytes: int
    fds: int
    last: bool
    huge_pages: bool = False


class DeviceMemory(Message, frozen=True, kw_only=True):
    """A partition's memory on ``device``, in place of ``Chunks``: the first ``nbytes`` of an allocation of ``size``.

    ``kind`` is MEMFD or POSIX_FD with one descriptor, or CUDA_IPC with its ``handle``. ``uuid``: the GPU, which may
    have another number in the sandbox. Tensors lie at their offsets; no byte may be read before ``Ready``.
    """

    request: int
    device: str
    nbytes: int
    size: int
    kind: str
    uuid: bytes = b""
    handle: bytes = b""
    fds: int = 1


class Store(Message, frozen=True, kw_only=True):
    """To a control client that ``keeps``: ``holder`` is given these chunks; keep them. Answer: ``Stored``.

    ``ids`` names chunks for as long as they live. The first ``fds`` of them come with their descriptors, the others are
    kept already.
    """

    batch: int
    holder: str
    model: str
    partition: int
    chunk_bytes: int
    numbers: tuple[int, ...]
    ids: tuple[int, ...]
    fds: int


class StoreDevice(Message, frozen=True, kw_only=True):
    """To a control client that ``keeps``: ``holder`` is given this memory of a device; keep it. Answer: ``Stored``.

    ``id`` names it for as long as it lives. ``nbytes`` of its ``size`` bytes are the partition's. Without a descriptor
    (``fds`` 0) it is kept already.
    """

    batch: int
    holder: str
    id: int
    model: str
    partition: int
    device: str
    nbytes: int
    size: int
    fds: int = 1


class Unstore(Message, frozen=True, kw_only=True):
    """These chunks or device memories hold nothing of their model any more: close what was kept. Not answered."""

    ids: tuple[int, ...]


class Adopted(Message, frozen=True, kw_only=True):
    """``ids`` serve starts again; ``counted``: not trusted, counted against the limit until their holders are dead.

    The rest of what was brought is of no use: close it.
    """

    request: int
    ids: tuple[int, ...]
    counted: tuple[int, ...] = ()


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
    splits: int = 0
    """Tensors that several ranks have, in parts or as copies."""
    packed: dict[str, int] = {}
    """Bytes of tensors kept in quantised blocks, by kind."""
    adapter: str = ""
    """The base model, if this is an adapter."""
    sources: tuple[str, ...] = ()
    resident: int = 0
    """Bytes of it in the DRAM pool."""


class ModelList(Message, frozen=True, kw_only=True):
    """Digests in the store, ascending. The whole of a model comes by ``Describe``."""

    request: int
    models: tuple[str, ...]


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the chunk pool by state; ``prefaulted`` are free ones that already have their pages.

    ``huge_pages``: chunks ask for pages of 2 MiB, and the kernel is set to give them.
    """

    chunk_bytes: int
    limit: int
    free: int
    prefaulted: int
    used: int
    held: int
    retiring: int
    reserved: int
    huge_pages: bool = False


class ResidentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A partition in memory. ``nbytes`` of ``total`` are there and checked. ``partitions``: how many its model has that
    are not empty; 0: a loaderd of before does not say."""

    model: str
    partition: int
    nbytes: int
    total: int
    pinned: bool
    holders: tuple[str, ...]
    partitions: int = 0


class PathStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A path's moving bandwidth (bytes/s; 0: never used) and the bytes that wait or are under way on it, by class.

    What begins in a class is served behind the bytes of that class and of those before it. ``mode``: how the disk is
    read, ``direct`` or ``buffered``.
    """

    path: str
    bandwidth: float
    queued: dict[str, int]
    mode: str = ""


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A device beside ``cpu``: bytes of its memory in all and in use by partitions; ``path`` is its copy queue."""

    name: str
    path: str
    limit: int
    used: int


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The SSD tier: bytes used of its limit, and its copies as (model, rank, bytes)."""

    used: int
    limit: int
    copies: tuple[tuple[str, int, int], ...] = ()


class Status(Message, frozen=True, kw_only=True):
    """The node's storage as the scheduler sees it. What it lists by model is of those used last, where a message has no
    room for all."""

    request: int
    pid: int
    pool: PoolStatus
    resident: tuple[ResidentStatus, ...]
    paths: tuple[PathStatus, ...]
    models: tuple[str, ...]
    disk_free: int
    devices: tuple[DeviceStatus, ...] = ()
    remote: tuple[str, ...] = ()
    """Those of ``models`` whose partitions are at a source; the SSD tier may have copies."""
    ssd: TierStatus | None = None
    integrity: bool = True
    """Whether what is loaded is compared with its digests."""
    untold: int = 0
    """Models of which it says nothing, for want of room."""


LISTS: Final = 32
"""Bytes that the heads of a message's lists may take beyond those of empty ones."""


def fitting(models: Iterable[str], parts: Iterable[tuple[str, object]], room: int) -> set[str]:
    """The first of ``models`` of which all ``parts`` (model, what a message says of it) have ``room`` bytes packed."""
    nbytes: dict[str, int] = {}
    for model, part in parts:
        nbytes[model] = nbytes.get(model, 0) + len(pack(part))
    found = set[str]()
    for model in dict.fromkeys(models):
        room -= nbytes.get(model, 0)
        if room < 0:
            break
        found.add(model)
    return found


ControlRequest: TypeAlias = (
    Hello | Register | ListModels | Describe | Validate | Delete | Load | Copy | Keep | Pin | Evict | Reserve | Grant
    | Gone | GetStatus | Cancel | Adopt | AdoptDevice | Stored
)  # fmt: skip
SandboxRequest: TypeAlias = Hello | Load | Detach | Reorder | Cancel
Answer: TypeAlias = (
    Welcome | Done | Failed | LoadProgress | Files | Chunks | DeviceMemory | Ready | Granted | ModelInfo | ModelList
    | Status | Store | StoreDevice | Unstore | Adopted
)  # fmt: skip

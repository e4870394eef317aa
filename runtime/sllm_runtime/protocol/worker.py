"""What an invoker and its sandboxes say to each other: u32 big-endian length + msgpack, on one unix socket each.

A worker knows calls by a number that its invoker gave; the invoker stamps call, instance and epoch itself, so no
function can speak for another. Descriptors travel by SCM_RIGHTS with the message that names them.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.frames import CallHead, Frame
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.secrets import Secrets
from sllm_runtime.protocol.timeline import Span

# --- invoker → worker -----------------------------------------------------------------------------


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """Which of an instance's processes this is. ``stages`` share its layers out, ``ranks`` share every layer out; both
    above 1 is not made. Number 0 has the calls; the others compute what it says (``protocol.stages``)."""

    number: int = 0
    stages: int = 1
    ranks: int = 1

    @property
    def count(self) -> int:
        """Processes of the instance."""
        return self.stages * self.ranks

    @property
    def edges(self) -> int:
        """Sockets that it has to the others, in this order. A stage: from the one before, to the one behind. A rank:
        the streams of steps (rank 0's to ranks 1, 2, …; another's to rank 0), then one to each other rank for sums."""
        if self.stages > 1:
            return 2
        others = self.ranks - 1
        return others + (1 if self.number else others)


class Assign(msgspec.Struct, frozen=True, kw_only=True, tag="assign"):
    """Become this instance, or its ``member``. Comes with one or more descriptors: the bundle (sealed memfd), a loaderd
    session if the function has a model, the member's edges. Sent once; a sandbox serves one instance and then ends."""

    instance: str
    function: str
    version: int
    manifest: Manifest
    bundle: str
    model: str | None = None
    devices: tuple[str, ...] = ("cpu",)
    """What the loaderd session may load to: memory, and the instance's GPUs as loaderd names them (``cuda:0``)."""
    adapters: dict[str, str] = msgspec.field(default_factory=dict)
    """Digests of the LoRA adapters by the names that calls choose them by; the loaderd session may load them."""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    memory_limit: int = 0
    """RLIMIT_DATA in bytes: the manifest's memory + the model's bytes (private writable mappings count); 0: none."""
    threads: int = 1
    gpus: tuple[int, ...] = ()
    proof: str = ""
    """``Ready.proof`` of an earlier instance of the same version on this node, which the worker checks; empty: none."""
    proofs: tuple[str, ...] = ()
    """The same of instances on other nodes."""
    traceparent: str = ""
    """Of the call that it is started for; empty: of none, or by an invoker of before."""
    workdir: str = ""
    """Directory of this instance alone, removed by the invoker."""
    member: Member = Member()
    cluster: bool = False
    """The processes of its instance share one network namespace, with a loopback and nothing else. The platform's
    choice, for ranks whose library talks over a network; no manifest asks for it."""
    secrets: Secrets = Secrets()
    fds: int = 1


HOLDS: Final = "holds"
"""Among ``Ready.capabilities``: a call may be held before it draws (``CallHead.held``), and while it does; and ids may
be fed into it (``FeedCall``)."""


class StartCall(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """Run one call. ``body`` may be followed by ``CallBody`` parts until ``head.body_bytes`` are there."""

    number: int
    head: CallHead
    body: bytes


class CallBody(msgspec.Struct, frozen=True, tag="body"):
    """More of a call's body, in order."""

    number: int
    data: bytes


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """Frames of this call may be sent up to ``limit``, the sum of their costs (``Frame.cost``)."""

    number: int
    limit: int


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Send this call's ids as they are drawn from now on (it moves), or, ``on`` False, in groups again."""

    number: int
    on: bool


class FeedCall(msgspec.Struct, frozen=True, tag="feed"):
    """``frames.Feed`` for one call of this worker."""

    number: int
    generation: int
    first: int
    ids: tuple[int, ...]
    held: bool = False
    ended: bool = False
    cached: int | None = None


class HoldCall(msgspec.Struct, frozen=True, tag="hold"):
    """``frames.Hold`` for one call of this worker."""

    number: int
    interval_s: float = 0.0


class CancelCall(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop within one token; answered by the call's END frame."""

    number: int
    code: str = "cancelled"
    reason: str = ""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish running calls within ``grace_s``, then exit 0."""

    grace_s: float


class ToWorker(msgspec.Struct, frozen=True):
    """The envelope; ``version`` is checked at the first message."""

    body: Assign | StartCall | CallBody | Credit | Follow | FeedCall | HoldCall | CancelCall | Stop
    version: int = PROTOCOL_VERSION


# --- worker → invoker -----------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A sandbox is warm: everything of ours imported, nothing of a user's."""

    pid: int
    python: str
    import_s: float = 0.0


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    """How far the start is (``timeline.START_STAGES``); bytes for weights."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Calls can come. Spans are relative to the arrival of ``Assign``."""

    spans: tuple[Span, ...] = ()
    fingerprint: str = ""
    """Instances with equal ones compute the same bits: a call may move between them."""
    capabilities: tuple[str, ...] = ()
    """``engine:<name>`` and what that engine can do; with HOLDS its calls take ``FeedCall`` and ``HoldCall``."""
    proof: str = ""
    """What the engine's self-test found, at most MAX_PROOF bytes, for the next start of this version on this node."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The start failed; the worker exits after it."""

    error: ErrorBody


class CallFrames(msgspec.Struct, frozen=True, tag="frames"):
    """What one step produced: ``(number, frames)`` for each call, each call's indexes consecutive from 0."""

    items: tuple[tuple[int, tuple[Frame, ...]], ...]


class Log(msgspec.Struct, frozen=True, kw_only=True, tag="log"):
    """A line of the function's output or a traceback. ``number`` None: of no call."""

    number: int | None
    stream: str
    text: str
    level: str = "info"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """Every HEARTBEAT_S from a thread of its own; ``loop_s``: age of the event loop's last turn."""

    running: int
    loop_s: float = 0.0
    rss: int = 0
    context: int = 0
    """Tokens, of its prompt and its output, of the call that has most; 0 where no engine has any."""


class FromWorker(msgspec.Struct, frozen=True):
    """The envelope of every message that a worker sends to its invoker."""

    body: Hello | Stage | Ready | Failed | CallFrames | Log | Heartbeat
    version: int = PROTOCOL_VERSION


# --- invoker ↔ fork server (zygote) ---------------------------------------------------------------


PRIVATE: Final = "SLLM_PRIVATE_PATHS"
"""Variable in which the invoker gives its fork server a ``Private``; no worker sees it."""
PRELOAD: Final = "SLLM_PRELOAD"
"""Variable in which the invoker tells its fork server what it imports for its workers; no worker sees it."""
KERNELS: Final = "SLLM_KERNELS"
"""Variable in which the invoker names a directory of the node's own to its fork server, for what that compiles where
the installation cannot be written to. What lies there is run, so no worker sees it."""
Preload = Literal["engine", "all"]
"""What our engine needs; or, while nobody asks for a worker, transformers as well."""


class Private(msgspec.Struct, frozen=True, kw_only=True):
    """Paths that functions must not see, and directories below them that they need."""

    hide: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Private:
        return msgspec.json.decode(text, type=cls)


RENDEZVOUS: Final = "/run/sllm/invoker"
"""Socket by which the first process of a container finds its invoker. It is told one ``Spawn`` there and answers with
one ``Exited``; the connection's end is the end of both."""
CONTAINER_HOME: Final = "/tmp/instance"
"""``Assign.workdir`` in a container: below its own /tmp."""


class Spawn(msgspec.Struct, frozen=True, kw_only=True, tag="spawn"):
    """Fork one worker. Comes with 3 descriptors: its socket, its stdout pipe, its stderr pipe."""

    sandbox: str
    fds: int = 3


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The instance that the worker became is ready: what pages a start touches can be seen of it."""

    sandbox: str
    fds: int = 0


class Spawned(msgspec.Struct, frozen=True, kw_only=True, tag="spawned"):
    """Done; comes with one descriptor: a pidfd (readable when the worker is dead; works across pid namespaces)."""

    sandbox: str
    pid: int
    fds: int = 1


class Unborn(msgspec.Struct, frozen=True, kw_only=True, tag="unborn"):
    """No process could be made for it, and ``why``: others live on."""

    sandbox: str
    why: str


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag="exited"):
    """A worker is reaped. ``signal`` 0: it exited with ``code``."""

    sandbox: str
    code: int
    signal: int = 0
    out_of_memory: bool = False
    """The kernel killed something of its container for memory. A fork server, whose workers have no group of their own,
    does not know."""
    peak: int = 0
    """Bytes of memory that it held at its most, beside what the fork server holds; 0: not said."""


class ZygoteReady(msgspec.Struct, frozen=True, kw_only=True, tag="zygote"):
    """The fork server has imported everything (``import_s`` seconds) and runs one thread."""

    import_s: float
    python: str


class Complete(msgspec.Struct, frozen=True, kw_only=True, tag="complete"):
    """The fork server has imported the rest, too, while nobody asked for a worker: those that it forked before lack
    it."""


class ToZygote(msgspec.Struct, frozen=True):
    body: Spawn | Started
    version: int = PROTOCOL_VERSION


class FromZygote(msgspec.Struct, frozen=True):
    body: ZygoteReady | Spawned | Unborn | Exited | Complete
    version: int = PROTOCOL_VERSION

"""What gateways ask of the controller: request/reply on ``sllm.ctl.<verb>``, each idempotent, long ones long-polled.

Every reply travels in ``Reply``: a value or an error. ``VERBS`` maps each verb to its request and reply type; the
controller serves exactly these, the gateway calls exactly these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.limits import LONG_POLL_S, PROTOCOL_VERSION, TOLD_AFTER_S
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import NodeRecord, NodeStatus, Ok, Progress
from sllm_runtime.protocol.records import (
    FunctionRecord,
    InstanceRecord,
    ModelRecord,
    Route,
    VersionRecord,
)
from sllm_runtime.protocol.states import MigrationState


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The envelope of every request/reply: ``value`` (the verb's reply type) or ``error``."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: ErrorBody | None = None
    version: int = PROTOCOL_VERSION


class Acquire(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway has ``waiting`` calls of this version and no free slot, or (0) none any more: what it said before
    counts no longer. Joined over all gateways: one start.

    Answered when an entry exists that is not in ``known``, when a start failed, or after ``wait_s``.
    """

    function: str
    version: int
    gateway: str
    waiting: int
    known: tuple[str, ...] = ()
    """Instances this gateway already has (all busy)."""
    gone: tuple[str, ...] = ()
    """Instances that refused or did not answer: the controller checks them."""
    awaits: bool = True
    """Its callers have been told that they wait for a node (or cannot be: a gateway of before does not say it). If not,
    that is an answer too."""
    pending: bool = True
    """The same of why nothing can be started: where it has changed since, that is told after ``wait_s``."""
    wait_s: float = LONG_POLL_S
    call: str = ""
    """Of those that wait the one that has waited longest: what is told of the start names it."""


class Acquired(msgspec.Struct, frozen=True, kw_only=True):
    """``route`` with its present entries; ``progress`` while a start goes on; ``error`` when it failed (all waiters
    get it, with ``retry_after_s`` the rest of the back-off); ``pending``: why nothing can be started now."""

    route: Route | None = None
    progress: Progress | None = None
    error: ErrorBody | None = None
    pending: str = ""


class Locate(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway is called for what its route table does not have: is there such a function, or version of it?"""

    function: str
    version: int | None = None


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``locate``: calls go to ``version``, whose route is written, or about to be. Where there is none the
    answer is the error that says what there is not."""

    version: int


class Deploy(msgspec.Struct, frozen=True, kw_only=True):
    """Make a version. Long-polled by ``request``: the same id joins the running deployment."""

    request: str
    manifest: Manifest
    bundle: str
    bundle_bytes: int
    wait_s: float = LONG_POLL_S


class Deployed(msgspec.Struct, frozen=True, kw_only=True):
    """``version`` when it has the route; ``unchanged`` if the same content was there; otherwise ``progress``."""

    version: VersionRecord | None = None
    unchanged: bool = False
    progress: Progress | None = None
    notes: tuple[str, ...] = ()
    """What whoever deploys should know, in words."""


class Withdraw(msgspec.Struct, frozen=True, kw_only=True):
    """Undo the deployment ``request`` unless its version has the route already. It may come before the ``Deploy``."""

    request: str


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True):
    """``version`` None: nothing of the deployment is left, or will be; else it was active before this was asked."""

    version: int | None = None


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a list: what follows ``after``, the ``next`` of the page before; empty: from the beginning."""

    after: str = ""


class FunctionRef(Listing, frozen=True, kw_only=True):
    """A function, by name, and where in it to go on."""

    function: str


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """Give the route back: to ``version``, or to the one before; by one ``request`` once."""

    function: str
    version: int | None = None
    request: str = ""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What makes an end of something. ``again``: it was asked before, and another controller may have done it: what is
    not there is gone then. ``age_s``: so many seconds ago; what was made since is another one."""

    again: bool = False
    age_s: float = 0.0


class Delete(Ending, frozen=True, kw_only=True):
    """Remove a function: drain, or with ``force`` cancel what runs. ``begun``: that it drains was answered before. What
    has its name by now and does not is another one."""

    function: str
    force: bool = False
    begun: bool = False


class FunctionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A function with its versions, oldest first, and its live instances; ``next``: there are more of them."""

    record: FunctionRecord
    versions: tuple[VersionRecord, ...] = ()
    instances: tuple[InstanceRecord, ...] = ()
    next: str = ""


class FunctionList(msgspec.Struct, frozen=True, kw_only=True):
    """The last function of a page may go on in the next one."""

    functions: tuple[FunctionInfo, ...]
    next: str = ""


def joined(pieces: Iterable[FunctionInfo]) -> tuple[FunctionInfo, ...]:
    """Functions whole again whose pieces follow each other, in one page or over several. The newest record holds."""
    found: dict[str, FunctionInfo] = {}
    for piece in pieces:
        before = found.get(piece.record.function, FunctionInfo(record=piece.record))
        found[piece.record.function] = FunctionInfo(
            record=piece.record,
            versions=before.versions + piece.versions,
            instances=before.instances + piece.instances,
        )
    return tuple(found.values())


class RegisterModel(msgspec.Struct, frozen=True, kw_only=True):
    """Register a model without a function. Long-polled by ``uri``."""

    uri: str
    wait_s: float = LONG_POLL_S


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelRecord | None = None
    progress: Progress | None = None


class ModelRef(Ending, frozen=True, kw_only=True):
    """A model by digest, or by an unambiguous beginning of its hex digits; ``again`` is about ``delete``."""

    digest: str
    verb: Literal["describe", "validate", "delete"] = "describe"


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model, where it lies, and which versions need it. ``problem``: what ``validate`` found."""

    record: ModelRecord
    nodes: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()
    problem: str = ""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[ModelInfo, ...]
    next: str = ""


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """Have all of a model (by digest, or an unambiguous beginning of it) on the disks of ``nodes``; none named: of all
    that are up. Long-polled: asked again, it joins."""

    digest: str
    nodes: tuple[str, ...] = ()
    wait_s: float = LONG_POLL_S


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """``model`` when it is there, on ``nodes``; otherwise ``progress`` over all of them."""

    model: ModelInfo | None = None
    nodes: tuple[str, ...] = ()
    progress: Progress | None = None


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where models should lie. ``redo``: decide anew, and begin to bring what lacks."""

    redo: bool = False


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A model that nodes read from a source: the nodes on whose SSDs it is ``wanted``, and those where all of it is.
    ``popularity``: its starts of late."""

    model: str
    nbytes: int
    popularity: float
    wanted: tuple[str, ...] = ()
    there: tuple[str, ...] = ()


class Placements(msgspec.Struct, frozen=True, kw_only=True):
    """The most popular first."""

    models: tuple[Placed, ...]


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node's record with its last report, ``age_s`` seconds old. ``status`` None: never heard in this life.
    ``left``: it has left NATS since."""

    record: NodeRecord
    status: NodeStatus | None = None
    age_s: float = 0.0
    alive: bool = False
    left: bool = False


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeInfo, ...]
    next: str = ""


class Migrate(msgspec.Struct, frozen=True, kw_only=True):
    """Carry the running calls of ``instance`` over to another one on node ``to`` (empty: the policy chooses), and end
    it. Long-polled by ``instance``: asked again, it joins."""

    instance: str
    to: str = ""
    wait_s: float = LONG_POLL_S


class Migrated(msgspec.Struct, frozen=True, kw_only=True):
    """How far a migration is. ``running``: calls that the source still works on."""

    instance: str
    destination: str
    node: str
    state: MigrationState
    running: int = 0
    note: str = ""
    """Why it was abandoned."""


class Cordon(msgspec.Struct, frozen=True, kw_only=True):
    """Start nothing on ``node`` (``cordoned``), and let what is there leave (``drain``); both False: use it again."""

    node: str
    cordoned: bool = False
    drain: bool = False


class Forget(Ending, frozen=True, kw_only=True):
    """Take ``node``, which has gone, out of the state."""

    node: str


class Warmup(msgspec.Struct, frozen=True, kw_only=True):
    """Have ``instances`` of a version ready before a call comes; ``version`` None: of the active one. Long-polled:
    asked again, it joins. They live by their keep-alive from then on."""

    function: str
    version: int | None = None
    instances: int = 1
    wait_s: float = LONG_POLL_S


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """How many are ``ready`` of those ``wanted``. ``progress``: of a start, or why there is none."""

    function: str
    version: int
    wanted: int
    ready: int
    progress: Progress | None = None


class Explain(msgspec.Struct, frozen=True, kw_only=True):
    """Why a version runs where it does; ``version`` None: the active one. ``instance``: why that one of it was started
    where it was; one of which nobody remembers that is as none."""

    function: str
    version: int | None = None
    instance: str = ""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How room could be made on a node, ``how`` in words, and seconds from then until the start would be ready there
    (None: not known)."""

    by: Literal["ending", "moving", "waiting"]
    how: str
    seconds: float | None = None


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A node for one more instance: seconds that its start is expected to take there (and of what), were there room.
    ``why``: what keeps it from being started there now; empty: nothing does. ``ways``: how room could be made there."""

    node: str
    seconds: float | None = None
    expected: str = ""
    why: str = ""
    ways: tuple[Way, ...] = ()


class MoveTold(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of ``instance`` on ``node`` (empty: no longer known) make room by going on at node ``to``: the seconds that
    this is expected to take, and took. ``state``: ``PLANNED``, or as ``states.MigrationState``."""

    instance: str
    node: str
    to: str
    state: str
    seconds: float | None = None
    took: float | None = None


class StartTold(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's start: the seconds that it was expected to take (None: by a policy that does not ask, or of the
    controller before), and those that it took (None: it goes on). ``at``: Unix seconds of when what is told of it was
    so (0: now)."""

    instance: str
    node: str
    state: str
    seconds: float | None = None
    expected: str = ""
    took: float | None = None
    at: float = 0.0


class OutcomeTold(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction beside what came, in seconds. ``what``: ``start``; ``wait``, ``evict`` or ``migrate``, from when
    that was decided until the instance was ready; ``move``; ``release``."""

    what: str
    instance: str
    node: str
    expected: float
    took: float


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """``decision``: what the policy would do for one more instance now; ``node``: where it would start, if it would.
    ``pending``: why one that is wanted cannot be placed. ``past``: all of it is of the one start in ``starts``, and of
    the time when it was decided. ``moves``: what goes, or went, elsewhere to make room for it.

    Of each start it is also kept in a stream (``subjects.decision``): as decided, and again with what it took."""

    function: str
    version: int
    policy: str
    decision: str
    node: str = ""
    possible: bool = True
    pending: str = ""
    candidates: tuple[Candidate, ...] = ()
    starts: tuple[StartTold, ...] = ()
    moves: tuple[MoveTold, ...] = ()
    outcomes: tuple[OutcomeTold, ...] = ()
    """The newest first."""
    past: bool = False
    since: float = 0.0
    """Unix seconds of when the function's oldest version was made: what started before was of another function that
    had its name."""


class PutSecret(msgspec.Struct, frozen=True, kw_only=True):
    """Store a secret, in place of an older one of that name."""

    name: str
    value: bytes

    def __repr__(self) -> str:
        return f"PutSecret({self.name!r})"


class SecretRef(Ending, frozen=True, kw_only=True):
    """A secret to be forgotten; refused while the active version of a function names it."""

    name: str


class SecretInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Unix seconds of when it was ``stored``, for people. Values are told to nobody but nodes."""

    name: str
    stored: float
    functions: tuple[str, ...] = ()
    """Whose active version names it."""


class SecretList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of them, by name."""

    secrets: tuple[SecretInfo, ...]
    next: str = ""


class Nothing(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a verb that takes none."""


TELLING: Final[Mapping[str, float]] = {
    "acquire": TOLD_AFTER_S,
    "deploy": LONG_POLL_S + 1.0,
    "register": LONG_POLL_S + 1.0,
    "pull": LONG_POLL_S + 1.0,
}
"""Verbs whose askers ask again and again, and tell people meanwhile what they wait for: a leader that lacks proof that
it leads says so after so many seconds (``no_controller``), and is asked again. Where their patience can end, not before
the one that leads answers a long poll: who led before may lack its proof for long."""

VERBS: Final[dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]]] = {
    "acquire": (Acquire, Acquired),
    "locate": (Locate, Located),
    "deploy": (Deploy, Deployed),
    "withdraw": (Withdraw, Withdrawn),
    "functions": (Listing, FunctionList),
    "function": (FunctionRef, FunctionInfo),
    "rollback": (Rollback, FunctionInfo),
    "delete": (Delete, Ok),
    "register": (RegisterModel, Registered),
    "pull": (Pull, Pulled),
    "placement": (Placement, Placements),
    "models": (Listing, ModelList),
    "model": (ModelRef, ModelInfo),
    "nodes": (Listing, NodeList),
    "cordon": (Cordon, NodeInfo),
    "forget": (Forget, Ok),
    "migrate": (Migrate, Migrated),
    "warmup": (Warmup, Warmed),
    "explain": (Explain, Explained),
    "secrets": (Listing, SecretList),
    "put_secret": (PutSecret, SecretInfo),
    "delete_secret": (SecretRef, Ok),
    "ping": (Nothing, Ok),
}

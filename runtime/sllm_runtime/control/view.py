"""The cluster as the controller knows it: one immutable value. Decisions map views to views; I/O follows.

Times are the controller's monotonic seconds, handed in as ``now``; no node's clock is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from sllm_runtime.control.providing.pool import Pool
from sllm_runtime.control.reason import Words
from sllm_runtime.control.scheduling.learned import Learned
from sllm_runtime.control.scheduling.prediction import Estimate, Outlook
from sllm_runtime.control.table import Table
from sllm_runtime.control.traced import Traced
from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.limits import LOST_AFTER_S, OVERDUE_S
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import InstanceStatus, NodeRecord, NodeStatus, Progress
from sllm_runtime.protocol.records import FunctionRecord, InstanceRecord, ModelRecord, VersionRecord
from sllm_runtime.protocol.states import INSTANCE, InstanceState, MigrationState, VersionState, final
from sllm_runtime.protocol.timeline import Span

Key: TypeAlias = tuple[str, int]
"""A version: (function, number)."""

K = TypeVar("K")
V = TypeVar("V")
EMPTY: Final[Mapping[Any, Any]] = MappingProxyType({})
ROUTABLE: Final = frozenset({VersionState.ACTIVE, VersionState.RETIRED})
CARRIES: Final = "exact_resume"
"""What the engine of an instance must be able to do for its calls to go on elsewhere."""
NOT_YET: Final = "waits for its turn: others that lack a place are looked at before it"
"""Why a version has no place that no plan has looked at."""
TOKEN_S: Final = 0.03
"""Between two tokens of a call, where only its age is known: rather too short, so that a move is thought too dear."""
STARTING: Final = frozenset({InstanceState.PENDING, InstanceState.STARTING})
_LIVE: Final = STARTING | {InstanceState.READY}
_ENDED: Final = frozenset(state for state in InstanceState if final(INSTANCE, state))


def with_item(items: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """``items`` with ``key`` set."""
    return {**items, key: value}


def without(items: Mapping[K, V], keys: Iterable[K]) -> Mapping[K, V]:
    """``items`` less ``keys``."""
    drop = frozenset(keys)
    return {key: value for key, value in items.items() if key not in drop}


def _with_some(items: Mapping[K, Mapping[str, V]], key: K, some: Mapping[str, V]) -> Mapping[K, Mapping[str, V]]:
    """``items`` with ``key`` set to ``some``, if there are any."""
    return with_item(items, key, some) if some else without(items, [key])


@dataclass(frozen=True, slots=True)
class Node:
    """A node and its last report. ``heard`` None: not heard in this life of the controller. ``left``: it has left NATS
    since it was heard; ``lost``: it was silent for too long. Nothing but a report takes these back."""

    record: NodeRecord
    status: NodeStatus | None = None
    heard: float | None = None
    left: bool = False
    lost: bool = False

    @property
    def gone(self) -> bool:
        """Whether it counts as dead, whatever was missed since."""
        return self.left or self.lost

    @property
    def open(self) -> bool:
        """Whether it takes starts: an operator has not cordoned it, it does not drain, and it can make sandboxes."""
        status = self.status
        return status is not None and not (self.record.cordoned or status.draining or status.condition)


@dataclass(frozen=True, slots=True)
class Stop:
    """An instance is being ended. ``grace_s``: how long its running calls may go on there; ``resume``: what still runs
    then goes on elsewhere."""

    reason: str
    grace_s: float
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Instance:
    """A placed instance. ``commanded``: when its last command went out; ``acked``: the node accepted that command."""

    record: InstanceRecord
    manifest: Manifest
    placed: float
    gpus: tuple[int, ...] = ()
    predicted: Estimate | None = None
    """What its start was expected to take."""
    outlook: Outlook | None = None
    """What was decided before it could be placed."""
    waited: bool = False
    """Whether it has the place that its version had waited for; others of it may find theirs at once."""
    call: str = ""
    """One that waited for it when it was placed."""
    adopted: bool = False
    """Read from the KV at start: what it was told is not known, so it is never begun again."""
    seen: InstanceStatus | None = None
    seen_at: float = 0.0
    busy_since: float | None = None
    """Since when reports show it at work without a break."""
    turn_since: float | None = None
    """Since when they show it at work without a call of it having ended."""
    ready_at: float | None = None
    spans: tuple[Span, ...] = ()
    commanded: float | None = None
    acked: bool = False
    stop: Stop | None = None

    @property
    def key(self) -> Key:
        return (self.record.function, self.record.version)

    @property
    def state(self) -> InstanceState:
        return self.record.state

    @property
    def ended(self) -> bool:
        return self.record.state in _ENDED

    @property
    def live(self) -> bool:
        """Starting or ready, and not on its way out."""
        return self.stop is None and self.record.state in _LIVE

    @property
    def ready(self) -> bool:
        return self.stop is None and self.record.state is InstanceState.READY

    @property
    def running(self) -> int:
        """Calls it works on, by its node's last report."""
        return self.seen.running if self.seen else 0

    @property
    def carries(self) -> bool:
        """Whether its running calls could go on elsewhere from their tokens."""
        return self.manifest.engine and self.manifest.resumable and CARRIES in self.record.capabilities

    def idle_s(self, now: float) -> float:
        """Seconds without a call; 0 while it works, starts, or has not been heard of."""
        if self.state is not InstanceState.READY or self.seen is None or self.seen.running:
            return 0.0
        return self.seen.idle_s + (now - self.seen_at)

    def busy_s(self, now: float) -> float:
        """No call that it works on has run for longer."""
        return min(now - self.busy_since, self.manifest.timeout) if self.busy_since is not None else 0.0

    def tokens(self, now: float) -> float:
        """Of its call that has most, in and out: by its node's last report; of a node that does not say so, by how long
        it has worked (ServerlessLLM, section 6.2: t_out = d / t)."""
        said = self.seen.context if self.seen is not None else 0
        return said or self.busy_s(now) / TOKEN_S


@dataclass(frozen=True, slots=True)
class Move:
    """The calls of a running instance are to go on at another node. ``by``: the version that its place is for."""

    instance: str
    node: str
    seconds: float
    """What it is expected to take, the start of the instance there included."""
    by: Key
    decided: float
    gpus: tuple[int, ...] = ()
    """The accelerators that are promised to it there."""
    placed: bool = False
    """Its place has been taken: until then nothing else gets what it needs there."""


@dataclass(frozen=True, slots=True)
class Migration:
    """Running calls of instance ``source`` on their way to instance ``destination`` (empty: not placed yet)."""

    source: str
    node: str
    """Where to; empty: wherever the policy says."""
    state: MigrationState
    began: float
    destination: str = ""
    note: str = ""
    ended: float | None = None
    tokens: float = 0.0
    """Of its call that had most when it began, or, from then on, when its calls began to move; 0: it had none, or it is
    of a controller before."""
    served: int = 0
    """Calls that had ended at the source when the others began to move, as its node had told."""
    since: float | None = None
    """When they did; None: not yet, or under a controller before."""
    expected: float | None = None
    """What it is expected to take, as the policy said that decided it, or as was known when its destination was."""
    by: Key | None = None
    """As ``Move.by``; None: people asked for it, or a node is drained."""
    named: str = ""
    """The node that was asked for, if one was; ``node`` is where it was placed since."""
    unfit: Mapping[str, float] = field(default_factory=dict)
    """Nodes where one did not start, and until when none is again."""
    apart: Mapping[str, float] = field(default_factory=dict)
    """Nodes where one was of another numerics class, and until when none is again."""
    adopted: bool = False
    """Begun by a controller before: ``began`` is when this one took over."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a version does not run now. ``blocking``: its start failed, so callers get ``error`` until ``until``;
    otherwise it ran and died, which holds back only the restart that no caller asked for."""

    error: ErrorBody
    attempts: int
    at: float
    until: float
    blocking: bool
    taken: int = 0
    """Starts in a row that went with their node, or with a part of it; one that gets ready ends the row."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node would not begin an instance; it is left alone until ``until``. ``yields``: from then on it is asked where
    no other has room."""

    until: float
    reason: str
    yields: float = inf
    since: str = ""
    """What it has said since, asked all the same."""


class Waited(NamedTuple):
    """One start that has no place: since when, and when that was last so."""

    since: float
    last: float


@dataclass(frozen=True, slots=True)
class PutOff:
    """Since when a wanted instance could not be placed, and when it was last tried: whoever asks for it asks again and
    again, and is not there for a moment in between."""

    since: float
    last: float
    outlook: Outlook | None = None
    """Of the first decision that said how long it would take."""
    lacks: float = inf
    """Since when it lacks one without a break, where it has got others meanwhile."""
    waits: tuple[Waited, ...] = ()
    """Its starts that find no room, each for itself; the longest first."""


class Claim(NamedTuple):
    """The place of an instance is waited for, or made."""

    until: float
    """When who claims it is expected to have served a call there; infinite where nobody knows."""
    by: Key | str | None = None
    """The version that waits for it, or the source of a migration; None: for what is being moved already."""


@dataclass(frozen=True, slots=True)
class View:
    """Everything that decisions are made from."""

    functions: Mapping[str, FunctionRecord] = field(default_factory=dict)
    versions: Mapping[Key, VersionRecord] = field(default_factory=dict)
    models: Mapping[str, ModelRecord] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    instances: Table[Instance] = field(default_factory=Table)
    waiting: Mapping[Key, Mapping[str, int]] = field(default_factory=dict)
    """Calls that wait, by version and by who asks."""
    callers: Mapping[Key, Mapping[str, str]] = field(default_factory=dict)
    """Of those, where they say it, the one that has waited longest; for people."""
    failures: Mapping[Key, Failure] = field(default_factory=dict)
    warm: Mapping[Key, Mapping[int, float]] = field(default_factory=dict)
    """Instances that somebody wants to be there before a call is, and until when so many are waited for."""
    trials: frozenset[Key] = frozenset()
    """Versions whose deployment waits for a first instance."""
    refused: Mapping[tuple[Key, str], Refusal] = field(default_factory=dict)
    """Nodes not to be asked for this version just now."""
    suspects: Mapping[str, int] = field(default_factory=dict)
    """Instances a gateway could not use, with the sequence of the report they must outlive to be trusted again."""
    orphans: Mapping[str, float] = field(default_factory=dict)
    """Instances nobody knows, with the time of the last command to end them."""
    kept: Mapping[str, Key] = field(default_factory=dict)
    """Nodes that are kept free for a version that has waited long: nothing else is placed there meanwhile."""
    put_off: Mapping[Key, PutOff] = field(default_factory=dict)
    """Versions of which a wanted instance could not be placed."""
    moves: Mapping[str, Move] = field(default_factory=dict)
    """Running instances that are to go on elsewhere, by instance; each leaves this when it has, or could not."""
    migrations: Mapping[str, Migration] = field(default_factory=dict)
    """By source. Stored is only which instance a source's calls go to (``InstanceRecord.moves_to``)."""
    pending: Mapping[Key, Words] = field(default_factory=dict)
    """Why a wanted instance cannot be placed now; ``why`` says it."""
    unlooked: frozenset[Key] = frozenset()
    """Versions that want one and that no plan has looked at yet (``turns``): nobody knows whether it can be placed."""
    claims: Mapping[str, Claim] = field(default_factory=dict)
    """Instances whose places starts of this plan wait for, or that are moved for one."""
    looked: frozenset[Key] = frozenset()
    """Versions that a place was looked for since it was for all that lack one (``turns``); none, unless a plan had more
    of them than it looks for."""
    looked_for: frozenset[str] = frozenset()
    """Sources of migrations, likewise."""
    lacking: Mapping[Key, int] = field(default_factory=dict)
    """Instances that versions want for calls which wait, and have no place for; none of those of ``enough``."""
    enough: frozenset[Key] = frozenset()
    """Versions that want instances for calls which wait and have enough all the same: the calls are expected to begin
    at those that are there before another one would be ready."""
    awaiting: Mapping[Key, Progress] = field(default_factory=dict)
    """Those of them for which a node is to come, and how far that is."""
    pool: Pool | None = None
    """The nodes of a provider; None: nodes come and go by themselves."""
    learned: Learned = field(default_factory=Learned)
    """What starts, releases and moves so far took. ``remembering`` has it stored, so a new controller knows it too."""
    listening_since: float = 0.0
    """Since when reports could have been heard without interruption."""

    def alive(self, node: str, now: float) -> bool:
        """Whether the node counts as living: heard within LOST_AFTER_S of listening, and not gone since."""
        known = self.nodes.get(node)
        if known is None or known.heard is None or known.gone:
            return False
        return now - max(known.heard, self.listening_since) < LOST_AFTER_S

    def silent(self, node: str, now: float) -> bool:
        """Whether the node is gone, or had LOST_AFTER_S to speak and did not. Neither alive nor silent: too early to
        say."""
        if self.alive(node, now):
            return False
        known = self.nodes.get(node)
        return (known is not None and known.gone) or now - self.listening_since >= LOST_AFTER_S

    def overdue(self, now: float) -> tuple[str, ...]:
        """Nodes that should have been heard since, and may live all the same."""
        before = now - OVERDUE_S
        if self.listening_since > before:
            return ()
        unheard = (name for name, node in self.nodes.items() if node.heard is None or node.heard <= before)
        return tuple(name for name in unheard if not self.silent(name, now))

    def doubtful(self, instance: Instance, now: float) -> bool:
        """Whether it is not to be counted on: a gateway could not use it, and its node has been silent for longer than
        one that lives. The gateway waited before it said so; whoever asks as well hears the same a little later."""
        if instance.record.instance not in self.suspects:
            return False
        known, before = self.nodes.get(instance.record.node), now - OVERDUE_S
        return self.listening_since <= before and (known is None or known.heard is None or known.heard <= before)

    def in_doubt(self, now: float) -> frozenset[str]:
        """Nodes of ``doubtful`` instances."""
        there = (self.instances.get(name) for name in self.suspects)
        return frozenset(each.record.node for each in there if each is not None and self.doubtful(each, now))

    def on(self, node: str) -> Mapping[str, Instance]:
        """Instances placed on a node; the same object until one of them changes."""
        return self.instances.on(node)

    def of(self, key: Key) -> tuple[Instance, ...]:
        """All instances of a version, oldest first."""
        return tuple(self.instances.of(key).values())

    def versions_of(self, function: str) -> tuple[VersionRecord, ...]:
        """All versions of a function, oldest first."""
        found = (record for (name, _), record in self.versions.items() if name == function)
        return tuple(sorted(found, key=lambda record: record.version))

    def demand(self, key: Key) -> int:
        """Calls of a version that wait for a slot, over all gateways."""
        waiting = self.waiting.get(key)
        return sum(waiting.values()) if waiting else 0

    def put_off_s(self, key: Key, now: float) -> float:
        """For how long a version has lacked a wanted instance, whichever it is; 0: none is put off."""
        known = self.put_off.get(key)
        return now - min(known.since, known.lacks) if known is not None else 0.0

    def why(self, key: Key, otherwise: str = "") -> str:
        """Why a wanted instance of a version cannot be placed now, for people; ``otherwise`` if none waits."""
        return str(self.pending.get(key, NOT_YET if key in self.unlooked else otherwise))

    def active(self, key: Key) -> bool:
        """Whether calls that name no version go to this one."""
        function = self.functions.get(key[0])
        return function is not None and not function.deleting and function.active == key[1]

    def routable(self, key: Key) -> bool:
        """Whether calls may be sent to this version."""
        function, version = self.functions.get(key[0]), self.versions.get(key)
        if function is None or version is None or function.deleting:
            return False
        return version.state in ROUTABLE

    def model_of(self, key: Key) -> ModelRecord | None:
        """The model of a version, if it has one."""
        version = self.versions.get(key)
        return self.models.get(version.model) if version is not None and version.model else None

    def adapters_of(self, key: Key) -> dict[str, ModelRecord]:
        """The LoRA adapters of a version by name; one that is no longer known is left out."""
        version = self.versions.get(key)
        named = version.adapters.items() if version is not None else ()
        return {name: self.models[digest] for name, digest in named if digest in self.models}

    @property
    def destinations(self) -> frozenset[str]:
        """Instances that calls are on their way to by migration."""
        going = (each for each in self.migrations.values() if each.ended is None)
        return frozenset(each.destination for each in going if each.destination)

    @property
    def making_way(self) -> frozenset[str]:
        """Instances that are moved, or are to be, so that a start has their places."""
        going = (each for each in self.migrations.values() if each.ended is None and each.by is not None)
        return frozenset(self.moves) | {each.source for each in going}

    # --- changes: each returns a new view -----------------------------------------------------------
    def put_instance(self, instance: Instance) -> View:
        return replace(self, instances=self.instances.put(instance))

    def put_node(self, *nodes: Node) -> View:
        return replace(self, nodes=Traced.of(self.nodes).after({node.record.node: node for node in nodes}))

    def drop_nodes(self, names: Iterable[str]) -> View:
        return replace(self, nodes=Traced.of(self.nodes).after({}, names))

    def put_function(self, record: FunctionRecord) -> View:
        return replace(self, functions=with_item(self.functions, record.function, record))

    def put_version(self, record: VersionRecord) -> View:
        return replace(self, versions=with_item(self.versions, (record.function, record.version), record))

    def drop_versions(self, keys: Iterable[Key]) -> View:
        """Less these versions, and less what their starts and calls have taught."""
        gone = frozenset(keys)
        return replace(self, versions=without(self.versions, gone), learned=self.learned.without(gone))

    def put_model(self, record: ModelRecord) -> View:
        return replace(self, models=with_item(self.models, record.digest, record))

    def put_failure(self, key: Key, failure: Failure | None) -> View:
        if failure is None:
            return replace(self, failures=without(self.failures, [key])) if key in self.failures else self
        return replace(self, failures=with_item(self.failures, key, failure))

    def put_waiting(self, key: Key, asker: str, calls: int, call: str = "") -> View:
        """``asker`` has ``calls`` waiting, ``call`` the longest of them; 0 forgets it."""
        askers, callers = self.waiting.get(key, EMPTY), self.callers.get(key, EMPTY)
        if calls > 0:
            named = with_item(callers, asker, call) if call else without(callers, [asker])
            return replace(
                self,
                waiting=with_item(self.waiting, key, with_item(askers, asker, calls)),
                callers=_with_some(self.callers, key, named),
            )
        if asker not in askers:
            return self
        return replace(
            self,
            waiting=_with_some(self.waiting, key, without(askers, [asker])),
            callers=_with_some(self.callers, key, without(callers, [asker])),
        )

    def put_trial(self, key: Key, wanted: bool) -> View:
        return replace(self, trials=self.trials | {key} if wanted else self.trials - {key})

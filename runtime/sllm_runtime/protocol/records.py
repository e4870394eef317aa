"""What the registry keeps in JetStream KV (as JSON) and what is derived from it for the gateways."""

from __future__ import annotations

import msgspec

from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.states import InstanceState, VersionState
from sllm_runtime.protocol.timeline import Span


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base: every record states the protocol version of its writer."""

    schema: int = PROTOCOL_VERSION


class ModelRecord(Record, frozen=True, kw_only=True):
    """A model by content. Nodes that lack it make it again from ``sources`` (conversion is deterministic)."""

    digest: str
    """``sha256:<hex>`` of the checkpoint's index."""
    uri: str
    """Where it was registered from."""
    nbytes: int
    """Bytes of all partitions."""
    partitions: tuple[int, ...]
    """Bytes of each partition, by rank."""
    architecture: str = ""
    tensors: int = 0
    dtype: str = ""
    sources: tuple[str, ...] = ()
    adapter: str = ""
    """The base model that it names, if it is a LoRA adapter."""
    created: float = 0.0
    """Unix seconds; for people, no decision reads it."""

    @property
    def largest(self) -> int:
        """Bytes of the largest partition: what one accelerator's link brings. A disk or a source brings ``nbytes``."""
        return max(self.partitions, default=self.nbytes)


class VersionRecord(Record, frozen=True, kw_only=True):
    """A version: immutable but for its state. Key ``<function>.<version>`` in bucket ``versions``."""

    function: str
    version: int
    manifest: Manifest
    bundle: str
    """``sha256:<hex>`` of the bundle's bytes in the object store."""
    bundle_bytes: int
    content: str
    """Digest over manifest, bundle and model: equal content makes no new version."""
    model: str | None = None
    """Digest of its model."""
    adapters: dict[str, str] = {}
    """Digests of its LoRA adapters by the names that calls choose them by."""
    state: VersionState = VersionState.PREPARING
    created: float = 0.0
    error: ErrorBody | None = None
    request: str = ""
    """The last ``Deploy.request`` that made it or gave it the route: so another controller knows what became of it."""
    requests: tuple[str, ...] = ()
    """The last few of them, the newest last; of a controller of before there is ``request`` alone."""


class FunctionRecord(Record, frozen=True, kw_only=True):
    """Which version has the route. Key ``<function>`` in bucket ``functions``."""

    function: str
    active: int | None
    last_version: int
    previous: tuple[int, ...] = ()
    """Versions that had the route before, newest last: what ``rollback`` goes back to."""
    deleting: bool = False
    rolled_back: str = ""
    """The last ``Rollback.request``: asked again, perhaps of another controller, it goes no further back."""
    rollbacks: tuple[str, ...] = ()
    """The newest of them, that one among them: somebody else may ask between."""


class InstanceRecord(Record, frozen=True, kw_only=True):
    """An instance the controller has placed. Key ``<instance>`` in bucket ``instances``."""

    instance: str
    function: str
    version: int
    node: str
    state: InstanceState
    created: float = 0.0
    error: ErrorBody | None = None
    fingerprint: str = ""
    """Its numerics class, and what its engine can do: as it said when it became ready."""
    capabilities: tuple[str, ...] = ()
    moves_to: str = ""
    """The instance that takes over its running calls; empty: none."""


class RouteEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that takes calls."""

    instance: str
    node: str
    version: int
    concurrency: int
    fingerprint: str = ""
    """Numerics class: calls move only between equal ones."""
    spans: tuple[Span, ...] = ()
    """How its start went, from the controller's placement on."""
    exact: bool = True
    """False: its engine does not promise that a resumed call, or one of another batch, gets the same tokens."""
    moves_to: str = ""
    """Another entry of this route: calls that run here go on there, and no new call comes here."""


class Route(Record, frozen=True, kw_only=True):
    """What a gateway needs to admit and send a call of one version. Key ``<function>.<version>`` in bucket ``routes``.

    Written when a version can take calls, also with no entry: a caller then waits for ``acquire``.
    """

    function: str
    version: int
    manifest: Manifest
    model: str | None = None
    active: bool = False
    """Whether calls that name no version go here."""
    created: float = 0.0
    """Unix seconds at which the version was made; 0 of a controller that does not tell. For people."""
    entries: tuple[RouteEntry, ...] = ()


class SecretRecord(Record, frozen=True, kw_only=True):
    """A secret as every component may read it: sealed with a key that controllers alone have."""

    name: str
    key: str
    """Which key: the first hexadecimal digits of its SHA-256."""
    sealed: bytes
    """Nonce and XSalsa20-Poly1305 of name and value."""
    stored: float
    """Unix seconds; for people."""


class PoolRecord(Record, frozen=True, kw_only=True):
    """What is known of a provider's nodes beyond the life of a controller. Key ``pool``."""

    members: tuple[str, ...] = ()
    """Nodes that the provider has or had, until they are forgotten."""
    leaving: tuple[str, ...] = ()
    """Those that are drained to be given back."""
    seen: tuple[str, ...] = ()
    """Those that have reported: what there is to learn of them is learnt."""
    boot_s: float = 0.0
    """Moving mean of the seconds from the decision to a node's first report; 0: none has come yet."""
    cpu: float = 0.0
    memory: int = 0
    """The least that one of them had; 0: none has come yet."""
    gpus: tuple[tuple[str, int], ...] | None = None
    """Kinds and memory of the last one that came; None: none has."""
    fewer: tuple[tuple[str, int], ...] | None = None
    """As ``gpus``, of the last one where that had fewer than the settings say and the one before had not: it may be
    broken."""
    said: str = ""
    """What the settings said of each when that was seen: it counts for no other type of node."""


class Popularity(Record, frozen=True, kw_only=True):
    """How often models were started of late. Key ``popularity``."""

    models: dict[str, float] = {}
    """By digest: starts, each half as much after every hour."""


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """The last measurements of one thing, in seconds, the newest last. What of ``node``, ``function`` and ``version``,
    ``kind`` it is of; empty and 0 where it is of all."""

    seconds: tuple[float, ...]
    function: str = ""
    version: int = 0
    node: str = ""
    kind: str = ""


class Fitted(msgspec.Struct, frozen=True, array_like=True):
    """Moves of a model's calls: the weighted sums of a straight line's fit, by tokens (``x``) and seconds (``y``)."""

    model: str
    slope: float
    base: float
    n: float
    x: float
    y: float
    xx: float
    xy: float


class LearnedRecord(Record, frozen=True, kw_only=True):
    """What starts, releases and moves have taken, for the estimates of the next controller. Key ``learned``."""

    sandbox: tuple[Measured, ...] = ()
    """By node, and of all; kind ``warm`` or ``cold``."""
    disk: tuple[Measured, ...] = ()
    """Seconds a gigabyte (10^9 bytes), by node, and of all."""
    imports: tuple[Measured, ...] = ()
    setup: tuple[Measured, ...] = ()
    rest: tuple[Measured, ...] = ()
    """By version, and of all; kind: where the weights were."""
    lead: tuple[Measured, ...] = ()
    """By the same."""
    release: tuple[Measured, ...] = ()
    """By version, and of all."""
    calls: tuple[Measured, ...] = ()
    """How long they take, by version."""
    moves: tuple[Fitted, ...] = ()


class ProofsRecord(Record, frozen=True, kw_only=True):
    """What self-tests of a version's engine found, one for each kind of machine, the newest last: a start that has one
    for its machine tests little. Key ``proofs.<function>.<version>``."""

    function: str
    version: int
    proofs: tuple[str, ...]
    """``Ready.proof`` of its instances."""


class Term(Record, frozen=True, kw_only=True):
    """The fence. Key ``term``, written once per election; on ``subjects.LEADER`` the leader says who it is."""

    term: int
    controller: str


class Lease(Record, frozen=True, kw_only=True):
    """The leader of ``term`` is alive: written again and again, each time with another ``beat``. Standbys compare what
    they read, by their own clocks. ``released``: it has ended in order, and another one may lead at once."""

    term: int
    controller: str
    beat: int = 0
    released: bool = False

"""What controller and nodes say to each other. Commands are idempotent; the node's status report is the only
answer that counts (level-triggered: a lost message is repaired by the next report)."""

from __future__ import annotations

from typing import Final

import msgspec

from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.records import ModelRecord, Record
from sllm_runtime.protocol.secrets import Secrets
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.timeline import Span

AWAITS_NODE: Final = "node"
"""Stage of a start that waits for a node which is to come."""
CAPACITY: Final = "capacity"
"""Stage of a start that waits for room; ``Progress.message`` says what for."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a start or a model's registration is. ``total`` 0: not known."""

    stage: str
    done: int = 0
    total: int = 0
    unit: str = "B"
    message: str = ""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator of a node."""

    index: int
    kind: str
    memory: int
    used_by: str | None = None
    """The instance that holds it; it holds all of it."""


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as its node sees it now."""

    instance: str
    function: str
    version: int
    state: InstanceState
    progress: Progress | None = None
    error: ErrorBody | None = None
    fingerprint: str = ""
    capabilities: tuple[str, ...] = ()
    """As ``Ready``'s."""
    spans: tuple[Span, ...] = ()
    running: int = 0
    """Calls it works on."""
    served: int = 0
    """Calls that ended there, but for those that were cancelled; 0: also of a node of before."""
    whole: int = -1
    """Of these, those that had begun there; -1: of a node of before, all."""
    worked_s: float = 0.0
    """Seconds that these took together."""
    idle_s: float = 0.0
    """Seconds since its last call ended (since READY if there was none); 0 while it works."""
    context: int = 0
    """Tokens, in and out, of its call that has most, as its worker said last; 0: of a worker of before, or it has no
    engine."""
    release_s: float | None = None
    """Of one that was told to end, once all that it held is free: seconds since it had nothing left to do. None until
    then, and of a node of before."""
    proof: str = ""
    """``Ready.proof``, for its version's starts on other nodes: told in the first PROOF_S seconds. Empty: it has none,
    or its node is of before."""
    content: str = ""
    """Of what it was made: where a function was deleted another one may have its name and its versions' numbers. Empty:
    its node, or who began it, is of before."""


class PathLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A way that weights come by on this node, named as ``protocol.loader.path_of`` does: bytes per second as measured
    (0: never used) and the bytes that a start which begins now waits behind. ``served``: loads were measured, not only
    what a probe read."""

    path: str
    bandwidth: float
    queued: int
    served: bool = False


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A device that loaderd loads to: bytes of its memory in all, and with partitions."""

    device: str
    limit: int
    used: int


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's loaderd has to load from and to, in bytes; for people."""

    dram_ready: int = 0
    """Of the pool's free chunks, those that have their pages."""
    ssd_used: int = 0
    ssd_limit: int = 0
    """Copies of remote models."""
    disk_free: int = 0
    integrity: bool = True
    """Whether what is loaded is compared with its digests."""
    devices: tuple[DeviceMemory, ...] = ()


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """Weights that instances of one node share: ``nbytes`` of its memory are set aside for them once, until the last of
    ``instances`` that use them has ended."""

    nbytes: int
    instances: int


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node's report: at once where an instance has moved in its life, at every other change (coalesced to 20 ms), and
    every HEARTBEAT_S."""

    node: str
    boot: str
    """Random id of this life of the invoker; another one means that all its instances are gone."""
    since: float = 0.0
    """When that began, in seconds since 1970; 0: a node of before does not say."""
    sequence: int
    term: int
    """Highest controller term this node has obeyed."""
    cpu: float
    memory: int
    """Bytes for instances: the machine's, less what loaderd's pool may grow to."""
    free_cpu: float
    free_memory: int
    gpus: tuple[Gpu, ...] = ()
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    draining: bool = False
    pool_idle: int = 0
    """Pre-warmed sandboxes that wait."""
    sandbox_s: float = 0.0
    """Seconds in which its last sandbox for any function was made: what a start takes that finds none waiting. 0: none
    was made yet."""
    models: tuple[str, ...] = ()
    """Digests on its SSD."""
    resident: tuple[str, ...] = ()
    """Digests wholly in its DRAM pool."""
    remote: tuple[str, ...] = ()
    """Those of ``models`` whose bytes are not on its SSD but at a source that it knows."""
    copied: dict[str, int] = {}
    """Bytes of its copies of remote models, by digest."""
    paths: tuple[PathLoad, ...] = ()
    coming: int = 0
    """Bytes of weights that those of ``instances`` which start have yet to ask for: no path has them queued."""
    dram_limit: int = 0
    dram_used: int = 0
    storage: Storage | None = None
    """None: loaderd is away."""
    python: str = ""
    """Minor version of its workers' Python, ``"3.11"``; empty: not said."""
    drivers: tuple[str, ...] = ("process",)
    """Kinds of sandbox it can make: ``process``, ``container``."""
    condition: str = ""
    """Why it can make no sandbox now, in words; nothing is started there while it is said. Empty: it can."""
    instances: tuple[InstanceStatus, ...] = ()
    shared: dict[str, Shared] | None = None
    """Models that its instances use, by digest: ``free_memory`` is without their bytes, once each. None: a node of
    before, which sets them aside for each instance."""
    untold: int = 0
    """Models on the node of which this report says nothing: it, or what loaderd told, has no room for all."""
    left_cpu: float | None = None
    """CPUs that it may promise yet, to all of its instances together: more than it has, of which ``free_cpu`` is what
    one may get. None: a node of before, or it promises no more than it has."""
    version: int = PROTOCOL_VERSION


class NodeRecord(Record, frozen=True, kw_only=True):
    """A node the controller has seen, and what an operator decided about it. Bucket ``nodes``."""

    node: str
    cordoned: bool = False
    """Nothing is started there."""
    draining: bool = False
    """What is there leaves: running calls move to other nodes."""
    first_seen: float = 0.0


class StartInstance(msgspec.Struct, frozen=True, kw_only=True):
    """Controller → node: begin this instance. Asked twice with one id, it is begun once."""

    term: int
    instance: str
    function: str
    version: int
    manifest: Manifest
    bundle: str
    bundle_bytes: int
    model: ModelRecord | None = None
    adapters: dict[str, ModelRecord] = {}
    """By the names that calls choose them by."""
    gpus: tuple[int, ...] = ()
    secrets: Secrets = Secrets()
    content: str = ""
    """``VersionRecord.content``, which the node's reports repeat."""
    proofs: tuple[str, ...] = ()
    """``InstanceStatus.proof`` of instances of the same version, on whichever nodes."""

    @property
    def models(self) -> dict[str, int]:
        """Bytes of the model and its adapters, by digest."""
        models = (*self.adapters.values(), *((self.model,) if self.model is not None else ()))
        return {model.digest: model.nbytes for model in models}

    @property
    def weights(self) -> int:
        """Bytes of the model and its adapters."""
        return sum(self.models.values())


class StopInstance(msgspec.Struct, frozen=True, kw_only=True):
    """Controller → node: drain (running calls go on for ``grace_s``), then end it. Unknown instance: nothing to do."""

    term: int
    instance: str
    reason: str
    grace_s: float = 0.0
    resume: bool = False
    """What still runs then is not cancelled: to gateways the instance is lost, and they go on elsewhere with calls that
    can."""


class ReadBundle(msgspec.Struct, frozen=True, kw_only=True):
    """Node → any gateway: the part of a bundle behind that of number ``after`` (0: the first one) of the copy ``nuid``
    (empty: the one that is stored now)."""

    digest: str
    nuid: str = ""
    after: int = 0


class BundlePart(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. ``data`` is None where that copy is no more: another one may have taken its place."""

    nuid: str
    parts: int
    """Of the whole bundle."""
    number: int = 0
    data: bytes | None = None


class PrepareModel(msgspec.Struct, frozen=True, kw_only=True):
    """Controller → node: have this model on the SSD. Long-polled: answered when done or after ``wait_s``."""

    term: int
    uri: str
    digest: str | None = None
    """Expected content; another one is ``DigestMismatch``."""
    wait_s: float = 5.0


class PrepareReply(msgspec.Struct, frozen=True, kw_only=True):
    """``model`` when done; otherwise how far it is. Errors travel in the reply envelope."""

    model: ModelRecord | None = None
    progress: Progress | None = None


class PullModel(msgspec.Struct, frozen=True, kw_only=True):
    """Controller → node: have all of this model on the disk. Long-polled as ``PrepareModel`` and answered as it is."""

    term: int
    model: ModelRecord
    wait_s: float = 5.0


class KeepModels(msgspec.Struct, frozen=True, kw_only=True):
    """Controller → node: the models that are to lie on the SSD, in place of those that were named before. Their copies
    go last."""

    term: int
    models: tuple[str, ...]


class ModelCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Controller → node: ``validate`` or ``delete`` a model."""

    term: int
    verb: str
    digest: str
    wait_s: float = 60.0


class Ok(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted. ``note`` says what happened, for people."""

    note: str = ""

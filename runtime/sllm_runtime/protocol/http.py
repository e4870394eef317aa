"""Names on the HTTP border and the shapes of ``/api/v1`` that gateway, SDK and CLI share (see docs/http.md)."""

from __future__ import annotations

from base64 import b64decode
from typing import Annotated, Any, Final, Literal

from pydantic import Base64Encoder, EncodedBytes, Field
from pydantic_core import PydanticCustomError

from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.limits import MAX_BUNDLE
from sllm_runtime.protocol.manifest import Frozen, Manifest, Place

CALL_ID: Final = "Sllm-Call-Id"
EXACT: Final = "Sllm-Exact"
"""``false``: the same tokens are not promised to come again, in another batch or after a resume. Else left out."""
SHOULD_RETRY: Final = "x-should-retry"
SERVER_TIMING: Final = "Server-Timing"
EVENT_STREAM: Final = "text/event-stream"
API: Final = "/api/v1"
CALLS: Final = "/v1/calls"
REQUEST_ID: Final = r"^[0-9a-f]{32}$"
"""What names a deployment that goes on."""
VERSION_PART: Final = r"^v[1-9][0-9]{0,8}$"
MODEL_DIGEST: Final = r"^(sha256:)?[0-9a-f]{4,64}$"
"""The first digits do."""
BUNDLE_DIGEST: Final = r"^(?:sha256:)?([0-9a-f]{64})$"
CALL_PART: Final = r"^[A-Za-z0-9_-]{1,80}$"
IDEMPOTENCY_KEY: Final = r"^[\x20-\x7e]{1,255}$"
"""Of parts of a path or a query, and of a header: to be matched whole (``fullmatch``)."""
NODE_WISHES: Final = ("cordon", "uncordon", "drain")
MOST_CALLS: Final = 1000
SOME_CALLS: Final = 100
"""Calls of a page: at most, and where it is not said."""
MOST_LINES: Final = 10_000
SOME_LINES: Final = 1000
"""Lines of a log, or events, from before: at most, and where it is not said."""

MOST_VERSIONS: Final = 2**31
"""No function has more."""


class ErrorView(Frozen):
    """``{"error": {...}}`` on every route but OpenAI's."""

    code: str
    message: str
    retryable: bool = False
    field: str | None = None
    stage: str | None = None
    call_id: str | None = None


class ErrorEnvelope(Frozen):
    error: ErrorView


def error_view(body: ErrorBody, call_id: str | None) -> dict[str, Any]:
    """The JSON body of an error outside OpenAI's routes."""
    view = ErrorView(
        code=body.code,
        message=body.message,
        retryable=body.retryable,
        field=body.field,
        stage=body.stage,
        call_id=call_id,
    )
    return {"error": view.model_dump(exclude_none=True) | {"call_id": call_id}}


class DeployRequest(Frozen):
    """``POST /api/v1/functions``; the bundle was put to ``/api/v1/bundles/{digest}`` before."""

    manifest: Manifest
    bundle: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    bundle_bytes: int = Field(ge=1, le=MAX_BUNDLE)
    request: str | None = Field(default=None, pattern=REQUEST_ID)
    """A fresh random name, by which ``DELETE /api/v1/deployments/{request}`` undoes a deployment that goes on."""


class ProgressView(Frozen):
    stage: str
    done: int = 0
    total: int = 0
    unit: str = "B"
    message: str = ""


class VersionView(Frozen):
    version: int
    state: str
    active: bool
    bundle: str
    bundle_bytes: int
    model: str | None = None
    created: float
    error: ErrorView | None = None


class InstanceView(Frozen):
    instance: str
    version: int
    node: str
    state: str
    error: ErrorView | None = None
    fingerprint: str = ""
    """Its numerics class: instances with equal ones compute the same bits. Empty before it is ready."""
    capabilities: tuple[str, ...] = ()
    """``engine:<name>`` and what that engine can do."""


class FunctionView(Frozen):
    name: str
    active: int | None
    url: str
    streams: bool
    openai: bool
    """Whether the OpenAI routes serve it."""
    deleting: bool = False
    """It takes no more calls, and goes once those that run have finished."""
    manifest: Manifest | None = None
    versions: tuple[VersionView, ...] = ()
    instances: tuple[InstanceView, ...] = ()


class FunctionListView(Frozen):
    functions: tuple[FunctionView, ...]


class DeployResult(Frozen):
    """The last event of a deployment's stream (``event: done``); ``event: progress`` with ``ProgressView`` before."""

    function: FunctionView
    version: int
    unchanged: bool = False
    notes: tuple[str, ...] = ()
    """What whoever deploys should know, in words: options that are kept and have no effect yet."""


class WithdrawnView(Frozen):
    """``undone``: nothing is left of the deployment; else ``version`` had the route already."""

    undone: bool
    version: int | None = None


class RollbackRequest(Frozen):
    version: int | None = Field(default=None, ge=1, le=MOST_VERSIONS)
    request: str | None = Field(default=None, pattern=REQUEST_ID)
    """A fresh random name: sent again, it is done once."""


class WarmupRequest(Frozen):
    """``POST /api/v1/functions/{name}/warmup``; ``version``: not the active one."""

    instances: int = Field(default=1, ge=1, le=1000)
    version: int | None = Field(default=None, ge=1, le=MOST_VERSIONS)


class WarmView(Frozen):
    """Instances that are ready of those that were asked for; ``progress`` of a start, or why there is none."""

    function: str
    version: int
    wanted: int
    ready: int
    progress: ProgressView | None = None


class DeletedView(Frozen):
    """``deleted`` false: it takes no more calls and goes once those that run have ended."""

    function: str
    deleted: bool
    note: str = ""


class BundleView(Frozen):
    digest: str
    bytes: int


class ModelRegisterRequest(Frozen):
    uri: Place = Field(min_length=1)


class PullRequest(Frozen):
    """``POST /api/v1/models/{digest}/pull``; no ``nodes``: all that are up."""

    nodes: tuple[str, ...] = Field(default=(), max_length=10_000)


class PlacedView(Frozen):
    """A model that nodes read from a source. ``popularity``: its starts, each half as much after every hour."""

    model: str
    bytes: int
    popularity: float
    wanted: tuple[str, ...] = ()
    there: tuple[str, ...] = ()


class PlacementView(Frozen):
    """``GET /api/v1/placement``, and ``POST`` to decide anew: the most popular models first, at most 1,000."""

    models: tuple[PlacedView, ...]


class MigrateRequest(Frozen):
    """``POST /api/v1/instances/{instance}/migrate``. ``to``: a node; empty: the scheduler chooses one."""

    to: str = Field(default="", max_length=80)


class MigrationView(Frozen):
    """How far it is: ``PREPARING``, ``MOVING``, ``DONE`` or ``ABANDONED`` (then ``note`` says why). ``running``: calls
    that the source still works on."""

    instance: str
    destination: str
    node: str
    state: str
    running: int = 0
    note: str = ""


class ModelView(Frozen):
    digest: str
    uri: str
    bytes: int
    partitions: tuple[int, ...]
    architecture: str
    tensors: int
    dtype: str
    adapter: str = ""
    """The base model that it names, if it is a LoRA adapter."""
    nodes: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()
    problem: str = ""


class ModelListView(Frozen):
    models: tuple[ModelView, ...]


class GpuView(Frozen):
    index: int
    kind: str
    memory: int
    used_by: str | None = None


class NodeView(Frozen):
    """``left``: it has left NATS, which tells of its death before its silence does."""

    node: str
    alive: bool
    left: bool = False
    cordoned: bool
    draining: bool
    age_s: float
    cpu: float
    free_cpu: float
    memory: int
    free_memory: int
    gpus: tuple[GpuView, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    pool_idle: int = 0
    models: int = 0
    resident: int = 0
    untold: int = 0
    """Models on it beside these, of which its report has no room to tell."""
    dram_used: int = 0
    dram_limit: int = 0
    instances: int = 0
    condition: str = ""
    """Why it makes no sandboxes now; empty: nothing is in the way."""


class PathView(Frozen):
    """A way that weights come by: bytes per second as measured (0: never used), bytes that a start waits behind."""

    path: str
    bandwidth: float
    queued: int


class DeviceView(Frozen):
    """Bytes of a device's memory, and of them with weights."""

    device: str
    limit: int
    used: int


class StorageView(Frozen):
    """Where a node loads from and to, in bytes. ``integrity``: what is loaded is compared with its digests."""

    dram_used: int
    dram_limit: int
    dram_ready: int
    ssd_used: int
    ssd_limit: int
    disk_free: int
    integrity: bool = True
    devices: tuple[DeviceView, ...] = ()
    paths: tuple[PathView, ...] = ()


class HereView(Frozen):
    """An instance as its node has reported it last. ``running``: calls that it works on."""

    instance: str
    function: str
    version: int
    state: str
    running: int = 0


class NodeDetailView(NodeView):
    """``GET /api/v1/nodes/{node}``. ``tiers``: by model, ``dram``, ``ssd`` and ``source`` (its bytes are elsewhere).

    ``storage``: none while the node's loaderd is away. ``here``: those that ``instances`` counts.
    """

    storage: StorageView | None = None
    here: tuple[HereView, ...] = ()
    tiers: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class NodeListView(Frozen):
    nodes: tuple[NodeView, ...]


class NodeDetailListView(Frozen):
    """``GET /api/v1/nodes?detail=true``."""

    nodes: tuple[NodeDetailView, ...]


class WayView(Frozen):
    """How room could be made on a node: ``by`` ``ending``, ``moving`` or ``waiting``; seconds until the start would be
    ready there."""

    by: str
    how: str
    seconds: float | None = None


class CandidateView(Frozen):
    """A node for one more instance. ``seconds``: of a start there, were there room. ``why`` empty: nothing is in the
    way; else ``ways`` to make room, as far as the policy weighs them."""

    node: str
    seconds: float | None = None
    expected: str = ""
    why: str = ""
    ways: tuple[WayView, ...] = ()


class MoveView(Frozen):
    """Calls of ``instance`` that make room by going on at node ``to``: seconds as expected, and as it took."""

    instance: str
    node: str
    to: str
    state: str
    seconds: float | None = None
    took: float | None = None


class StartView(Frozen):
    """An instance's start: seconds as expected, and as it took. ``at``: Unix seconds of when that was recorded; 0: it
    is so now. ``state`` empty: it is there no more."""

    instance: str
    node: str
    state: str
    seconds: float | None = None
    expected: str = ""
    took: float | None = None
    at: float = 0.0


class OutcomeView(Frozen):
    """A prediction beside what came, in seconds: of a ``start``; of a ``wait``, ``evict`` or ``migrate``, from when
    that was decided until the instance was ready; of a ``move``; of a ``release``."""

    what: str
    instance: str
    node: str
    expected: float
    took: float


class ExplainView(Frozen):
    """``GET /api/v1/explain/{what}``, of a function, or of a call that a gateway has open or that has ended there of
    late: then ``call``, its ``state``, the ``instance`` that it runs or ran on, its ``timeline``, its ``error`` and
    what it ``waits`` for. ``past``: candidates and decision are of the start in ``starts``, and of the time when that
    was decided. ``moves``: what goes, or went, elsewhere to make room. Starts of a function are also its last ones that
    were recorded, by whatever controller."""

    function: str
    version: int
    policy: str
    decision: str
    node: str = ""
    possible: bool = True
    pending: str = ""
    candidates: tuple[CandidateView, ...] = ()
    starts: tuple[StartView, ...] = ()
    moves: tuple[MoveView, ...] = ()
    outcomes: tuple[OutcomeView, ...] = ()
    call: str | None = None
    state: str | None = None
    instance: str | None = None
    timeline: str = ""
    error: str = ""
    waits: str = ""
    past: bool = False


class LogView(Frozen):
    """One ``data`` of ``GET /api/v1/functions/{name}/logs`` (SSE; ``follow``, ``call``, ``limit``, ``since``)."""

    at: float
    version: int
    instance: str
    node: str
    stream: str
    text: str
    level: Literal["debug", "info", "warning", "error"] | str = "info"
    call: str | None = None
    dropped: int = 0


class UsageView(Frozen):
    prompt: int
    completion: int
    cached: int


class PromisedView(Frozen):
    """202 for who prefers ``respond-async``: the call is kept, and found at ``/v1/calls/{id}``."""

    id: str
    state: str


class CallView(Frozen):
    """``GET /v1/calls/{id}``: a call that is kept, or else one that a gateway has open (``kept`` false). Times are Unix
    seconds. ``result``: what the route would have answered without streaming, once it has succeeded and as long as it
    is kept; None where that is ``output_too_large``, as ``error`` then says. ``instance``: where it runs or ran last.
    ``tokens``: that came so far, where that is known. ``waits``: what for, while it is ``QUEUED`` or ``STARTING``, in
    words; empty also where no gateway says."""

    id: str
    function: str
    version: int
    state: str
    created: float
    started: float | None = None
    finished: float | None = None
    usage: UsageView | None = None
    error: ErrorView | None = None
    kept: bool = True
    instance: str = ""
    gateway: str = ""
    tokens: int = 0
    waits: str = ""
    result: Any = None


class CallListView(Frozen):
    """The newest first, without results. ``next``: for ``after``; empty: there are no more. ``silent``: gateways that
    have not answered; what is open there and not kept is left out."""

    calls: tuple[CallView, ...]
    next: str = ""
    silent: tuple[str, ...] = ()


class CancelledView(Frozen):
    """``POST /v1/calls/{id}/cancel``: how it stands. ``SUCCEEDED`` or ``FAILED``: it had ended before; ``QUEUED`` or
    ``RUNNING``: no gateway has it now, and the one that goes on with it will end it. Earlier releases do not say."""

    id: str
    state: str = "CANCELLED"


class _Base64(Base64Encoder):
    """Pydantic's passes over what is no base64, so that text, and the other alphabet, become other bytes unsaid."""

    @classmethod
    def decode(cls, data: bytes) -> bytes:
        try:
            return b64decode(data.translate(None, b"\r\n"), validate=True)
        except ValueError as error:
            raise PydanticCustomError(
                "base64_decode",
                "it is no base64 ({error}); of text and files `sllm secret set` makes it",
                {"error": str(error)},
            ) from error


class SecretRequest(Frozen):
    """Body of ``PUT /api/v1/secrets/{name}``. ``value``: its bytes in base64."""

    value: Annotated[bytes, EncodedBytes(encoder=_Base64)]

    def __repr__(self) -> str:
        return "SecretRequest()"


class SecretView(Frozen):
    """A secret without its value. ``functions``: whose active version has it."""

    name: str
    stored: float
    functions: tuple[str, ...] = ()


class NodeForgottenView(Frozen):
    node: str
    forgotten: bool = True


class SecretDeletedView(Frozen):
    name: str
    deleted: bool = True


class SecretListView(Frozen):
    """``GET /api/v1/secrets``, by name."""

    secrets: tuple[SecretView, ...]


class StatusView(Frozen):
    """``GET /api/v1/status``."""

    version: str
    gateway: str
    controller: bool
    nodes: int
    functions: int

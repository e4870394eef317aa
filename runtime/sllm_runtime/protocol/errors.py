"""The error tree: every failure a person or a component can see, with its wire code and HTTP status.

One class per wire code. A message says what happened, to what, and what to do next. ``ErrorBody`` is the
form in which an error crosses a process border; ``ErrorBody.to_error`` gives back the class.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec


class ErrorBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error on the wire. ``status`` travels so that an unknown (newer) code keeps its HTTP status."""

    code: str
    message: str
    status: int = 500
    retryable: bool = False
    field: str | None = None
    stage: str | None = None
    retry_after_s: float | None = None
    detail: str | None = None
    """Longer text for the log (a traceback); never sent to callers of a function."""

    def to_error(self) -> SllmError:
        """The typed exception for this body; an unknown code becomes a plain ``SllmError`` that keeps it."""
        cls = BY_CODE.get(self.code, SllmError)
        error = cls(
            self.message,
            field=self.field,
            stage=self.stage,
            retry_after_s=self.retry_after_s,
            detail=self.detail,
        )
        if cls is SllmError:
            error.override(self.code, self.status, self.retryable)
        return error


class SllmError(Exception):
    """Root of the tree. ``code`` is the wire code, ``status`` the HTTP status before any body was sent."""

    code: str = "internal"
    status: int = 500
    retryable: bool = False
    exit_code: ClassVar[int] = 1
    """Exit status of the CLI: 1 platform, 2 the request was wrong, 3 not there, 4 not allowed, 5 try again."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        stage: str | None = None,
        retry_after_s: float | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.stage = stage
        self.retry_after_s = retry_after_s
        self.detail = detail

    def override(self, code: str, status: int, retryable: bool) -> None:
        """Keep the identity of an error whose class this release does not know."""
        self.code, self.status, self.retryable = code, status, retryable

    def body(self) -> ErrorBody:
        """This error as it crosses a process border."""
        return ErrorBody(
            code=self.code,
            message=self.message,
            status=self.status,
            retryable=self.retryable,
            field=self.field,
            stage=self.stage,
            retry_after_s=self.retry_after_s,
            detail=self.detail,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.body(),))


def _rebuild(body: ErrorBody) -> SllmError:
    return body.to_error()


class InternalError(SllmError):
    """A bug of ours. The log has the traceback."""


# --- the request itself is wrong ------------------------------------------------------------------
class InvalidRequest(SllmError):
    code, status, exit_code = "invalid_request", 400, 2


class MalformedJson(InvalidRequest):
    code = "malformed_json"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class InvalidArgument(InvalidRequest):
    """A missing, wrong or unknown argument; ``field`` is its path."""

    code, status = "invalid_argument", 422


class InvalidManifest(InvalidRequest):
    code, status = "invalid_manifest", 422


class Unsatisfiable(InvalidRequest):
    """No node of this cluster could ever run it; the message names the nearest node."""

    code, status = "unsatisfiable", 422


class InvalidBundle(InvalidRequest):
    code, status = "invalid_bundle", 422


class ImageFailed(InvalidRequest):
    """The image that a function asks for cannot be made; the message has the last words of what was to make it."""

    code, status = "image_failed", 422


class PythonMismatch(InvalidRequest):
    code, status = "python_mismatch", 422


class DigestMismatch(InvalidRequest):
    code, status = "digest_mismatch", 422


class BodyTooLarge(InvalidRequest):
    code, status = "body_too_large", 413


class HeadTooLarge(InvalidRequest):
    """A request's line and headers."""

    code, status = "head_too_large", 431


class HeadTimeout(InvalidRequest):
    """A request's line and headers did not come within their time."""

    code, status, retryable = "head_timeout", 408, True
    exit_code = 5


class BodyTimeout(InvalidRequest):
    """The body did not come within its time. Nothing was begun, so it may be sent again."""

    code, status, retryable = "body_timeout", 408, True
    exit_code = 5


class MethodNotAllowed(InvalidRequest):
    code, status = "method_not_allowed", 405
    allow = ""
    """Methods that the route takes, as the header of that name has them."""


class NotStorable(InvalidRequest):
    """A record that the store of the state refuses for good, however often it is written; the message names it."""

    code, status = "not_storable", 422


class UnsupportedModel(InvalidRequest):
    """The model's architecture, format or dtype cannot run here; the message names it."""

    code, status = "unsupported_model", 422


# --- checkpoints ----------------------------------------------------------------------------------
class InvalidCheckpoint(SllmError):
    """An index, partition or source that breaks the format (bounds, overlap, version, hole)."""

    code, status, exit_code = "invalid_checkpoint", 422, 2


class CorruptCheckpoint(InvalidCheckpoint):
    """Bytes that do not match their digest, or a file shorter than its index says."""

    code, status = "corrupt_checkpoint", 503


# --- not there, not allowed -----------------------------------------------------------------------
class NotFound(SllmError):
    code, status, exit_code = "not_found", 404, 3


class FunctionNotFound(NotFound):
    code = "function_not_found"


class VersionNotFound(NotFound):
    code = "version_not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class NodeNotFound(NotFound):
    code = "node_not_found"


class CallNotFound(NotFound):
    code = "call_not_found"


class JournalExpired(NotFound):
    """The call is known, and its answer is no longer kept."""

    code, status = "journal_expired", 410


class SecretNotFound(NotFound):
    """A secret that a function or a request names is not stored."""

    code = "secret_not_found"


class InstanceNotFound(NotFound):
    code = "instance_not_found"


class Unauthorized(SllmError):
    code, status, exit_code = "unauthorized", 401, 4


class Forbidden(SllmError):
    code, status, exit_code = "forbidden", 403, 4


class Conflict(SllmError):
    code, status, exit_code = "conflict", 409, 2


class StaleTerm(Conflict):
    """A command or write of a deposed controller. Read ``term`` again; step down only if it changed."""

    code = "stale_term"


# --- try again ------------------------------------------------------------------------------------
class QueueFull(SllmError):
    code, status, retryable, exit_code = "queue_full", 429, True, 5


class Unavailable(SllmError):
    """A part of the platform cannot be reached just now."""

    code, status, retryable, exit_code = "unavailable", 503, True, 5


class NoController(Unavailable):
    """No controller that leads has answered. What was asked may have been done; asked again it is done once."""

    code = "no_controller"


class NoCapacity(Unavailable):
    code = "no_capacity"


class StoreFull(Unavailable):
    """What is kept of calls, or the state, has no room for more just now; the message names the stream that is full."""

    code = "store_full"


class Draining(Unavailable):
    code = "draining"


class GatewayStopped(Draining):
    """The gateway stopped while an instance had the call, which no other gateway can go on with: it may have been done
    in part, so unlike ``draining`` it is no proof that no function has seen it."""

    code = "gateway_stopped"


class CallMoved(SllmError):
    """Another gateway goes on with the call, since this one stops or did not run for a while; it is read on there."""

    code, status, retryable, exit_code = "call_moved", 503, True, 5


class GatewaySilent(Unavailable):
    """The call's node has heard nothing of its gateway for so long that it gave the call up."""

    code = "gateway_silent"


class PoolExhausted(Unavailable):
    """The chunk pool is too small; the message says how much is needed and what holds the rest."""

    code = "pool_exhausted"


class DeviceOutOfMemory(PoolExhausted):
    """A device's memory is too small; the message says how much is needed and what holds the rest."""

    code = "device_out_of_memory"


class StartFailed(SllmError):
    """An instance did not become ready; ``stage`` says where, the message why."""

    code, status, exit_code = "start_failed", 503, 5


class OutOfMemory(StartFailed):
    code = "out_of_memory"


class InstanceLost(SllmError):
    """The instance died or stopped answering while the call ran."""

    code, status, retryable, exit_code = "instance_lost", 502, True, 5


# --- time -----------------------------------------------------------------------------------------
class DeadlineExceeded(SllmError):
    code, status, exit_code = "deadline_exceeded", 504, 5


class IdleTimeout(DeadlineExceeded):
    code = "idle_timeout"


class QueueTimeout(DeadlineExceeded):
    code, status, retryable = "queue_timeout", 503, True


class StartTimeout(StartFailed):
    code = "start_timeout"


# --- the function or its caller -------------------------------------------------------------------
class FunctionError(SllmError):
    """The user's function raised; the message is its type and text, the traceback is in the log."""

    code = "function_error"


class NotDeterministic(FunctionError):
    code = "not_deterministic"


class OutputTooLarge(FunctionError):
    code = "output_too_large"


class Cancelled(SllmError):
    code, status, exit_code = "cancelled", 499, 1


class SlowConsumer(Cancelled):
    code, status = "slow_consumer", 408


# --- between components ---------------------------------------------------------------------------
class ProtocolError(SllmError):
    """A message that breaks the protocol: wrong version, size, order or rights."""

    code = "protocol_error"


def _tree(cls: type[SllmError]) -> list[type[SllmError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _tree(child))]


BY_CODE: dict[str, type[SllmError]] = {cls.code: cls for cls in _tree(SllmError)}
BY_CODE["internal"] = InternalError

NEVER_RAN: Final = frozenset({"queue_full", "unavailable", "no_capacity", "store_full", "draining"})
"""Codes that prove that no function has seen the call, so that sending it again cannot run it twice."""

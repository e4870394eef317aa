"""How an instance ends, and what those who wait for it are told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sllm_invoker import exits
from sllm_invoker.sandbox import Exit
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import Cancelled, InstanceLost, SllmError, StartTimeout
from sllm_runtime.protocol.node import StartInstance
from sllm_runtime.protocol.states import InstanceState


@dataclass(frozen=True)
class Verdict:
    """The state an instance ends in, why, and what its running calls are told (None: that it was lost)."""

    state: InstanceState
    error: SllmError | None = None
    calls: SllmError | None = None


def failed(error: SllmError, stage: str) -> Verdict:
    """It never became ready."""
    if error.stage is None:
        error.stage = stage
    return Verdict(InstanceState.FAILED, error, error)


def lost(error: SllmError) -> Verdict:
    """It was ready, and is no more."""
    return Verdict(InstanceState.LOST, error, error)


def start_timeout(order: StartInstance, stage: str, why: str, short: bool) -> Verdict:
    """It took longer than its ``startup_timeout``. ``short``: it has used up its memory."""
    if short:
        took = f"was not ready within {order.manifest.startup_timeout:g} s"
        return failed(exits.exhausted_at_start(order.instance, stage, took, _limit(order)), stage)
    because = f" ({why})" if why else ""
    error = StartTimeout(
        f"instance {order.instance} was not ready within {order.manifest.startup_timeout:g} s:"
        f" it hangs in stage {stage}{because}. Look at the function's logs, or raise `startup_timeout`",
    )
    return failed(error, stage)


def died_at_start(order: StartInstance, stage: str, end: Exit, tail: Sequence[str], for_memory: bool) -> Verdict:
    """Its worker ended before it was ready. With its fork server, which says nothing of its function: no back-off is
    due to that. ``for_memory``: the kernel killed something for memory meanwhile, maybe for what this start took."""
    if end.orphaned and not for_memory:
        gone = f"the node's fork server ended while instance {order.instance} started, and its worker with it"
        return failed(InstanceLost(gone), stage)
    error = exits.start_error(order.instance, stage, end, tail, for_memory, _limit(order), order.weights)
    return failed(error, stage)


def died(order: StartInstance, end: Exit, tail: Sequence[str], for_memory: bool) -> Verdict:
    """Its worker ended though nobody had asked it to."""
    return lost(exits.lost_error(order.instance, end, tail, for_memory, _limit(order), order.weights))


def _limit(order: StartInstance) -> int:
    """Bytes that it may have."""
    return order.manifest.memory + order.weights


def broken(instance: str, error: SllmError) -> Verdict:
    """One of its processes takes nothing, or one that takes no calls has failed, and what it has of the model with
    it."""
    return lost(InstanceLost(f"a process of instance {instance} failed: {error.message}; call again"))


def silent(order: StartInstance, short: bool) -> Verdict:
    """No heartbeat. ``short``: it has used up its memory."""
    quiet = f"gave no sign of life for {limits.LOST_AFTER_S:g} s and was killed"
    if short:
        return lost(exits.exhausted(order.instance, quiet, _limit(order)))
    return lost(InstanceLost(f"instance {order.instance} {quiet}; call again"))


def deaf(instance: str, call: str) -> Verdict:
    """It does not hear a cancel."""
    return lost(
        InstanceLost(
            f"instance {instance} was killed: it went on with call {call} for {limits.LOST_AFTER_S:g} s after that"
            " was cancelled. Call again"
        )
    )


def stopped(instance: str, reason: str) -> Verdict:
    """It ended as asked; what still ran was cancelled."""
    return Verdict(InstanceState.STOPPED, calls=Cancelled(f"instance {instance} was stopped: {reason}"))


def taken(instance: str, reason: str) -> Verdict:
    """It ended as asked; what still ran may go on elsewhere."""
    lost = InstanceLost(f"instance {instance} was stopped: {reason}; call again")
    return Verdict(InstanceState.STOPPED, calls=lost)


def shut_down(instance: str) -> Verdict:
    """Its node ends."""
    return Verdict(
        InstanceState.STOPPED,
        calls=InstanceLost(f"the node of instance {instance} is shutting down; call again"),
    )

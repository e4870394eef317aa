"""An instance's life: how reports, silence and answers to commands move it along ``states.INSTANCE``. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Final

import msgspec

from sllm_runtime.control import backoff
from sllm_runtime.control.fits import need_in, short, total
from sllm_runtime.control.placement import may_start
from sllm_runtime.control.scheduling.learned import OVER
from sllm_runtime.control.scheduling.prediction import Estimate, reading, slowest_link
from sllm_runtime.control.view import STARTING, Failure, Instance, Refusal, Stop, View
from sllm_runtime.protocol.errors import ErrorBody, InstanceLost, StartFailed
from sllm_runtime.protocol.loader import DISK, path_of
from sllm_runtime.protocol.node import InstanceStatus
from sllm_runtime.protocol.states import INSTANCE, InstanceState, check
from sllm_runtime.protocol.timeline import CONVERT, WEIGHTS, Span, sane, shift

BARRED_S: Final = 60.0
"""So long after its version's back-off a node is left alone on which a start failed, where another one has room."""
_BAD_ENDS = (InstanceState.FAILED, InstanceState.LOST)


def path(old: InstanceState, new: InstanceState) -> tuple[InstanceState, ...]:
    """The states that lead from ``old`` to ``new`` (a report may skip some); empty if none do or nothing changes.

    An end always leads somewhere: a FAILED of one that was ready is LOST.
    """
    ways: deque[tuple[InstanceState, tuple[InstanceState, ...]]] = deque([(old, ())])
    while old != new and ways:
        state, way = ways.popleft()
        if new in INSTANCE[state]:
            return (*way, new)
        ways.extend((step, (*way, step)) for step in sorted(INSTANCE[state]) if INSTANCE[step] and step not in way)
    if old != new and not INSTANCE[new] and INSTANCE[old]:
        return (InstanceState.LOST,)
    return ()


def move(instance: Instance, new: InstanceState, error: ErrorBody | None = None) -> Instance:
    """``instance`` in state ``new``, by allowed steps only; unchanged if no step leads there."""
    state = instance.state
    for step in path(state, new):
        state = check(INSTANCE, state, step)
    if state == instance.state:
        return instance
    kept = error if state in _BAD_ENDS else None
    return replace(instance, record=msgspec.structs.replace(instance.record, state=state, error=kept))


def ready_spans(instance: Instance, status: InstanceStatus, now: float) -> tuple[Span, ...]:
    """The start's spans from placement on. The node's begin when the command reached it: what the controller's clock
    saw beyond them is the way there and back, in equal parts."""
    if not status.spans:
        return ()
    node_ms = max(span.at + span.ms for span in status.spans)
    return shift(status.spans, max((now - instance.placed) * 1000.0 - node_ms, 0.0) / 2.0)


def report(view: View, instance: Instance, status: InstanceStatus, now: float) -> View:
    """Fold what its node says about one instance."""
    moved = move(instance, status.state, status.error)
    if moved.state is InstanceState.READY and instance.state is not InstanceState.READY:
        status = msgspec.structs.replace(status, spans=sane(status.spans))
        spans = status.spans if instance.adopted else ready_spans(instance, status, now)
        record = msgspec.structs.replace(moved.record, fingerprint=status.fingerprint, capabilities=status.capabilities)
        moved = replace(moved, record=record, ready_at=now, spans=spans)
        view = _learn(view, moved, status)
        if not instance.adopted:
            view = replace(view, learned=view.learned.started(moved.key))
    busy = (instance.busy_since if instance.busy_since is not None else now) if status.running else None
    ended, whole, took_s = _ended(instance, status)
    turn = now if ended or instance.turn_since is None else instance.turn_since
    moved = replace(moved, seen=status, seen_at=now, busy_since=busy, turn_since=turn if status.running else None)
    if whole:
        view = replace(view, learned=view.learned.called(moved.key, took_s / whole))
    if status.proof and moved.key in view.versions:
        view = replace(view, learned=view.learned.proved(moved.key, status.proof))
    return settle(view.put_instance(moved), instance, moved, now)


def _ended(instance: Instance, status: InstanceStatus) -> tuple[int, int, float]:
    """Calls that have ended since its last report, those of them that had begun there, and the seconds that these took
    together."""
    seen, whole = instance.seen, _whole(status)
    if seen is None:
        return (0, 0, 0.0) if instance.adopted else (status.served, whole, status.worked_s)
    return (
        max(0, status.served - seen.served), max(0, whole - _whole(seen)), max(0.0, status.worked_s - seen.worked_s)
    )  # fmt: skip


def _whole(status: InstanceStatus) -> int:
    return status.whole if status.whole >= 0 else status.served


def _learn(view: View, instance: Instance, status: InstanceStatus) -> View:
    if instance.predicted is None:
        return view
    guess, key = instance.predicted, instance.key
    node = instance.record.node
    learned = view.learned.after(key, node, guess.warm, status.spans)
    bandwidth, read = _measured(view, instance, guess)
    if guess.tier == "ssd" and bandwidth:
        learned = learned.served(node, bandwidth)
    if instance.ready_at is not None:
        # Beside what its parts took, not what they were expected to: else one slow sandbox counts twice.
        seen = guess.measured(status.spans)
        took = instance.ready_at - instance.placed - seen.release
        there = _there(instance) - seen.release
        own = sum(span.ms for span in status.spans if span.name == CONVERT) / 1000.0
        alone = not (guess.queue or guess.coming)  # who is served when is no matter of its version
        if there > 0.0:
            learned = learned.missed(key, guess.tier, took - max(seen.sandbox + seen.imports, there) - seen.setup)
            cached = guess.tier == "ssd" and (not bandwidth or there < (1.0 - OVER) * read)
            if alone and not (cached and learned.lead_s(key, guess.tier) <= 0.0):
                # What a page cache gives says nothing of a disk, but that a version is not as late as was thought.
                learned = learned.led(key, guess.tier, there, read, own)
        elif alone:  # it has no weights, or its engine began before they were there
            learned = learned.missed(key, guess.tier, took - (seen.seconds - seen.release - seen.rest), own)
    return replace(view, learned=learned)


def _measured(view: View, instance: Instance, guess: Estimate) -> tuple[float, float]:
    """Bytes per second that the path of its weights gives by its node's last report, its own load included (0 if that
    does not say, or the page cache gave all), and n/b by that, as the next start is expected to take. By what was known
    before, what had been wrong with it would count in the next ones as well."""
    model, node = view.model_of(instance.key), view.nodes.get(instance.record.node)
    if node is None or node.status is None:
        return 0.0, guess.read
    name = DISK if guess.tier == "ssd" else path_of(model.uri) if guess.tier == "remote" and model is not None else ""
    paths = (path for path in node.status.paths if path.path == name and (path.served or name != DISK))
    bandwidth = next((path.bandwidth for path in paths), 0.0)
    if model is None or not (bandwidth or guess.tier == "dram"):
        return bandwidth, guess.read
    return bandwidth, reading(model, bandwidth, slowest_link(node.status) if instance.gpus else 0.0)


def _there(instance: Instance) -> float:
    """Seconds after which its weights were there; 0 where nobody knows."""
    return max((span.at + span.ms for span in instance.spans if span.name == WEIGHTS), default=0.0) / 1000.0


def vanish(view: View, instance: Instance, error: ErrorBody, now: float) -> View:
    """It is gone without having said how: STOPPED if that was wanted, otherwise LOST with ``error``."""
    ended = move(instance, InstanceState.STOPPED if instance.stop else InstanceState.LOST, error)
    return settle(view.put_instance(ended), instance, ended, now)


def fail(view: View, instance: Instance, error: ErrorBody, now: float) -> View:
    """Its start failed, by its node's answer or by our clock."""
    failed = move(instance, InstanceState.FAILED, error)
    return settle(view.put_instance(failed), instance, failed, now)


def withdraw(view: View, instance: Instance) -> View:
    """It was never begun: no failure, it may be placed anew."""
    return view.put_instance(move(instance, InstanceState.STOPPED))


def stop(view: View, instance: Instance, reason: str, grace_s: float, *, resume: bool = False) -> View:
    """Begin its end. A second call can only shorten the grace. ``resume``: its calls may go on elsewhere then."""
    if instance.ended or (instance.stop is not None and instance.stop.grace_s <= grace_s):
        return view
    return view.put_instance(replace(instance, stop=Stop(reason, grace_s, resume), commanded=None, acked=False))


def settle(view: View, old: Instance, new: Instance, now: float) -> View:
    """What a change of state means for its version's back-off."""
    if new.state == old.state:
        return view
    previous = view.failures.get(new.key)
    if new.state is InstanceState.READY:
        return view.put_failure(new.key, backoff.got_ready(previous))
    if new.stop is not None or new.state not in _BAD_ENDS:
        return view
    started = old.state not in STARTING
    error = new.record.error or _unnamed(new, started)
    if started and old.ready_at is not None and now - old.ready_at >= backoff.STABLE_S:
        previous = None
    began = old.ready_at if started and old.ready_at is not None else old.placed
    failure = backoff.after(previous, error, now, started=started, began=began)
    view = view.put_failure(new.key, failure)
    return view if started or not backoff.blames(error, failure.taken) else _elsewhere(view, new, failure)


def _elsewhere(view: View, failed: Instance, failure: Failure) -> View:
    """The next start is made on another node, where there is one that could run it and is not left alone already: what
    is wrong may be this node's accelerator, or its copy of the model. Or nothing: where no other has room it is asked
    again (``placement.decided``)."""
    key, node = failed.key, failed.record.node
    may, need = may_start(view, key, failure.at), need_in(view, key, failed.manifest)
    for name, other in view.nodes.items():
        if name != node and may(other) and other.status is not None and not short(need, total(other.status)):
            why = f"a start failed there: {failure.error.message}"
            refusal = Refusal(failure.until + BARRED_S, why, yields=failure.at)
            return replace(view, refused={**view.refused, (key, node): refusal})
    return view


def _unnamed(instance: Instance, started: bool) -> ErrorBody:
    name = instance.record.instance
    if started:
        return InstanceLost(f"instance {name} ended without a reason; see `sllm fn logs {instance.key[0]}`").body()
    text = f"instance {name} did not become ready and its node gave no reason; see `sllm fn logs {instance.key[0]}`"
    return StartFailed(text, stage="sandbox").body()

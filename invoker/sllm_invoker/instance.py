"""One instance's life on its node: started, given calls, watched, ended. One task owns it; the first verdict wins.

Transitions stand in ``protocol.states.INSTANCE``. Everything an instance holds is on one exit stack, so each way
out frees all of it, in the order in which it may be freed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from math import inf
from typing import Final

from sllm_invoker import verdicts
from sllm_invoker.account import Account
from sllm_invoker.follower import EOF_S, Follower, ended
from sllm_invoker.output import Output
from sllm_invoker.preparation import Prepared, assignment, image_of, prepare
from sllm_invoker.sandbox import Exit, Sandbox
from sllm_invoker.surroundings import Surroundings
from sllm_invoker.verdicts import Verdict
from sllm_invoker.wiring import wired
from sllm_invoker.work import Work
from sllm_runtime.protocol import codec, limits, states
from sllm_runtime.protocol.clipping import NAME_BYTES, clip, clip_error
from sllm_runtime.protocol.errors import InstanceLost, InternalError, ProtocolError, SllmError
from sllm_runtime.protocol.node import InstanceStatus, Progress, StartInstance
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.timeline import SANDBOX
from sllm_runtime.protocol.worker import HOLDS, Assign, Failed, FromWorker, Heartbeat, Log, Ready, Stage, Stop

log = logging.getLogger(__name__)

STOP_S: Final = 1.0
"""Beyond its grace a worker that was told to stop has this long."""
PARTED_S: Final = 5.0
"""Number 0 has lost another process while they began: how that one ended says better why, and is known by then."""


class Instance:
    """``run`` is its owner task; ``stop`` may be called at any time; ``tick`` regularly."""

    def __init__(self, order: StartInstance, around: Surroundings) -> None:
        self.order = order
        self._around = around
        self._state = InstanceState.STARTING
        self._account = Account(order)
        self._began = around.clock()
        self._verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._ends: list[asyncio.TimerHandle] = []
        """Of its graces. They would hold it until then, though it has ended."""
        self._parted = False
        """Whether it failed to begin since another of its processes is gone."""
        self._stop_reason: str | None = None
        """Of the stop by which it ends first."""
        self._ends_at = inf
        self._stopped_at: float | None = None
        """When it was told to end."""
        self._unused_since: float | None = None
        """Since when it had nothing left to do, of one that was told to end and has."""
        self._left = self._state
        """Where it was when it ended."""
        self._freed = False
        self._heard: dict[int, float] = {}
        self._sandboxes: dict[int, Sandbox] = {}
        self.ended_at: float | None = None
        self.work: Work | None = None

    @property
    def state(self) -> InstanceState:
        """Where it is in its life."""
        return self._state

    @property
    def final(self) -> bool:
        """Whether nothing of it will change."""
        return states.final(states.INSTANCE, self._state)

    def forgive(self, now: float) -> None:
        """Silence until now has another reason."""
        self._heard = dict.fromkeys(self._heard, now)
        if self.work is not None:
            self.work.forgive(now)

    def _hear(self, number: int = 0) -> None:
        """That process of it lives."""
        self._heard[number] = self._around.clock()

    def status(self) -> InstanceStatus:
        """For the node's report. One that was told to end has ended when what it held is free: who waits for that would
        look elsewhere before."""
        leaves = self.final and self._stopped_at is not None and not self._freed
        return self._account.status(self._left if leaves else self._state, self.work, self._around.clock())

    def freed(self) -> None:
        """All that it held is the node's again."""
        self._freed = True
        if self._unused_since is not None:
            self._account.release_s = self._around.clock() - self._unused_since

    # --- life ---------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Live until the verdict; then free everything. Cancelled: stopped."""
        loop = asyncio.get_running_loop()
        timeout = self.order.manifest.startup_timeout
        self._timer = loop.call_later(timeout, self._start_timed_out)
        async with AsyncExitStack() as stack:
            begin = asyncio.create_task(self._begin(stack), name=f"begin {self.order.instance}")
            try:
                verdict = await asyncio.shield(self._verdict)
            except asyncio.CancelledError:
                verdict = self._conclude(verdicts.shut_down(self.order.instance))
                raise
            finally:
                self._end(verdict)
                for timer in (self._timer, *self._ends):
                    timer.cancel()
                begin.cancel()
                await asyncio.gather(begin, return_exceptions=True)
        self._around.log.close()

    def _conclude(self, verdict: Verdict) -> Verdict:
        """The first verdict is the one that holds."""
        if not self._verdict.done():
            self._verdict.set_result(verdict)
        return self._verdict.result()

    def _end(self, verdict: Verdict) -> None:
        state = verdict.state
        if state in (InstanceState.FAILED, InstanceState.LOST):  # the same misfortune, before or after READY
            state = InstanceState.FAILED if self._state is InstanceState.STARTING else InstanceState.LOST
        now = self._around.clock()
        if self._stopped_at is not None:
            unused_s = self.work.unused_s(now) if self.work is not None else now - self._stopped_at
            self._unused_since = max(self._stopped_at, now - unused_s)
        if self.work is not None:
            error = verdict.calls or InstanceLost(f"instance {self.order.instance} ended")
            self.work.end(error, stopped=verdict.state is InstanceState.STOPPED)
        self._account.error = verdict.error
        self.ended_at = now
        self._left = self._state
        self._move(state)
        if verdict.error is not None:
            log.warning("instance %s is %s: %s", self.order.instance, state, verdict.error.message)
            self._around.log.line("platform", verdict.error.message, level="error")

    def _move(self, state: InstanceState) -> None:
        self._state = states.check(states.INSTANCE, self._state, state)
        self._around.moved()

    # --- start --------------------------------------------------------------------------------------
    async def _begin(self, stack: AsyncExitStack) -> None:
        try:
            image, around = await self._image(), self._around
            prepared = await prepare(self.order, around.suppliers, stack, self._report, around.clock, image)
            await self._assign(prepared, stack)
        except SllmError as error:
            self._conclude(verdicts.failed(error, self._account.stage))
        except Exception as error:
            log.exception("instance %s", self.order.instance)
            bug = InternalError(f"starting instance {self.order.instance}: {type(error).__name__}: {error}")
            self._conclude(verdicts.failed(bug, self._account.stage))

    async def _image(self) -> str:
        """Made before its start counts, the base of this node's containers too: ``startup_timeout`` runs from the
        sandbox on."""
        assert self._timer is not None
        self._timer.cancel()
        suppliers = self._around.suppliers
        found = await image_of(self.order, suppliers.images, self._report)
        if not found and suppliers.images is not None:
            told = Progress(stage=SANDBOX, message="the image that all containers of this node run from is being made")
            telling = asyncio.get_running_loop().call_later(limits.TOLD_AFTER_S, self._report, told)
            try:
                await suppliers.pool.begun()
            finally:
                telling.cancel()
        self._timer = asyncio.get_running_loop().call_later(self.order.manifest.startup_timeout, self._start_timed_out)
        return found

    def _report(self, progress: Progress) -> None:
        """How far loaderd is, until the worker itself says how far it is."""
        if self._state is InstanceState.STARTING and self.work is None:
            self._account.progress = progress
            self._around.changed()

    async def _assign(self, prepared: Prepared, stack: AsyncExitStack) -> None:
        around, (first, *others) = self._around, prepared.seats
        sandbox = first.sandbox
        output = Output(sandbox, around.log)
        stack.push_async_callback(output.silence)
        work = Work(self.order, sandbox.wire, around.ready, around.consumed, self._silent, around.clock)
        self._account.prepared(prepared.spans, (around.clock() - self._began) * 1000)
        followers = [Follower.of(seat, around.log, partial(self._hear, seat.member.number)) for seat in others]
        for follower in followers:
            stack.push_async_callback(follower.output.silence)
        tells: list[Callable[[Assign, Sequence[int]], None]] = [work.tell, *(each.tell for each in followers)]
        with wired(tuple(seat.member for seat in prepared.seats)) as edges:
            for seat, ends in zip(prepared.seats, edges, strict=True):
                self._hear(seat.member.number)
                self._sandboxes[seat.member.number] = seat.sandbox
                assign = assignment(self.order, prepared, seat, around.suppliers.proofs, len(ends))
                tells[seat.member.number](assign, (*seat.fds, *ends))
        prepared.bundle.close()
        self.work = work
        async with asyncio.TaskGroup() as group:  # all of it is cancelled when there is a verdict
            for follower in followers:
                group.create_task(self._watch(follower), name=f"follow {self.order.instance}")
            await self._listen(sandbox, output, work)

    async def _watch(self, follower: Follower) -> None:
        """Until a process that takes no calls ends, and so the instance."""
        end = await follower.end(self._verdict)
        if not isinstance(end, SllmError):
            self._judge_death(end)
        elif self._state is InstanceState.STARTING:
            self._conclude(verdicts.failed(end, self._account.stage))
        else:
            self._conclude(verdicts.broken(self.order.instance, end))

    def _silent(self, error: SllmError) -> None:
        """The worker takes nothing, though much waits for it."""
        self._conclude(verdicts.broken(self.order.instance, error))

    def _start_timed_out(self) -> None:
        last = self._around.suppliers.pool.last_error
        why = last.message if last is not None and self._account.stage == SANDBOX else ""
        short = any(sandbox.short_of_memory() for sandbox in self._sandboxes.values())
        self._conclude(verdicts.start_timeout(self.order, self._account.stage, why, short))

    # --- the worker's messages ------------------------------------------------------------------------
    async def _listen(self, sandbox: Sandbox, output: Output, work: Work) -> None:
        loop = asyncio.get_running_loop()
        sandbox.exited.add_done_callback(lambda _end: loop.call_later(EOF_S, sandbox.wire.close))
        feeder = asyncio.create_task(work.feed_back(), name=f"feed {self.order.instance}")
        try:
            await sandbox.wire.listen(lambda payload: self._on_message(payload, work))
        except SllmError as error:
            self._conclude(verdicts.lost(error))
            return
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
        end = await ended(sandbox)
        output.drain()  # its last lines belong to the error
        if not self._parted:
            self._died(end)

    def _on_message(self, payload: bytes, work: Work) -> None:
        message = codec.unpack(FromWorker, payload)
        if message.version not in (limits.PROTOCOL_VERSION, limits.PROTOCOL_VERSION - 1):
            raise ProtocolError(f"the worker speaks version {message.version}, this node {limits.PROTOCOL_VERSION}")
        self._hear()
        match message.body:
            case Heartbeat() as beat:
                self._account.beaten(beat)
            case Log() as line:
                stream, level = clip(line.stream, NAME_BYTES), clip(line.level, NAME_BYTES)
                self._around.log.line(stream, line.text, level=level, call=work.name(line.number))
            case Stage() as stage:
                self._on_stage(stage)
            case Ready() as ready:
                self._on_ready(ready, work)
            case Failed() as failed:
                self._fails(clip_error(failed.error).to_error())
            case other:
                if self._state is InstanceState.STARTING:
                    raise ProtocolError(f"{type(other).__name__} before the worker is ready")
                if work.on_message(other):
                    self._around.counted()

    def _fails(self, error: SllmError) -> None:
        if self._state is not InstanceState.STARTING:  # it is in no stage of a start any more
            self._conclude(verdicts.lost(error))
            return
        verdict = verdicts.failed(error, self._account.stage)
        if len(self._sandboxes) > 1 and isinstance(error, InstanceLost):
            self._parted = True
            asyncio.get_running_loop().call_later(PARTED_S, self._conclude, verdict)
        else:
            self._conclude(verdict)

    def _on_stage(self, stage: Stage) -> None:
        if self._state is InstanceState.STARTING:
            self._account.staged(stage)
            self._around.changed()

    def _on_ready(self, ready: Ready, work: Work) -> None:
        if self._state is not InstanceState.STARTING or self._verdict.done():
            return
        assert self._timer is not None
        self._timer.cancel()
        self._account.ready(ready, self._around.clock())
        self._around.suppliers.proofs.keep(self.order, ready.proof)
        work.open(holds=HOLDS in ready.capabilities)
        self._move(InstanceState.READY)
        for sandbox in self._sandboxes.values():
            sandbox.started()

    def _died(self, end: Exit) -> None:
        """The socket ended, and the worker with it."""
        clean = end.asked or (end.code == 0 and not end.signal)
        if self._stop_reason is not None and (clean or not (self.work and self.work.running)):
            self._conclude(self._stopped())
        else:
            self._judge_death(end)

    def _judge_death(self, end: Exit) -> None:
        tail = list(self._around.log.tail)
        memory = self._around.killed_for_memory()
        if self._state is InstanceState.STARTING:
            self._conclude(verdicts.died_at_start(self.order, self._account.stage, end, tail, memory))
        else:
            self._conclude(verdicts.died(self.order, end, tail, memory))

    # --- end ----------------------------------------------------------------------------------------
    def stop(self, reason: str, grace_s: float, *, resume: bool = False) -> None:
        """Drain: running calls have ``grace_s`` seconds; then end. Asked again, the earlier end holds, and its reason.
        ``resume``: what runs to the end of the grace is lost, not cancelled."""
        now = self._around.clock()
        if now + grace_s < self._ends_at:
            self._ends_at, self._stop_reason = now + grace_s, reason
        if self._stopped_at is None:
            self._stopped_at = now
        if self.final or self._verdict.done():
            return
        if self._state is InstanceState.STARTING or self.work is None:
            self._conclude(Verdict(InstanceState.STOPPED))
            return
        if self._state is InstanceState.READY:
            self.work.close()
            self._move(InstanceState.DRAINING)
        # The worker cancels what outlives its grace: where calls are to go on elsewhere it does not come to that.
        self.work.tell(Stop(grace_s=grace_s + STOP_S if resume else grace_s))
        loop = asyncio.get_running_loop()
        if resume:
            gone = verdicts.taken(self.order.instance, reason)
            self._ends.append(loop.call_later(grace_s, lambda: self._conclude(gone)))
        self._ends.append(loop.call_later(grace_s + STOP_S, lambda: self._conclude(self._stopped())))

    def _stopped(self) -> Verdict:
        return verdicts.stopped(self.order.instance, self._stop_reason or "asked to")

    def tick(self, now: float) -> None:
        """Judge silence. A worker that starts has its start's own deadline."""
        if self.work is None or self._state not in (InstanceState.READY, InstanceState.DRAINING):
            return
        number, heard = min(self._heard.items(), key=lambda each: each[1])
        if now - heard > limits.LOST_AFTER_S:
            self._conclude(verdicts.silent(self.order, self._sandboxes[number].short_of_memory()))
        elif (deaf := self.work.deaf(now)) is not None:
            self._conclude(verdicts.deaf(self.order.instance, deaf.head.call))

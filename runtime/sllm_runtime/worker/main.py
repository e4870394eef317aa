"""A worker: waits for its assignment on one socket, becomes that instance, runs its calls, ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import platform
import select
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sllm_runtime.platform.daemon import loop_factory
from sllm_runtime.platform.process import set_title
from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import InstanceLost, ProtocolError, SllmError
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.own_trace import TRACEPARENT
from sllm_runtime.protocol.timeline import WEIGHTS
from sllm_runtime.protocol.worker import (
    Assign,
    CallBody,
    CancelCall,
    Credit,
    Failed,
    FeedCall,
    Follow,
    FromWorker,
    Heartbeat,
    Hello,
    HoldCall,
    Ready,
    Stage,
    StartCall,
    Stop,
    ToWorker,
)
from sllm_runtime.worker import isolation
from sllm_runtime.worker.aside import aside
from sllm_runtime.worker.calls import Calls
from sllm_runtime.worker.cluster import leave_network
from sllm_runtime.worker.console import Console, own_loggers
from sllm_runtime.worker.engine.sinks import Mailbox
from sllm_runtime.worker.handle import ModelHandle
from sllm_runtime.worker.openai import answer
from sllm_runtime.worker.sender import Sender
from sllm_runtime.worker.start import Stages, Started, start
from sllm_runtime.worker.working_set import Pages, take

log = logging.getLogger(__name__)
_FLUSH_S = 5.0
_STAGE_S = 0.5
_LINE_S = 0.1
_SWITCH_S = 0.0005
"""A thread waits no longer than this for the interpreter. The engine lets go of it for moments that are too short for
others to take it: with the usual 5 ms a token waited for most of the next step before its call's thread told it."""
_WARM_S = 0.02
"""A worker that has no assignment by then prepares itself: one that was forked for a start mostly has it by then, and
one that has not stops as soon as it comes. With 0.1 s a start right after the pool was refilled found a worker that had
prepared nothing."""
_BROKEN_S = 10.0
"""Calls that need no weights have so long to end in an instance whose weights do not come."""


@dataclass(frozen=True, slots=True)
class Warming:
    """What a worker does while nobody waits for it, so that no start has to."""

    pages: Sequence[Pages]
    """It takes them."""
    leave: isolation.Leave
    """Where it can come back, it leaves the network, and comes back if its function may have it: most may not."""


class Worker:
    """One instance's life over ``wire``. ``run`` returns the exit status."""

    def __init__(self, wire: BlockingWire) -> None:
        self._wire = wire
        self._calls: Calls | None = None
        self._handle: ModelHandle | None = None
        self._sender = Sender(wire, self._work)
        self._console = Console(self._sender.log, lambda: self._sender.flush(_LINE_S))
        self._stop: asyncio.Future[float | None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._broken: SllmError | None = None

    def _work(self) -> Heartbeat:
        calls, handle = self._calls, self._handle
        return Heartbeat(
            running=calls.count() if calls is not None else 0, context=handle.context if handle is not None else 0
        )

    def run(self, import_s: float, warming: Warming | None = None) -> int:
        """Greet, wait for the assignment, ``warming`` done meanwhile, serve."""
        self._wire.send(
            codec.pack(FromWorker(Hello(pid=os.getpid(), python=platform.python_version(), import_s=import_s)))
        )
        left = None
        if warming is not None and not self._wanted(_WARM_S):
            take(warming.pages, self._wanted)
            left = isolation.leave_network_for_now() if warming.leave is isolation.Leave.FOR_NOW else None
        payload = self._wire.receive()  # a warm sandbox waits for as long as its invoker lives
        if payload is None:
            return 0
        began = time.perf_counter()
        message = codec.unpack(ToWorker, payload)
        if isinstance(message.body, Stop):
            return 0
        if not isinstance(message.body, Assign) or message.version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
            raise ProtocolError(f"first message is {type(message.body).__name__} of version {message.version}")
        fds = self._wire.fds.take(message.body.fds)
        can = warming is not None and warming.leave is not isolation.Leave.NEVER  # else the fork server has said so
        try:
            leave_network(message.body, fds, left, can=can)
        except SllmError as error:
            self._wire.send(codec.pack(FromWorker(Failed(error=error.body()))))
            return 1
        if left is not None:
            os.close(left)
        isolation.drop_privileges()  # before the first thread: each has its own
        number = message.body.member.number
        sys.setswitchinterval(_SWITCH_S)
        set_title(f"sllm-worker {message.body.instance}{f'.{number}' if number else ''}")
        self._sender.start()
        self._console.install()
        os.register_at_fork(after_in_child=self._forked)
        _log_to_console()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            life = self._compute if number else self._serve
            runner.get_loop().set_default_executor(_Executor())
            status = _lived(runner.get_loop(), life(message.body, fds, began))
        self._console.end_call(None)
        self._sender.close(_FLUSH_S)
        return status

    def _wanted(self, within_s: float = 0.0) -> bool:
        """Whether the invoker has said something."""
        return bool(select.select([self._wire.sock], [], [], within_s)[0])

    def _forked(self) -> None:
        """In a child that user code forked: it must not speak for this worker, whose socket it has."""
        self._sender.mute()
        self._console.leave()
        if self._loop is not None and threading.get_ident() == self._loop_thread:
            _leave_loop(self._loop)

    async def _compute(self, assign: Assign, fds: list[int], _began: float) -> int:
        """The life of a process that takes no calls."""
        from sllm_runtime.worker import computing
        from sllm_runtime.worker.joined import Joined

        self._sender.watch(asyncio.get_running_loop())
        joined = Joined.of(assign, fds)
        assert joined is not None
        error = await computing.serve(assign, fds, joined, self._report, self._wire.receive_all)
        if error is None:
            return 0
        self._sender.log(None, "stderr", error.detail or error.message, level="error")
        self._sender.send(Failed(error=error.body()))
        return 1

    async def _serve(self, assign: Assign, fds: list[int], began: float) -> int:
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        self._loop, self._loop_thread = loop, threading.get_ident()
        stages = Stages(self._report, began)
        traced = TRACEPARENT.set(assign.traceparent)
        try:
            started = await start(assign, fds, stages)
        except SllmError as error:
            self._sender.log(None, "stderr", error.detail or error.message, level="error")
            self._sender.send(Failed(error=error.body()))
            return 1
        finally:
            TRACEPARENT.reset(traced)
        self._begin(assign, started, loop)
        threading.Thread(target=self._read, args=(loop,), name="reader", daemon=True).start()
        self._sender.send(
            Ready(
                spans=started.spans,
                fingerprint=started.fingerprint,
                capabilities=started.capabilities,
                proof=started.proof,
            )
        )
        if started.model is not None:
            started.model.on_failure(lambda error: self._tell(loop, error))
        grace_s = await self._stop
        if grace_s is None:
            return 0  # the invoker is gone
        assert self._calls is not None
        broken = self._broken
        lost = InstanceLost(f"its instance ends: {broken.message}; call again") if broken is not None else None
        await self._calls.drain(grace_s, lost)
        if started.handle is not None:
            await aside(started.handle.close)
        if self._broken is not None:
            self._sender.send(Failed(error=self._broken.body()))
            return 1
        return 0

    def _begin(self, assign: Assign, started: Started, loop: asyncio.AbstractEventLoop) -> None:
        self._calls = Calls(
            self._sender,
            self._console,
            started.run,
            on_loop=started.on_loop,
            resumable=assign.manifest.resumable,
            late=started.model.span if started.model is not None and started.late else None,
            context=contextvars.copy_context(),
        )
        handle = self._handle = started.handle
        if handle is not None:
            mailbox = Mailbox(loop)
            handle.use_loop(mailbox)
            handle.on_lost(self._lose)
            if assign.manifest.engine:
                self._calls.serve_openai(lambda call: answer(call, handle, mailbox))
        self._sender.watch(loop)

    def _report(self, stage: str, done: int, total: int) -> None:
        self._sender.send(Stage(stage=stage, done=done, total=total))
        if not done:
            self._sender.flush(_STAGE_S)  # user code comes next: should it end this process, it is known where

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand the invoker's messages to the loop until it closes. A thread of its own."""
        try:
            while (payloads := self._wire.receive_all()) is not None:
                loop.call_soon_threadsafe(self._dispatch, [codec.unpack(ToWorker, each).body for each in payloads])
        except (OSError, SllmError) as error:
            log.warning("the invoker's socket: %s", error)
        except MemoryError:  # what was read is lost, and nothing that follows would be heard
            text = "its function left no memory to hear of its calls; raise memory=... in @model_function"
            loop.call_soon_threadsafe(self._lose, InstanceLost(text))
            return
        except RuntimeError:
            return  # the loop is closed: this worker ends
        loop.call_soon_threadsafe(self._ended, None)

    def _dispatch(self, bodies: Sequence[Any]) -> None:
        for body in bodies:
            try:
                self._heed(body)
            except Exception:  # a bug, and of one call: those that came together with it are others'
                log.exception("%s failed", type(body).__name__)

    def _heed(self, body: Any) -> None:
        calls = self._calls
        assert calls is not None
        match body:
            case StartCall():
                calls.start(body)
            case CallBody():
                calls.body(body)
            case Credit():
                calls.credit(body)
            case Follow():
                calls.follow(body)
            case FeedCall():
                calls.feed(body)
            case HoldCall():
                calls.hold(body)
            case CancelCall():
                calls.cancel(body)
            case Stop():
                self._ended(body.grace_s)
            case _:
                log.warning("unexpected %s", type(body).__name__)

    def _tell(self, loop: asyncio.AbstractEventLoop, error: SllmError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this worker ends anyway
            loop.call_soon_threadsafe(self._break, error)

    def _break(self, error: SllmError) -> None:
        """The rest of the weights will not come. Who waits for them hears it from the engine; no others are served.
        Where loaderd has gone nobody is at fault: the instance ends at once, and its calls go on elsewhere."""
        self._sender.log(None, "stderr", f"the weights did not come: {error.message}", level="error")
        if self._stop is not None and not self._stop.done():
            error.stage = error.stage or WEIGHTS
            if isinstance(error, InstanceLost):
                self._lose(error)
                return
            self._broken = error
            self._stop.set_result(_BROKEN_S)

    def _lose(self, error: SllmError) -> None:
        """The engine computes no more (``EngineLoop.on_lost``): the invoker ends this process, as if it had died
        itself."""
        self._sender.send(Failed(error=error.body()))

    def _ended(self, grace_s: float | None) -> None:
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(grace_s)
        elif grace_s is not None and self._calls is not None:
            self._calls.hasten(grace_s)


class _Executor(ThreadPoolExecutor):
    """What user code left in its threads is not waited for: it ends with this process."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def _lived(loop: asyncio.AbstractEventLoop, life: Coroutine[Any, Any, int]) -> int:
    """``sys.exit`` in a task that user code made leaves the loop, and ends no more than that task."""
    task = loop.create_task(life)
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt):
            if task.done():
                raise


def _leave_loop(loop: asyncio.AbstractEventLoop) -> None:
    """In a child that code on the loop forked. What the loop polls is its parent's too, which would miss what is read
    here; so nothing is. Code that waits, or ends, ends the child."""
    empty = select.epoll()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]" and fd != empty.fileno():
                os.dup2(empty.fileno(), fd, inheritable=False)
    empty.close()
    loop.call_soon(os._exit, 0)


def _log_to_console() -> None:
    """Our own records are lines of stderr as the function's are; its root logger stays its own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    for logger in own_loggers():
        logger.addHandler(handler)


def main(sock: socket.socket, import_s: float, warming: Warming | None = None) -> int:
    """Run one worker on ``sock`` and return its exit status. Threads of user code may still run then: exit by
    ``os._exit``."""
    set_title("sllm-worker (warm)")
    wire = BlockingWire(sock)
    try:
        return Worker(wire).run(import_s, warming)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()

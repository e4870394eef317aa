"""The calls of one instance: bodies put together, functions run, errors described, cancellations delivered."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import decimal
import functools
import inspect
import logging
import math
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, NoReturn

from sllm_runtime.protocol.errors import (
    NEVER_RAN,
    BodyTooLarge,
    Cancelled,
    Draining,
    ErrorBody,
    FunctionError,
    InvalidRequest,
    NotDeterministic,
    SllmError,
)
from sllm_runtime.protocol.own_trace import TRACEPARENT, TRACESTATE
from sllm_runtime.protocol.timeline import Span
from sllm_runtime.protocol.worker import CallBody, CancelCall, Credit, FeedCall, Follow, HoldCall, StartCall
from sllm_runtime.worker import console
from sllm_runtime.worker.call import Call, current
from sllm_runtime.worker.outgoing import CallEnded, Outgoing
from sllm_runtime.worker.own import is_own, own
from sllm_runtime.worker.sender import Sender
from sllm_runtime.worker.words import NO_THREAD, lacks_memory, lacks_thread, sendable, words_of

log = logging.getLogger(__name__)
_MESSAGE_CHARS = 2000
_TRACE_CHARS = 64 * 1024
_NO_ROOM: Final = "the function has no memory left for this call's arguments; raise memory=... in @model_function"
_CANCEL_S = 2.0
"""A stopping worker waits this long for what it cancelled."""
_STAND_BY_S: Final = 0.03
"""And this long after a call has moved away: to give its memory back takes a core, and so does the first step of who
has the call now, which the caller waits for."""


class Calls:
    """Runs the calls of one instance. All methods but ``count`` on the event loop."""

    def __init__(
        self,
        sender: Sender,
        console_: console.Console,
        run: Callable[[Call], Any],
        *,
        on_loop: bool,
        resumable: bool = True,
        late: Callable[[float], tuple[Span, ...]] | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        """``run(call)`` produces the outputs of a ``fn`` call: in a thread, or ``on_loop`` as a coroutine.

        Each call has a copy of ``context``: what its module and ``setup`` have set there holds in calls.

        ``late``: spans of the start that ended after it was told, as seen from a ``perf_counter``.
        """
        self._resumable = resumable
        self._late = late
        self._context = context
        if context is not None:  # now: a call on the loop may have changed it for a while, and another begins meanwhile
            context.run(_OF_THREADS.set, _torchs())
        self._sender = sender
        self._console = console_
        self._run = run
        self._on_loop = on_loop
        self._running: dict[int, Call] = {}
        self._openai: Callable[[Call], Any] | None = None
        self._draining = False
        self._ends_at = math.inf
        """When those that run are to have ended, by the loop's clock."""
        self._waits: asyncio.Timeout | None = None
        """While they are waited for."""
        self._abandoned = False
        self._moved_at = -math.inf
        """When a call last moved away."""
        self._idle = asyncio.Event()
        self._idle.set()

    def serve_openai(self, run: Callable[[Call], Any]) -> None:
        """``run(call)`` is the coroutine that answers ``chat`` and ``completion`` calls."""
        self._openai = run

    def count(self) -> int:
        """Calls that run; from any thread."""
        return len(self._running)

    def start(self, message: StartCall) -> None:
        """A call arrived, maybe with a first part of its body only."""
        outgoing = Outgoing(message.number, self._sender, message.head.credit)
        call = Call(message.number, message.head, outgoing, resumable=self._resumable, late=self._late)
        if self._draining:
            call.end(Draining("this instance is stopping").body(), unseen=True)
            return
        self._running[message.number] = call
        self._idle.clear()
        self.body(CallBody(message.number, message.body))

    def body(self, message: CallBody) -> None:
        """More of a body; the call starts when it is whole."""
        call = self._running.get(message.number)
        if call is None or call.task is not None:
            return
        try:
            call.body += message.data
        except MemoryError:  # a body without one of its parts would be waited for for ever
            call.body = bytearray()
            self._finish(call, FunctionError(_NO_ROOM).body())
            return
        if len(call.body) > call.head.body_bytes:
            self._finish(call, BodyTooLarge(f"body above the {call.head.body_bytes} bytes that its head names").body())
        elif len(call.body) >= call.head.body_bytes:
            context = self._context.copy() if self._context is not None else None
            call.task = asyncio.create_task(self._execute(call), name=f"call-{call.number}", context=context)
            # A task that is cancelled before its first step never runs, and so sends no end.
            call.task.add_done_callback(lambda _: self._finish(call, call.outgoing.cancelled))

    def credit(self, message: Credit) -> None:
        """The reader takes more."""
        call = self._running.get(message.number)
        if call is not None:
            call.outgoing.grant(message.limit)

    def follow(self, message: Follow) -> None:
        """The call moves, or does no longer."""
        call = self._running.get(message.number)
        if call is not None:
            call.following = message.on

    def feed(self, message: FeedCall) -> None:
        """The call moves here: ids that it has where it comes from."""
        call = self._running.get(message.number)
        if call is None:
            return
        try:
            call.fed.tell(
                message.generation, message.first, message.ids, held=message.held, ended=message.ended,
                cached=message.cached,
            )  # fmt: skip
        except NotDeterministic as error:
            call.cancel(error.body())

    def hold(self, message: HoldCall) -> None:
        """The call moves away: it is drawn slower here, or no more, unless it is let again."""
        call = self._running.get(message.number)
        if call is None:
            return
        if message.interval_s > 0.0:
            call.fed.slow(message.interval_s)
        else:
            call.fed.hold()

    def cancel(self, message: CancelCall) -> None:
        """The call is to end; its END frame follows."""
        call = self._running.get(message.number)
        if call is None:
            return
        error = ErrorBody(code=message.code, message=message.reason or "the call was cancelled").to_error()
        if call.fed.leaves:
            self._moved_at = asyncio.get_running_loop().time()
        self._end(call, error.body())

    def _end(self, call: Call, error: ErrorBody) -> None:
        call.cancel(error)
        if call.task is None:  # its body is not whole: nothing of it runs
            self._finish(call, error)

    async def drain(self, grace_s: float, why: SllmError | None = None) -> None:
        """Take no more calls; wait up to ``grace_s`` for those that run, then cancel them, ``why`` if it is for no wish
        of anybody."""
        self._draining = True
        self.hasten(grace_s)
        try:
            async with asyncio.timeout_at(self._ends_at) as self._waits:
                await self._idle.wait()
        except TimeoutError:
            await self._give_up(why or Cancelled("the instance is stopping"))
        await asyncio.sleep(self._moved_at + _STAND_BY_S - asyncio.get_running_loop().time())

    def hasten(self, grace_s: float) -> None:
        """While it drains, or is told to: those that run have no more than so long from now."""
        self._ends_at = min(self._ends_at, asyncio.get_running_loop().time() + grace_s)
        if self._waits is not None and not self._waits.expired() and not self._idle.is_set():
            self._waits.reschedule(self._ends_at)

    async def _give_up(self, why: SllmError) -> None:
        for call in list(self._running.values()):
            self._end(call, why.body())
        try:
            async with asyncio.timeout(_CANCEL_S):
                await self._idle.wait()
        except TimeoutError:
            self._abandoned = True  # what is deaf to cancel dies with the process
            log.warning("%d calls did not stop within %.0f s of being cancelled", len(self._running), _CANCEL_S)

    async def _execute(self, call: Call) -> None:
        current.set(call)
        TRACEPARENT.set(call.head.traceparent)
        TRACESTATE.set(call.head.tracestate)
        console.current_call.set(call.number)
        if type(within := decimal.getcontext()) is decimal.Context:  # of a subclass a copy would be a plain one
            decimal.setcontext(within.copy())  # a copy of a context has the very same one within
        error: ErrorBody | None = None
        process = os.getpid()
        try:
            if call.head.kind != "fn":
                with own():  # no user code answers these
                    if self._openai is None:
                        raise FunctionError("this function is not engine-backed: it has no OpenAI routes")
                    await self._openai(call)
            elif self._on_loop:
                await self._run(call)
            else:
                error = await self._in_thread(call)
        except BaseException as raised:  # everything ends in the call's END frame
            error = self._described(call, raised)
        if os.getpid() != process:
            _end_child(error)
        self._finish(call, error)

    async def _in_thread(self, call: Call) -> ErrorBody | None:
        """Run user code that blocks. A thread cannot be interrupted: a cancelled call waits for its next yield."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[ErrorBody | None] = loop.create_future()
        process = os.getpid()
        settings = _OF_THREADS.get()

        def work() -> None:
            error = None
            try:
                _set_torchs(*settings)
                self._run(call)
            except BaseException as raised:  # everything ends in the call's END frame
                error = self._described(call, raised)
            if os.getpid() != process:
                _end_child(error)
            loop.call_soon_threadsafe(done.set_result, error)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(work,), name=f"call-{call.number}", daemon=True).start()
        while not done.done():
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError:  # of this task, by cancel(): the thread was told as well
                if self._abandoned or not call.outgoing.cancelled:
                    raise
        return done.result()

    def _finish(self, call: Call, error: ErrorBody | None) -> None:
        if self._running.pop(call.number, None) is None:
            return
        self._console.end_call(call.number)
        call.end(error)
        if not self._running:
            self._idle.set()

    def _described(self, call: Call, raised: BaseException) -> ErrorBody:
        cancelled = call.outgoing.cancelled
        if cancelled is not None and isinstance(raised, (CallEnded, asyncio.CancelledError, Cancelled)):
            return cancelled
        if isinstance(raised, CallEnded):
            return raised.body
        if (
            isinstance(raised, SllmError)
            and is_own(raised)
            and not isinstance(raised, FunctionError)
            # A function ran: no code may say that it did not, since the SDK would send the call again. Of an instance
            # that ends its gateway knows that, and goes on elsewhere where it can.
            and (call.head.kind != "fn" or raised.code not in NEVER_RAN or isinstance(raised, Draining))
        ):
            return raised.body()
        error = described(raised)
        self._sender.log(call.number, "stderr", (error.detail or error.message)[-_TRACE_CHARS:], level="error")
        return error


_OF_THREADS: Final[contextvars.ContextVar[tuple[bool, Any]]] = contextvars.ContextVar("torchs", default=(True, None))
"""``_torchs`` of the thread in which the function was set up."""


def _torchs() -> tuple[bool, Any]:
    """What torch keeps for each thread, and a module or ``setup`` may have set in this one: whether gradients are
    recorded, and the default device; None: torch's own."""
    torch = sys.modules.get("torch")
    if torch is None:  # who has not imported it has set nothing
        return True, None
    device = torch.get_default_device()
    return torch.is_grad_enabled(), device if device != torch.device("cpu") else None


def _set_torchs(grad: bool, device: Any) -> None:
    """In a fresh thread, which has torch's own."""
    if not grad:
        sys.modules["torch"].set_grad_enabled(False)
    if device is not None:  # by a mode, which costs each operation a little
        sys.modules["torch"].set_default_device(device)


def _end_child(error: ErrorBody | None) -> NoReturn:
    """End a process that user code forked and let return into the worker, where there is nothing for it to do."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0 if error is None else 1)


def described(raised: BaseException) -> ErrorBody:
    """What a user's code raised, for its caller, with the traceback below our own frames as ``detail``. An error of
    another call (it is not ``own``) is but an exception here: another caller, another instance are meant by it."""
    trace = sendable("".join(traceback.format_exception(type(raised), raised, users_part(raised))))
    if isinstance(raised, FunctionError) and is_own(raised):
        raised.detail = raised.detail or trace[-_TRACE_CHARS:]
        return raised.body()
    text = words_of(raised)[:_MESSAGE_CHARS]
    if lacks_memory(raised) and not isinstance(raised, SllmError):  # whose memory is another function's
        text += " - the function ran out of memory; raise memory=... in @model_function"
    elif lacks_thread(raised):
        text += NO_THREAD
    return FunctionError(text, detail=trace[-_TRACE_CHARS:]).body()


_OURS: Final = ("sllm_runtime/worker", "<frozen importlib", "/importlib/__init__.py")


def users_part(raised: BaseException) -> Any:
    """The traceback from the first frame on that is neither the worker's nor Python's own import."""
    trace = raised.__traceback__
    while trace is not None and any(path in trace.tb_frame.f_code.co_filename for path in _OURS) and trace.tb_next:
        trace = trace.tb_next
    return trace or raised.__traceback__


def _arguments(parse: Callable[[bytes], dict[str, Any]], call: Call) -> dict[str, Any]:
    with own(InvalidRequest):
        return parse(bytes(call.body))


def run_sync(function: Callable[..., Any], parse: Callable[[bytes], dict[str, Any]]) -> Callable[[Call], None]:
    """What runs a plain function or generator for a call, in a thread. It yields where it hands on any iterator,
    whatever its hints say; what is to be awaited (a decorator stands before an async function, say) runs on the loop
    that this is called on."""
    loop = asyncio.get_running_loop()

    def run(call: Call) -> None:
        result = function(**_arguments(parse, call))
        if inspect.isawaitable(result) or isinstance(result, AsyncIterator):
            _on(loop, _hand_on(result, call), call)
            return
        call.yielded = isinstance(result, Iterator)
        if not call.yielded:
            call.outgoing.check()
            call.emit(result)
            return
        try:
            for value in result:
                call.emit(value)
                call.outgoing.check()
        finally:
            if inspect.isgenerator(result):
                result.close()

    return run


def run_async(function: Callable[..., Any], parse: Callable[[bytes], dict[str, Any]]) -> Callable[[Call], Any]:
    """What runs an async function or generator for a call, on the loop."""

    async def run(call: Call) -> None:
        await _hand_on(function(**_arguments(parse, call)), call)

    return run


_END_OF_VALUES: Final = object()


async def _hand_on(result: Any, call: Call) -> None:
    """What an async function gave; a plain iterator, which may block, is asked in a thread."""
    if inspect.isawaitable(result):
        result = await result
    call.yielded = isinstance(result, AsyncIterator | Iterator)
    if not call.yielded:
        await call.aemit(result)
    elif isinstance(result, AsyncIterator):
        try:
            while (value := await anext(result, _END_OF_VALUES)) is not _END_OF_VALUES:
                await call.aemit(value)
                call.outgoing.check()
        finally:
            if hasattr(result, "aclose"):
                await result.aclose()
    else:
        await _hand_on_blocking(result, call)


async def _hand_on_blocking(values: Iterator[Any], call: Call) -> None:
    """In a thread of its own, as a plain function has: those of ``asyncio.to_thread`` are the function's, which may
    keep all of them."""
    context = contextvars.copy_context()
    following: Callable[[], Any] = functools.partial(next, values, _END_OF_VALUES)
    threads = concurrent.futures.ThreadPoolExecutor(1, f"call-{call.number}", _set_torchs, _OF_THREADS.get())
    try:
        while (value := await _behind(threads.submit(context.run, following))) is not _END_OF_VALUES:
            await call.aemit(value)
            call.outgoing.check()
    finally:
        if inspect.isgenerator(values) and not values.gi_running:
            await _behind(threads.submit(context.run, values.close))
        threads.shutdown(wait=False)


async def _behind(asked: concurrent.futures.Future[Any]) -> Any:
    """A thread cannot be interrupted: who is cancelled ends behind what it does."""
    waited_for = asyncio.wrap_future(asked)
    try:
        return await asyncio.shield(waited_for)
    except asyncio.CancelledError:
        await asyncio.wait((waited_for,))
        raise


def _on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None], call: Call) -> None:
    """Run ``work`` of ``call`` on ``loop`` and wait here, in another thread, until it has ended: cancelled as well."""
    ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    def begin() -> None:
        task = loop.create_task(work)

        def cancel(_: object) -> None:
            task.cancel()

        forget = call.on_cancel(cancel)

        def tell(_: object) -> None:
            forget()
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            ended.set_result(None) if error is None else ended.set_exception(error)

        task.add_done_callback(tell)

    loop.call_soon_threadsafe(begin)
    ended.result()

"""Runs one engine on a thread of its own and turns its events into text for whoever asked.

Requests and cancellations reach the engine between two steps. What one step made is handed over in one go: sinks of
threads are queues, those of coroutines share a ``Mailbox`` that wakes their event loop once a step.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from sllm_runtime.protocol.errors import InstanceLost, InternalError, OutOfMemory, SllmError, Unavailable
from sllm_runtime.worker.engine.base import Engine, Event, Finish, Request
from sllm_runtime.worker.engine.sinks import Mailbox, Piece, Sink
from sllm_runtime.worker.engine.text import Decoder, Detokenizer, StopMatcher
from sllm_runtime.worker.words import lacks_memory

log = logging.getLogger(__name__)
_CLOSE_S = 10.0
_TOLD = 1024
"""Ids that are told as drawn elsewhere, 25 ms of decoding, before others' next step: what is left of the commands comes
after that. Who resumes tells all of his at once."""
_SLOW_FOR_S = 2.0
"""A request that is to be slower has gone after so long, or who said so has: it draws as before."""


def _failure(error: Exception) -> SllmError:
    """What a step that failed is for those who run."""
    text = f"{type(error).__name__}: {error}"
    if lacks_memory(error):
        return OutOfMemory(f"the engine ran out of memory ({text[:200]}); raise memory=... in @model_function")
    return InternalError(f"the engine failed: {text}")


@dataclass(slots=True)
class _Output:
    sink: Sink
    detokenizer: Detokenizer
    matcher: StopMatcher
    request: Request
    tokens: int
    """Of its prompt, and those that were told."""
    last: tuple[int, ...] = ()
    """The last id of a resume, or of those that were fed: how it was told depends on whether the output ended with it,
    and that it is told says that all before it are computed."""


class EngineLoop:
    """Owner of the engine's thread. ``submit`` and ``cancel`` may be called from any thread.

    ``release``: called on that thread when it ends, to give back what the engine has beside memory.
    """

    def __init__(
        self,
        engine: Engine,
        decoder: Decoder,
        *,
        proof: str = "",
        proved_s: float = 0.0,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self.proof = proof
        """What the engine found out about its numerics, for later starts."""
        self.proved_s = proved_s
        """Seconds that it took."""
        self._release = release
        self._on_lost: Callable[[SllmError], None] | None = None
        self._lost = False
        self._decoder = decoder
        self._outputs: dict[int, _Output] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._numbers = itertools.count()
        self._touched: set[Mailbox] = set()
        self._slow: dict[int, float] = {}
        """Requests that move away, and seconds from the beginning of a step to the next one while they run."""
        self._slow_until = -math.inf
        self._began = -math.inf
        """When the last step did."""
        self._told = 0
        """Ids that commands have told since then."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def context(self) -> int:
        """Tokens of the request that has most. From any thread."""
        outputs = list(self._outputs.values())  # in one go: the engine's thread may take one away
        return max((output.tokens for output in outputs), default=0)

    def on_lost(self, call: Callable[[SllmError], None]) -> None:
        """Have ``call`` called, once, when another process that the engine computes with is gone, or this one's GPU
        computes nothing more for it. Nobody is told anything then: this process is to be ended, and its requests go on
        elsewhere as if it had died itself."""
        self._on_lost = call

    def submit(self, request: Request, sink: Sink, decoder: Decoder | None = None) -> int:
        """Give ``request`` (its ``id`` is drawn here) to the engine; what comes of it, refusal included, goes to
        ``sink``. ``decoder``: makes its text, where that is not as everybody's. Raises ``Unavailable`` when the loop is
        closed."""
        number = next(self._numbers)
        numbered = replace(request, id=number)
        self._command(lambda: self._add(numbered, sink, decoder or self._decoder))
        return number

    def cancel(self, number: int, error: SllmError | None = None) -> None:
        """Forget a request within one step; ``error`` goes to its sink, if it is not finished."""
        try:
            self._command(lambda: self._cancel(number, error))
        except Unavailable:
            return  # closed: everything was cancelled

    def feed(self, number: int, first: int, ids: tuple[int, ...], *, held: bool = False) -> None:
        """See ``Engine.feed``; and from now on it is ``held`` or not (``Engine.hold``, ``Engine.release``). Within one
        step. A request that drew others ends with ``NotDeterministic``."""
        try:
            self._command(lambda: self._feed(number, first, ids, held))
        except Unavailable:
            return  # closed: everything was cancelled

    def slow(self, number: int, interval_s: float) -> None:
        """While this request runs, and is not held or let draw (``feed``), a step begins so long after the one before:
        for two seconds, unless it is said again."""
        try:
            self._command(lambda: self._slow_down(number, interval_s))
        except Unavailable:
            return  # closed: everything was cancelled

    def close(self) -> None:
        """End the thread after its current step; whoever waits gets ``Unavailable``. Repeatable."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _command(self, command: Callable[[], None]) -> None:
        with self._changed:
            if self._closing:
                raise Unavailable("the engine of this instance has stopped")
            self._commands.append(command)
            self._changed.notify()

    def _run(self) -> None:
        while self._next():
            if self.engine.busy and not self._rest():
                self._began = time.monotonic()
                for event in self._step():
                    self._deliver(event)
            self._flush()  # of commands too: a refusal needs no step
        if not self._lost:
            for number in list(self._outputs):
                self._cancel(number, Unavailable("the engine of this instance has stopped"))
            self._flush()
        if self._release is not None:
            self._release()

    def _flush(self) -> None:
        for mailbox in self._touched:
            mailbox.flush()
        self._touched.clear()

    def _rest(self) -> float:
        """Seconds until the next step may begin."""
        if not self._slow:
            return 0.0
        begin = min(self._began + max(self._slow.values()), self._slow_until)
        return max(0.0, begin - time.monotonic())

    def _next(self) -> bool:
        """Carry out commands, as many as are soon done; wait while there is nothing to step. False: closing."""
        with self._changed:
            while not (self._commands or self._closing):
                # No deadline: an idle engine waits for its next request as long as its instance lives.
                rest = self._rest() if self.engine.busy else None
                if rest == 0.0:
                    break
                self._changed.wait(rest)
            closing = self._closing
        if self._lost:
            return False
        self._told = 0
        for _ in range(len(self._commands)):
            if self._told < _TOLD or closing:
                self._commands.popleft()()
        return not closing

    def _step(self) -> list[Event]:
        try:
            return self.engine.step()
        except Exception as error:  # weights that do not come, or a bug of the engine: nobody may wait for ever
            log.exception("engine step failed")  # of a process that is lost there will be no other word
            if self._on_lost is not None and isinstance(error, InstanceLost):
                self._lost = True
                self._on_lost(error)
                return []
            failure = error if isinstance(error, SllmError) else _failure(error)
            for number in self._outputs:
                self.engine.cancel(number)
            return [Event(request=number, error=failure) for number in self._outputs]

    def _add(self, request: Request, sink: Sink, decoder: Decoder) -> None:
        try:
            self.engine.add(request)
            detokenizer = Detokenizer(decoder, request.prompt)
        except Exception as error:  # it concerns this request alone, and the thread serves others
            self.engine.cancel(request.id)
            self._refuse(sink, error)
            return
        matcher = StopMatcher(request.sampling.stop)
        self._outputs[request.id] = _Output(sink, detokenizer, matcher, request, len(request.prompt))
        self._drawn_elsewhere(request.id, request.emitted)

    def _feed(self, number: int, first: int, ids: tuple[int, ...], held: bool) -> None:
        if number not in self._outputs:
            return  # it has ended
        try:
            new = self.engine.feed(number, first, ids)
        except SllmError as error:
            self._cancel(number, error)
            return
        self._slow.pop(number, None)
        if held:
            self.engine.hold(number)
        else:
            self.engine.release(number)
        self._drawn_elsewhere(number, new)

    def _slow_down(self, number: int, interval_s: float) -> None:
        if number in self._outputs:
            self._slow[number] = interval_s
            self._slow_until = time.monotonic() + _SLOW_FOR_S

    def _forget(self, number: int) -> _Output | None:
        self._slow.pop(number, None)
        output = self._outputs.pop(number, None)
        for constraint in () if output is None else output.request.constraints:
            constraint.forget()  # the call that asked keeps it, and has many more outputs maybe
        return output

    def _drawn_elsewhere(self, number: int, ids: tuple[int, ...]) -> None:
        """The output goes on with ``ids``, which the engine has. They are told one by one, as they came the first time:
        so the pieces are the same, and a caller who has some gets the rest."""
        output = self._outputs[number]
        if not ids or output.request.retell:  # the engine itself tells such ids
            return
        self._told += len(ids)
        told, output.last = (*output.last, *ids[:-1]), ()
        for token in told:
            self._deliver(Event(request=number, ids=(token,)))
        output.last = ids[-1:]

    def _cancel(self, number: int, error: SllmError | None) -> None:
        output = self._forget(number)
        if output is None:
            return
        self.engine.cancel(number)
        if error is not None:
            self._put(output.sink, Piece(error=error))

    def _deliver(self, event: Event) -> None:
        output = self._outputs.get(event.request)
        if output is None:
            return
        if output.last:
            last, output.last = output.last, ()
            if event.rests:  # and would go on
                event = Event(request=event.request, ids=last)
            elif event.finish == "length" and not event.ids:  # it was full with that id, and the end came with it
                event = replace(event, ids=last)
            else:
                self._deliver(Event(request=event.request, ids=last))
                self._deliver(event)
                return
        if event.rests:
            self._put(output.sink, Piece(rests=True))
            return
        if event.error is not None:
            self._forget(event.request)
            self._put(output.sink, Piece(error=event.error))
            return
        try:
            piece = self._piece(output, event)
        except Exception as error:  # a tokenizer that cannot decode what its model says
            self._forget(event.request)
            self.engine.cancel(event.request)
            self._refuse(output.sink, error)
            return
        if piece.finish is not None:
            self._forget(event.request)
        self._put(output.sink, piece)

    def _piece(self, output: _Output, event: Event) -> Piece:
        output.tokens += len(event.ids)
        text, stopped = output.matcher.feed(output.detokenizer.feed(event.ids))
        finish: Finish | None = event.finish
        if finish is not None and not stopped:
            rest, stopped = output.matcher.feed(output.detokenizer.flush())
            text += rest if stopped else rest + output.matcher.flush()
        if stopped:
            finish = "stop"
            self.engine.cancel(event.request)
        return Piece(text, event.ids, event.logprobs, event.prompt, finish, event.cached)

    def _refuse(self, sink: Sink, error: Exception) -> None:
        if not isinstance(error, SllmError):
            log.error("a request failed", exc_info=error)
            error = InternalError(f"the engine cannot take this request: {type(error).__name__}: {error}")
        self._put(sink, Piece(error=error))

    def _put(self, sink: Sink, piece: Piece) -> None:
        sink.put(piece)
        if sink.mailbox is not None:
            self._touched.add(sink.mailbox)

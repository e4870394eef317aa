"""Joins one request of the engine to the call it belongs to: seed, resume, usage, recorded ids, cancellation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.worker.call import IdRecorder, current
from sllm_runtime.worker.engine.base import Request
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.engine.sinks import Piece, Sink
from sllm_runtime.worker.engine.text import Decoder
from sllm_runtime.worker.outgoing import CallEnded


def next_number() -> int | None:
    """That of the next ``generate`` of the call whose code runs here, if any does, for one whose request is yet to be
    made: a resumed call knows its generations by the order in which they were begun, whichever takes how long."""
    call = current.get()
    return None if call is None else call.next_generation()


class Generation:
    """One ``generate``. Outside of a call (in ``setup``, in a thread of the function's own) it stands alone.
    ``decoder``: see ``EngineLoop.submit``. ``beside``: the call's others run at the same time. ``number``: where it was
    taken before (``next_number``)."""

    def __init__(
        self,
        loop: EngineLoop,
        request: Request,
        *,
        count_prompt: bool = True,
        decoder: Decoder | None = None,
        beside: bool = False,
        number: int | None = None,
    ) -> None:
        self._loop = loop
        self._decoder = decoder
        self._call = current.get()
        self._recorder: IdRecorder | None = None
        self._number = 0
        self._beside = beside
        self._finished = False
        self._cached = not count_prompt  # of several outputs of one prompt the first tells
        if self._call is not None:
            self._number = number = self._call.next_generation() if number is None else number
            scored, emitted = request.sampling.scored, self._call.fed.known(number)
            # An engine that knows no probabilities of ids that it was given draws all of them again.
            if self._call.resumable and (not scored or loop.engine.capabilities.retells):
                self._recorder = IdRecorder(self._call, number, len(emitted))
                held = loop.engine.capabilities.holds and self._call.fed.holds(number, beside=beside)
                request = replace(request, emitted=emitted, retell=scored, held=held)
            seed = request.sampling.seed
            seed = self._call.head.seed + number if seed is None else seed
            request = replace(request, sampling=replace(request.sampling, seed=seed))
            self._call.count(prompt=len(request.prompt) if count_prompt else 0)
            if count_prompt:
                self._call.found(number, 0)
        self._request = request

    def _found(self, cached: int) -> None:
        """So much of the prompt was computed when it was first looked for here."""
        assert self._call is not None
        self._cached = True
        self._call.found(self._number, cached)
        if self._recorder is not None:
            self._recorder.cached = cached

    @contextlib.contextmanager
    def submitted(self, sink: Sink) -> Iterator[None]:
        """The request runs in the engine inside this block and not after it. A cancelled call raises ``CallEnded``."""
        number = self._loop.submit(self._request, sink, self._decoder)
        forget = self._call.on_cancel(lambda error: self._loop.cancel(number, error)) if self._call else None
        leave = self._join(number)
        try:
            yield
        except SllmError as error:
            cancelled = self._call.outgoing.cancelled if self._call else None
            if cancelled is not None:
                raise CallEnded(cancelled) from error
            raise
        finally:
            leave()
            if forget is not None:
                forget()
            if not self._finished:
                self._loop.cancel(number)

    def _join(self, number: int) -> Callable[[], None]:
        """What a move tells of this generation goes to the engine's request ``number``."""
        if self._call is None or self._recorder is None:
            return lambda: None

        def take(first: int, ids: tuple[int, ...], *, held: bool) -> None:
            self._loop.feed(number, first, ids, held=held)

        return self._call.fed.join(
            self._number, take, lambda interval_s: self._loop.slow(number, interval_s), beside=self._beside
        )

    def heard(self, piece: Piece) -> None:
        """Keep account of one piece. Raises ``CallEnded`` if the call was cancelled."""
        self._finished = piece.last
        if self._call is None:
            return
        self._call.outgoing.check()
        self._call.count(completion=len(piece.ids))
        if piece.cached and not self._cached:
            self._found(piece.cached)
        if self._recorder is not None and piece.rests:
            self._recorder.rest()
        elif self._recorder is not None:
            self._recorder.add(piece.ids, last=piece.last)

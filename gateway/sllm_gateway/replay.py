"""What is written of a kept call, as its caller would have got it: a stream from any place on, or one body. No I/O."""

from __future__ import annotations

import re
from typing import Final

from sllm_gateway.delivery import too_large
from sllm_gateway.openai.outputs import ChatStream, CompletionStream, Header, WholeAnswer
from sllm_gateway.outputs import Body, FunctionBody, FunctionStream, Stream
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.calls import CallOrder, Entry, Journaled
from sllm_runtime.protocol.errors import JournalExpired, OutputTooLarge
from sllm_runtime.protocol.frames import End, Frame

_ID: Final = re.compile(rb"id: (\d+)\n")
_PREFIX: Final = {"chat": "chatcmpl", "completion": "cmpl"}


def header_of(order: CallOrder) -> Header:
    """What every chunk of an OpenAI answer repeats: the same for whoever reads it."""
    return Header(f"{_PREFIX[order.kind]}-{order.call}", int(order.created), order.model)


def stream_of(order: CallOrder) -> Stream:
    """The encoder of its stream, from its first frame on."""
    if order.kind == "fn":
        return FunctionStream(order.call)
    return (ChatStream if order.kind == "chat" else CompletionStream)(header_of(order), usage=order.usage)


def body_of(order: CallOrder, *, streams: bool, exact: bool) -> Body:
    """The encoder of its answer in one piece. ``streams``: see ``FunctionBody``; ``exact``: ``Began.exact``."""
    body: Body
    if order.kind == "fn":
        body = FunctionBody(streams)
    else:
        body = WholeAnswer(header_of(order), chat=order.kind == "chat", choices=order.choices)
    if not exact:
        body.inexact()
    return body


def success(journaled: Journaled) -> End:
    """Of a call that has ended. Raises how it failed, ``JournalExpired`` where not all of its answer is there: it must
    not seem whole."""
    assert journaled.ended is not None
    if not journaled.whole:
        raise JournalExpired(
            f"of the answer of {name_of(journaled)} only the first {journaled.frames} of {journaled.total} frames are"
            " kept: the journal is full, or its server was killed; call again"
        )
    if journaled.ended.error is not None:
        raise journaled.ended.error.to_error()
    return End(usage=journaled.ended.usage, yielded=journaled.ended.yielded)


def name_of(journaled: Journaled) -> str:
    """How errors name it."""
    return journaled.order.call if journaled.order is not None else "the call"


class Whole:
    """The answer in one piece, from the entries of its call. Of one that is ``too_large`` for ``most`` bytes nothing is
    held."""

    def __init__(self, most: int) -> None:
        self.journaled = Journaled()
        self._frames: list[Frame] = []
        self._nbytes, self._count, self._most = 0, 0, most

    def take(self, entry: Entry) -> None:
        """One more of them."""
        new = self.journaled.take(entry)
        self._nbytes += sum(len(frame.data) for frame in new)
        self._count += len(new)
        if self.too_large:
            self._frames.clear()
        else:
            self._frames += new

    @property
    def too_large(self) -> str:
        """What is wrong with it, if it is: that stays so whatever else comes."""
        return too_large(self._nbytes, self._count, self._most)

    @property
    def cost(self) -> int:
        """Of what is held, as credit counts it."""
        return 0 if self.too_large else self._nbytes + self._count * limits.FRAME_COST

    def body(self, order: CallOrder, *, streams: bool) -> bytes:
        """It, once the call has ended, in place of what makes it. Raises as ``success``, and ``OutputTooLarge``."""
        end = success(self.journaled)
        self.require_small(order.call)
        body = body_of(order, streams=streams, exact=self.journaled.exact).body(self._frames, end)
        self._frames.clear()
        return body

    def require_small(self, call: str) -> None:
        """Raises ``OutputTooLarge``."""
        if why := self.too_large:
            raise OutputTooLarge(f"the answer of {call} {why}; read it by GET /v1/calls/{call}/events")


class After:
    """Leaves out the events that a reader has: those up to id ``last``."""

    def __init__(self, stream: Stream, last: int) -> None:
        self._stream = stream
        self._last = last
        self._dropping = False

    def frames(self, frames: list[Frame]) -> bytes:
        """The events of these frames that the reader lacks."""
        return b"".join(self.cut(self._stream.frames([frame])) for frame in frames)

    def inexact(self) -> None:
        """See ``Stream.inexact``."""
        self._stream.inexact()

    def end(self, end: End) -> bytes:
        """What follows the last frame."""
        return self.cut(self._stream.end(end))

    def cut(self, data: bytes) -> bytes:
        """What of ``data`` is wanted: events begin at their ids, what follows belongs to the last one."""
        out, at = [], 0
        starts = [match.start() for match in _ID.finditer(data) if match.start() == 0 or data[match.start() - 1] == 10]
        for start in [*starts, len(data)]:
            if not self._dropping:
                out.append(data[at:start])
            found = _ID.match(data, start)
            if found is not None:
                self._dropping = int(found[1]) <= self._last
            at = start
        return b"".join(out)

"""How much of what a worker says of itself and its calls is believed: it ends in reports, records, error messages and
what gateways count."""

from __future__ import annotations

from typing import Final

import msgspec

from sllm_runtime.protocol import codec
from sllm_runtime.protocol.clipping import NAME_BYTES, clip, clip_error
from sllm_runtime.protocol.errors import ErrorBody, ProtocolError, SllmError
from sllm_runtime.protocol.frames import End, Frame, Ids
from sllm_runtime.protocol.limits import ID_END
from sllm_runtime.protocol.timeline import Span, sane

REPORTED_BYTES: Final = 2000
"""Of an error in the node's report, which is sent every second."""
MAX_SPANS: Final = 32
MAX_NAMES: Final = 32
NAMES_BYTES: Final = 512
"""Of all names together: a report has those of every instance of its node."""
MAX_TOKENS: Final = 2**31
"""Of one call."""


def clip_report(error: SllmError) -> ErrorBody:
    """``error`` for a report: the traceback is in the log."""
    return msgspec.structs.replace(error.body(), message=clip(error.message, REPORTED_BYTES), detail=None)


def clip_spans(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The first of ``spans`` that can be some, with names of a bounded size."""
    kept = sane(spans)[:MAX_SPANS]
    names = clip_names(tuple(span.name for span in kept))
    return tuple(msgspec.structs.replace(span, name=name) for span, name in zip(kept, names, strict=False))


def clip_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The first of ``names``, each of a bounded size and all together."""
    kept, room = list[str](), NAMES_BYTES
    for name in names[:MAX_NAMES]:
        kept.append(clip(name, NAME_BYTES))
        room -= len(kept[-1].encode())
        if room < 0:
            return tuple(kept[:-1])
    return tuple(kept)


def clip_tokens(count: int) -> int:
    """``count``, as far as it can be one."""
    return min(max(count, 0), MAX_TOKENS)


def clip_end(frame: Frame) -> Frame:
    """An END as gateways may have it: they keep it, count by it, and answer with its error. That an instance was ended
    in order is the invoker's to say: of a call that says so of itself no death would count. Raises ``ProtocolError`` if
    it is none, or if what it says of tokens cannot be."""
    end = codec.unpack(End, frame.data)
    usage = end.usage
    if usage is not None and not all(0 <= count <= MAX_TOKENS for count in msgspec.structs.astuple(usage)):
        raise ProtocolError(f"a call cannot have used {usage}")
    error = None if end.error is None else clip_error(end.error)
    kept = msgspec.structs.replace(end, error=error, spans=clip_spans(end.spans), stopped=False)
    return frame if kept == end else msgspec.structs.replace(frame, data=codec.pack(kept))


def check_ids(frame: Frame) -> None:
    """Raises ``ProtocolError`` if this is no IDS frame of a right worker: gateways keep its ids, and send them on in
    messages whose size they know by their number."""
    ids = codec.unpack(Ids, frame.data).ids
    if ids and not 0 <= min(ids) <= max(ids) < ID_END:
        raise ProtocolError(f"ids from {min(ids)} to {max(ids)} are no tokens'")

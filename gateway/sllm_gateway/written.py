"""What is read of events and lines: by whom and of what they are, their subject says, which the writer has a right to;
what they say themselves of that is not believed."""

from __future__ import annotations

from msgspec.structs import replace

from sllm_gateway.follow import Message
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.events import Event, LogRecord


def line_of(message: Message) -> LogRecord:
    """Raises ``ProtocolError``."""
    node, function = subjects.of_log(message.subject)
    return replace(codec.unpack(LogRecord, message.data or b""), node=node, function=function)


def event_of(message: Message) -> Event:
    """Raises ``ProtocolError``."""
    by, event = subjects.of_event(message.subject), codec.unpack(Event, message.data or b"")
    if by is None:
        raise ProtocolError(f"no event is told by {message.subject}")
    node = by.identity if by.component == subjects.NODE else event.node
    if not by.kind:  # of an earlier release, which told everything by one subject
        return replace(event, component=by.component, node=node)
    return replace(event, component=by.component, node=node, kind=by.kind, function=by.function, call=by.call)

"""Server-sent events as bytes. Pure; see docs/http.md for what clients may rely on."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": heartbeat\n"


def one_line(json_text: bytes) -> bytes:
    """JSON text on one line. A line break in it can only be white space: in strings it is written as an escape."""
    return json_text.replace(b"\r", b" ").replace(b"\n", b" ")


def event(data: bytes, *, id: int | None = None, name: str | None = None) -> bytes:
    """One event. ``data`` is JSON on one line."""
    head = b"" if id is None else b"id: %d\n" % id
    if name is not None:
        head += b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, data)


def place(id: int) -> bytes:
    """Where the stream stands: no event, but who reads on does so from behind it."""
    return b"id: %d\n\n" % id


def comment(text: str) -> bytes:
    """One line, and no blank line after it: once an id was seen, the openai client takes a comment followed by a
    blank line for an event without data, and fails."""
    return b": " + " ".join(text.split()).encode() + b"\n"

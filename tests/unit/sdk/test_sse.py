"""The parser of server-sent events, cut anywhere."""

import time

from hypothesis import given
from hypothesis import strategies as st

from sllm.sse import Event, Parser

LINE = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=12)
NAME = st.sampled_from(["", "progress", "error", "x y"])
EVENT = st.builds(
    lambda lines, name, id: Event("\n".join(lines), name or "message", id),
    st.lists(LINE, min_size=1, max_size=3),
    NAME,
    st.none() | st.integers(0, 9).map(str),
)
COMMENT = st.builds(lambda text: Event(comment=text), LINE)


def written(event: Event, end: str) -> str:
    """``event`` as a server writes it: comments without a blank line after them."""
    if event.comment is not None:
        return f": {event.comment}{end}"
    lines = [f"id: {event.id}"] if event.id is not None else []
    lines += [f"event: {event.event}"] if event.event != "message" else []
    lines += [f"data: {line}" for line in event.data.split("\n")]
    return end.join(lines) + end * 2


@given(st.lists(EVENT | COMMENT, max_size=6), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_events_do_not_depend_on_how_the_bytes_are_cut(events: list[Event], end: str, data: st.DataObject) -> None:
    whole = "".join(written(event, end) for event in events).encode()
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=8).map(sorted))
    parser, found = Parser(), []
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += parser.feed(whole[start:stop])
    assert found == events


@given(st.binary(max_size=64), st.integers(1, 5))
def test_no_bytes_make_it_fail(junk: bytes, step: int) -> None:
    parser = Parser()
    found = [event for start in range(0, len(junk), step) for event in parser.feed(junk[start : start + step])]
    assert found == Parser().feed(junk)


def test_a_comment_inside_an_event_does_not_end_it() -> None:
    assert Parser().feed(b"id: 3\n: heartbeat\ndata: 1\n\n") == [Event(comment="heartbeat"), Event("1", id="3")]


def test_only_done_is_the_end() -> None:
    done, text, comment = Parser().feed(b'data: [DONE]\n\ndata: "[DONE]"\n\n: [DONE]\n')
    assert [done.done, text.done, comment.done] == [True, False, False]


def test_an_unfinished_event_is_none() -> None:
    assert Parser().feed(b"data: 1\n") == []
    assert Parser().feed(b"event: error\n\n") == []


def test_a_large_output_takes_linear_time() -> None:
    parser, piece = Parser(), b"x" * 65536
    parser.feed(b"data: ")
    began = time.process_time()
    for _ in range(512):
        assert parser.feed(piece) == []
    (event,) = parser.feed(b"\n\n")
    assert len(event.data) == 512 * 65536
    assert time.process_time() - began < 2


def test_an_id_without_data_says_where_the_stream_stands() -> None:
    assert Parser().feed(b"id: 7\n\nid: 8\ndata: 1\n\ndata: 2\n\n") == [
        Event(id="7", comment=""),
        Event("1", id="8"),
        Event("2"),
    ]

"""Bytes to lines, and how many of them pass."""

from hypothesis import given
from hypothesis import strategies as st

from sllm_invoker.lines import LineCutter, TokenBucket, thinned

TEXT = st.binary(max_size=120).map(lambda data: data.replace(b"\r", b"."))


def cut(data: bytes, sizes: list[int], limit: int) -> list[str]:
    cutter, lines, at = LineCutter(limit), [], 0
    turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        lines += cutter.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    return lines + cutter.end()


@given(data=st.lists(TEXT, max_size=12).map(b"\n".join), sizes=st.lists(st.integers(1, 40), min_size=1))
def test_lines_are_the_same_however_the_bytes_come(data: bytes, sizes: list[int]) -> None:
    limit = 16
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    shown = [line[:limit].decode(errors="replace") + ("…" if len(line) > limit else "") for line in expected]
    assert cut(data, sizes, limit) == shown


def test_a_line_without_end_is_given_out_once_and_its_rest_is_no_line() -> None:
    cutter = LineCutter(5)
    assert cutter.feed(b"abcdefgh") == ["abcde…"]
    assert cutter.feed(b"ijkl") == []
    assert cutter.feed(b"mn\nnext\r\n") == ["next"]


@given(begun=TEXT, lines=st.lists(TEXT, max_size=30), first=st.integers(0, 5), last=st.integers(0, 5))
def test_lines_that_are_not_looked_at_are_counted(begun: bytes, lines: list[bytes], first: int, last: int) -> None:
    """Also where an earlier read had the beginning of the first, and a later one has the end of the last."""
    plain, thin = LineCutter(), LineCutter()
    plain.feed(begun)
    thin.feed(begun)
    data = b"\n".join(lines)
    kept, dropped = thinned(data, first, last)
    every, some = plain.feed(data), thin.feed(kept)
    assert len(some) + dropped == len(every)
    assert len(some) <= max(1, first) + max(1, last) or not dropped
    assert some[:first] == every[:first]
    assert not last or some[-last:] == every[-last:]
    assert plain.feed(b"end\n") == thin.feed(b"end\n")


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 20)), min_size=1, max_size=50),
    st.floats(0.5, 10),
    st.floats(1, 20),
)
def test_no_more_passes_than_the_rate_and_one_burst(
    steps: list[tuple[float, float]], rate: float, burst: float
) -> None:
    bucket, now, passed = TokenBucket(rate, burst), 0.0, 0.0
    for pause, amount in steps:
        now += pause
        if bucket.take(amount, now):
            passed += amount
        assert passed <= burst + rate * now + 1e-6


def test_what_is_within_the_rate_passes() -> None:
    bucket = TokenBucket(rate=8.0, burst=1.0)
    assert all(bucket.take(1.0, now / 8) for now in range(1, 100))

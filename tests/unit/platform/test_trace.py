"""The trace that a request belongs to."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.platform import trace

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BROKEN = (
    "",
    "00",
    TRACE.upper(),
    TRACE + "-00",
    TRACE + "\r\nx: y",
    "ff" + TRACE[2:],
    TRACE.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
    TRACE.replace("b7ad6b7169203331", "0" * 16),
)


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_one_is_none(said: str) -> None:
    assert (trace.checked(said), trace.trace_id(said)) == ("", "")
    with trace.within(TRACE), trace.within(said):
        assert trace.current() == ""


LATER = TRACE.replace("00-0af", "01-0af")


@pytest.mark.parametrize("said", [LATER, f"{LATER}-what-comes-later", f"{LATER[:-2]}ff-", f"fe{TRACE[2:]}"])
def test_of_a_later_version_what_this_one_knows_goes_on_as_this_one(said: str) -> None:
    """As the specification asks: else the first caller that has one ends each trace here."""
    assert trace.checked(said) == TRACE
    assert trace.trace_id(said) == trace.trace_id(TRACE)


@pytest.mark.parametrize("said", [f"{LATER}x", f"{LATER}\n", LATER[:-1], LATER.replace("b7ad6b7169203331", "0" * 16)])
def test_what_does_not_begin_as_this_version_does_is_none(said: str) -> None:
    assert trace.checked(said) == ""


ENTRIES = "congo=t61rcWkgMzE, rojo=00f067aa0ba902b7 ,,\tacme@x=a b:c;d/*"


def test_a_state_goes_on_as_it_is() -> None:
    assert trace.state(ENTRIES) == "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7,acme@x=a b:c;d/*"
    full = ",".join(f"k{number}=v" for number in range(32))
    assert trace.state(full) == full
    assert trace.state("k=" + "v" * 256) == "k=" + "v" * 256


@pytest.mark.parametrize(
    "said", ["", "a", "A=b", "a=b=c", "a=b,c", "a=é", "a=b\r\nx: y", "=b", ",".join(f"k{n}=v" for n in range(33))]
)
def test_a_broken_state_is_none(said: str) -> None:
    assert trace.state(said) == ""


def test_of_a_long_state_the_long_entries_go_first_then_the_last_ones() -> None:
    long, short = f"long={'x' * 200}", [f"k{number}={'v' * 50}" for number in range(10)]
    found = trace.state(",".join([*short[:5], long, *short[5:]]))
    assert found == ",".join(short[:9])
    assert len(found) <= 512


@given(st.text())
def test_whatever_is_said_nothing_but_a_trace_goes_on(said: str) -> None:
    """It becomes part of a message's header."""
    found = trace.checked(said)
    assert found in ("", said)
    assert found.isascii()
    assert not {"\r", "\n"} & set(found)


async def test_tasks_that_begin_in_it_belong_to_it() -> None:
    async def seen() -> str:
        await asyncio.sleep(0)
        return trace.current()

    with trace.within(TRACE):
        task = asyncio.create_task(seen())
    assert await task == TRACE
    assert await seen() == ""
    assert trace.trace_id(TRACE) == "0af7651916cd43dd8448eb211c80319c"

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

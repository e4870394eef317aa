"""Whatever an invoker does in whatever order: every call ends once, its frames are consecutive, others go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.examples import examples
from tests.unit.worker.harness import Worker, Zygote, bundle_of, manifest

SOURCE = """
import asyncio, time

def check(count, fail):
    if fail:
        raise ValueError("asked for")

def fn(count: int, size: int = 1, fail: bool = False):
    for number in range(count):
        yield "x" * size
    check(count, fail)

async def afn(count: int, size: int = 1, fail: bool = False):
    for number in range(count):
        yield "x" * size
        await asyncio.sleep(0)
    check(count, fail)
"""


@pytest.fixture(scope="module", params=["fn", "afn"])
def served(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    home: Path = tmp_path_factory.mktemp("any")
    worker = zygote.spawn()
    made = manifest(f"user:{request.param}", "generator", streams=True, concurrency=16)
    worker.start(made, bundle_of({"user.py": SOURCE}), workdir=home)
    yield worker
    worker.close()
    zygote.exited(zygote.count)


CALLS = st.tuples(
    st.just("call"),
    st.fixed_dictionaries(
        {"count": st.integers(0, 30), "size": st.sampled_from([0, 1, 1000, 300_000]), "fail": st.booleans()}
    ),
    st.sampled_from([0, 1, 5_000, 10**8]),
)
ACTIONS = st.one_of(
    CALLS,
    st.tuples(st.just("cancel"), st.integers(0, 9), st.none()),
    st.tuples(st.just("credit"), st.integers(0, 9), st.sampled_from([0, 10, 100_000, 10**8])),
)


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ACTIONS, min_size=1, max_size=12))
def test_every_call_ends_once(served: Worker, actions: list[tuple[str, Any, Any]]) -> None:
    calls: list[tuple[int, dict[str, Any]]] = []
    cancelled = set()
    for kind, what, credit in actions:
        if kind == "call":
            calls.append((served.call(what, credit=credit), what))
        elif kind == "cancel":
            number = calls[what % len(calls)][0] if calls else 10**9  # a call nobody made: no harm
            cancelled.add(number)
            served.cancel(number)
        elif calls:
            served.credit(calls[what % len(calls)][0], credit)
    for number, _ in calls:
        served.credit(number, 10**9)
    for number, arguments in calls:
        answer = served.finish(number)
        assert answer.end is not None
        code = answer.end.error.code if answer.end.error is not None else None
        if code == "cancelled":
            assert number in cancelled
        else:
            assert code == ("function_error" if arguments["fail"] else None)
            assert [len(value) for value in answer.outputs] == [arguments["size"]] * arguments["count"]

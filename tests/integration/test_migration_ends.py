"""Calls that come to their end while they move: by themselves, or because somebody cancels them. Real processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import wait
from tests.fixtures.moving import AT, deploy_gated, settled, whole
from tests.fixtures.streams import Stream
from tests.integration.test_migration_faults import Moving

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
STEPS = ("asked", "starting", "moving")
"""Before the call has gone over. ``moving``: its destination is there and has been told of it."""
MORE = 6
"""Tokens that it draws after its gate."""


@pytest.fixture(scope="module")
def cluster(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform"), nodes=2) as running:
        deploy_gated(running, coder)
        yield running


@pytest.fixture(scope="module")
def right(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The pieces of a call that stays and ends by itself."""
    gate = tmp_path_factory.mktemp("open") / "gate"
    gate.touch()
    with Stream(cluster, "coder", {"gate": str(gate), "at": AT, "max_tokens": AT + MORE}) as stream:
        pieces = list(stream.values())
    assert AT < len(pieces) <= AT + MORE
    return pieces


@pytest.mark.parametrize("step", STEPS)
def test_it_ends_by_itself(cluster: Cluster, right: list[str], tmp_path: Path, step: str) -> None:
    gate, instance = tmp_path / "gate", settled(cluster)
    with Stream(cluster, "coder", {"gate": str(gate), "at": AT, "max_tokens": AT + MORE}) as stream:
        values = stream.values()
        pieces = [next(values) for _ in range(AT)]
        moving = Moving(cluster, instance, cluster.url)
        moving.until(step)
        gate.touch()
        pieces += list(values)
        assert pieces == right
        assert stream.done
        assert stream.ids == list(range(len(right)))
    moving.join()
    nothing_is_left(cluster)


@pytest.mark.parametrize("step", STEPS)
def test_it_is_cancelled(cluster: Cluster, right: list[str], tmp_path: Path, step: str) -> None:
    """Neither source nor destination works on it any more, and the next call is answered as ever."""
    gate = tmp_path / "gate"
    with midway(cluster, right, gate, step) as (stream, values):
        assert cluster.http.post(f"/v1/calls/{stream.call}/cancel").status_code == 202
        assert list(values) == []
        assert stream.error is not None
        assert stream.error["code"] == "cancelled"
    nothing_is_left(cluster)
    assert whole(cluster, gate)[:AT] == right[:AT]


@pytest.mark.parametrize("step", STEPS)
def test_its_caller_goes_away(cluster: Cluster, right: list[str], tmp_path: Path, step: str) -> None:
    gate = tmp_path / "gate"
    with midway(cluster, right, gate, step):
        pass
    nothing_is_left(cluster)
    assert whole(cluster, gate)[:AT] == right[:AT]


@contextlib.contextmanager
def midway(cluster: Cluster, right: list[str], gate: Path, step: str) -> Iterator[tuple[Stream, Iterator[Any]]]:
    """A call that stands before its gate while it is moved, which has come to ``step``; left when the move is over."""
    instance = settled(cluster)
    with Stream(cluster, "coder", {"gate": str(gate), "at": AT}) as stream:
        values = stream.values()
        assert [next(values) for _ in range(AT)] == right[:AT]
        moving = Moving(cluster, instance, cluster.url)
        moving.until(step)
        yield stream, values
    moving.join()


def nothing_is_left(cluster: Cluster) -> None:
    """No call at the gateway, none on an instance, and one instance at most."""
    wait(lambda: "sllm_calls_open 0.0" in cluster.http.get("/metrics").text, "no call is open")
    settled(cluster)

"""Instances of several processes, scripted: whichever of them ends ends the instance, by name, and nothing is left."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_invoker.admission import claim_of
from sllm_invoker.preparation import check_partitions, partitions_of
from sllm_invoker.wiring import members, wired
from sllm_runtime.protocol.errors import InvalidCheckpoint
from sllm_runtime.protocol.manifest import Parallelism
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.worker import Member
from tests.fixtures.invoker import NodeUnderTest, node_under_test, order
from tests.fixtures.nats import Nats, nats  # noqa: F401 - a fixture is used by being here
from tests.fixtures.waiting import until

TWO = {"pipeline": 2}


@pytest.fixture
async def node(nats: Nats, tmp_path: Path) -> AsyncIterator[NodeUnderTest]:  # noqa: F811
    async with node_under_test(nats, tmp_path) as under:
        yield under


async def freed(node: NodeUnderTest) -> None:
    await until(lambda: node.status.free_memory == node.status.memory, what="what it held is free")


async def test_calls_go_to_number_0_and_a_stop_ends_all(node: NodeUnderTest) -> None:
    instance = await node.start("echo", parallelism=TWO)
    _, call = await node.gateway.open(instance, b"said")
    assert (await node.gateway.ended(call)).error is None
    assert call.values == [b"said"]
    await node.stop(instance)
    await node.reaches(instance, InstanceState.STOPPED)
    await freed(node)


@pytest.mark.parametrize(
    ("act", "code", "words"),
    [
        ("die", "instance_lost", "SIGKILL"),
        ("freeze", "instance_lost", "no sign of life"),
        ("garbage", "instance_lost", "a process of instance"),
        ("ready", "instance_lost", "Ready from a worker that takes no calls"),
        ("fail", "instance_lost", "my part has failed"),
    ],
)
async def test_a_process_that_takes_no_calls_ends_the_instance(
    node: NodeUnderTest, act: str, code: str, words: str
) -> None:
    instance = await node.start(f"poke other={act}", parallelism=TWO)
    _, call = await node.gateway.open(instance)
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == code
    assert words in end.error.message
    await node.reaches(instance, InstanceState.LOST)
    await freed(node)


async def test_a_process_that_cannot_begin_fails_the_start_in_its_own_words(node: NodeUnderTest) -> None:
    status = await node.reaches(await node.begin("hang otherfail", parallelism=TWO), InstanceState.FAILED)
    assert status.error is not None
    assert (status.error.code, status.error.stage) == ("start_failed", "weights")
    assert status.error.message == "these weights are not mine"
    await freed(node)


async def test_one_that_dies_while_they_begin_is_told_as_that_whoever_says_first_that_it_is_gone(
    node: NodeUnderTest,
) -> None:
    """Number 0 sees but the end of its connection, and may before the invoker knows how a process ended.
    ``instance_lost`` of a start has no back-off, and says nothing of memory."""
    status = await node.reaches(await node.begin("parted otherdie", parallelism=TWO), InstanceState.FAILED)
    assert status.error is not None
    assert (status.error.code, status.error.stage) == ("start_failed", "import")
    assert "SIGKILL" in status.error.message
    await freed(node)


# --- sockets --------------------------------------------------------------------------------------
def reached(fds: tuple[tuple[int, ...], ...], sender: int, edge: int) -> list[tuple[int, int]]:
    """Which members' edges a byte comes out of that ``sender`` puts into its ``edge``."""
    made = [[socket.socket(fileno=fd) for fd in own] for own in fds]
    try:
        for own in made:
            for each in own:
                each.setblocking(False)
        made[sender][edge].send(b"x")
        found = []
        for number, own in enumerate(made):
            for place, each in enumerate(own):
                try:
                    each.recv(1)
                    found.append((number, place))
                except BlockingIOError:
                    continue
        return found
    finally:
        for own in made:
            for each in own:
                each.detach()  # they are the wiring's


@given(st.integers(2, 16), st.data())
def test_stages_stand_in_a_ring(count: int, data: st.DataObject) -> None:
    those = members(Parallelism(pipeline=count))
    with wired(those) as fds:
        assert [len(own) for own in fds] == [member.edges for member in those]
        sender = data.draw(st.integers(0, count - 1))
        assert reached(fds, sender, 1) == [((sender + 1) % count, 0)], "what goes to the one behind comes from before"


@given(st.integers(2, 8), st.data())
def test_ranks_are_joined_to_rank_0_and_two_by_two(count: int, data: st.DataObject) -> None:
    those = members(Parallelism(tensor=count))
    with wired(those) as fds:
        assert [len(own) for own in fds] == [member.edges for member in those]
        rank = data.draw(st.integers(1, count - 1))
        assert reached(fds, 0, rank - 1) == [(rank, 0)]
        other = data.draw(st.integers(0, count - 1).filter(lambda each: each != rank))

        def place(own: int, peer: int) -> int:
            """Behind the streams, in the order of the others."""
            streams = 1 if own else count - 1
            return streams + peer - (peer > own)

        assert reached(fds, rank, place(rank, other)) == [(other, place(other, rank))]


def test_one_process_has_no_edges() -> None:
    with wired(members(Parallelism())) as fds:
        assert fds == ((),)


# --- what it takes --------------------------------------------------------------------------------
def test_each_process_counts() -> None:
    alone, both = (claim_of(order(cpu=0.5, parallelism=each)) for each in ({}, TWO))
    assert (both.cpu, both.memory) == (2 * alone.cpu, 2 * alone.memory)


@pytest.mark.parametrize(
    ("parallelism", "gpus", "partitions", "words"),
    [
        ({"tensor": 2}, (), (5,), r"has 1 partition\(s\), parallelism needs 2; convert it with --plan auto:2"),
        ({"tensor": 2}, (), (5, 5, 5), "has 3"),
        (TWO, (), (5, 5, 5), "has 3 .* needs 2; convert it with --plan auto-stages:2"),
        (TWO, (0, 1), (5,), r"has 1 partition\(s\), parallelism needs 2; convert it with --plan auto-stages:2"),
        ({"tensor": 2}, (), (5, 5), ""),
        ({"tensor": 2}, (0, 1), (5, 5), ""),
        (TWO, (), (5,), ""),
        (TWO, (), (5, 5), ""),
        (TWO, (0, 1), (5, 5), ""),
        ({}, (), (5, 5), ""),
    ],
)
def test_a_model_is_shared_out_as_the_instance_is(
    parallelism: dict[str, int], gpus: tuple[int, ...], partitions: tuple[int, ...], words: str
) -> None:
    model = ModelRecord(digest="sha256:m", uri="/m", nbytes=sum(partitions), partitions=partitions)
    asked = msgspec.structs.replace(order(model=model, parallelism=parallelism), gpus=gpus)
    if not words:
        check_partitions(asked)
        return
    with pytest.raises(InvalidCheckpoint, match=words):
        check_partitions(asked)


def test_who_has_a_partition_of_its_own_may_load_no_other() -> None:
    model = ModelRecord(digest="sha256:m", uri="/m", nbytes=10, partitions=(5, 5))
    for kind in ("tensor", "pipeline"):
        assert [partitions_of(model, each) for each in members(Parallelism(**{kind: 2}))] == [(0,), (1,)]
    assert partitions_of(model, Member()) is None, "one process has them all"
    whole = ModelRecord(digest="sha256:m", uri="/m", nbytes=10, partitions=(10,))
    assert [partitions_of(whole, each) for each in members(Parallelism(pipeline=2))] == [None, None]

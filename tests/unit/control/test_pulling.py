"""Models brought to the disks of nodes."""

import asyncio
from typing import Any

import pytest

from sllm_runtime.control.nodes import Nodes
from sllm_runtime.control.pulling import KEPT_S, Pulls
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import Conflict, DeadlineExceeded, Forbidden, ModelNotFound, NodeNotFound
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.control.bench import Bench
from tests.unit.control.scripted_node import ScriptedNode


async def registered(bench: Bench) -> str:
    told: ctl.Registered = await bench.gateway.ask("register", ctl.RegisterModel(uri="s3://bucket/m"))
    assert told.model is not None
    return told.model.digest


async def pulled(bench: Bench, digest: str, *nodes: str, wait_s: float = 15.0) -> ctl.Pulled:
    answer: ctl.Pulled = await bench.gateway.ask("pull", ctl.Pull(digest=digest, nodes=nodes, wait_s=wait_s))
    return answer


async def test_it_comes_to_every_node_that_is_up_or_to_those_that_are_named(bench: Bench, nats: Nats) -> None:
    digest = await registered(bench)
    async with ScriptedNode(await nats.bus("n2"), "n2") as other:
        await until(lambda: "n2" in bench.controller.loop.view.nodes, what="the other node is known")
        told = await pulled(bench, digest[:15], "n2")
        assert told.nodes == ("n2",)
        assert (bench.node.pulls, other.pulls) == ([], [digest])
        told = await pulled(bench, digest)
        assert told.model is not None
        assert (told.model.record.digest, told.nodes) == (digest, ("n1", "n2"))
        assert bench.node.pulls == [digest]


async def test_how_far_it_is_is_told_and_who_asks_again_joins(bench: Bench) -> None:
    digest = await registered(bench)
    bench.node.pulled.clear()
    asked = asyncio.create_task(pulled(bench, digest))
    await until(lambda: bench.node.pulls, what="the node is asked")
    told = await pulled(bench, digest, wait_s=0.1)
    assert told.model is None
    assert told.progress is not None
    assert told.progress.total == 2**20
    bench.node.pulled.set()
    assert (await asked).nodes == ("n1",)


@pytest.mark.parametrize("verb", ["prepare", "pull"])
async def test_a_node_that_restarts_is_asked_again(bench: Bench, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Nobody serves its commands for a moment; that it is gone nobody knows yet."""
    digest, ask, asked = await registered(bench), getattr(Nodes, verb), list[str]()

    async def counted(nodes: Nodes, node: str, *model: Any) -> Any:
        asked.append(node)
        return await ask(nodes, node, *model)

    monkeypatch.setattr(Nodes, verb, counted)
    await bench.node.leave()
    anew = ctl.RegisterModel(uri="s3://bucket/other", wait_s=15.0)
    asking = pulled(bench, digest, "n1") if verb == "pull" else bench.gateway.ask("register", anew)
    answer = asyncio.create_task(asking)
    await until(lambda: len(asked) > 1 or answer.done(), what="it is asked again")
    await bench.node.join()
    assert (await answer).model is not None


async def test_one_of_which_no_more_comes_is_given_up(bench: Bench) -> None:
    digest = await registered(bench)
    bench.node.stuck.add(digest)
    now = [0.0]
    loop = bench.controller.loop
    pulls = Pulls(loop, loop._nodes, clock=lambda: now[0], stalled_s=10.0)
    try:
        asked = pulls.join(loop.view.models[digest], "n1")
        await until(lambda: len(bench.node.pulls) >= 3, what="the node is asked again")
        assert not asked.done.is_set()
        now[0] = 10.5
        await asked.done.wait()
        with pytest.raises(DeadlineExceeded, match=r"n1: no more of model .* for 10 s \(copy, 1 B of 1.0 MiB\)"):
            asked.result()
    finally:
        await pulls.close()


async def test_what_fails_is_told_with_the_node(bench: Bench) -> None:
    digest = await registered(bench)
    bench.node.problem = Forbidden("the bucket refuses")
    with pytest.raises(Forbidden, match="n1: the bucket refuses"):
        await pulled(bench, digest)
    with pytest.raises(NodeNotFound, match="node n9 is not up"):
        await pulled(bench, digest, "n1", "n9")
    with pytest.raises(ModelNotFound):
        await pulled(bench, "sha256:ffff")


async def test_a_source_that_has_changed_is_told_at_once_and_a_copy_that_is_made_is_waited_for(bench: Bench) -> None:
    digest = await registered(bench)
    bench.node.problem = Conflict("it has changed since it was registered", field="model")
    async with asyncio.timeout(5.0):
        with pytest.raises(Conflict, match="n1: it has changed"):
            await pulled(bench, digest)
    assert len(bench.node.pulls) == 1, "the store is asked once"
    bench.node.problem = Conflict("it is being copied already", field="model", retry_after_s=0.5)
    asked = asyncio.create_task(pulled(bench, digest))
    await until(lambda: len(bench.node.pulls) > 2, what="the node is asked again")
    bench.node.problem = None
    assert (await asked).nodes == ("n1",)


async def test_a_node_of_the_release_before_that_makes_a_copy_is_waited_for(bench: Bench) -> None:
    digest = await registered(bench)
    bench.node.problem = Conflict(f"model {digest} is being copied to the SSD tier already; ask again", field="model")
    asked = asyncio.create_task(pulled(bench, digest))
    await until(lambda: len(bench.node.pulls) > 1 or asked.done(), what="the node is asked again")
    bench.node.problem = None
    assert (await asked).nodes == ("n1",)


async def test_a_failure_is_told_while_other_nodes_go_on(bench: Bench, nats: Nats) -> None:
    """At the end of the poll in which it came, or at the next one; and who asks then begins anew."""
    digest = await registered(bench)
    bench.node.pulled.clear()
    async with ScriptedNode(await nats.bus("n2"), "n2") as other:
        await until(lambda: "n2" in bench.controller.loop.view.nodes, what="the other node is known")
        other.problem = Forbidden("its disk refuses")
        with pytest.raises(Forbidden, match="n2: its disk refuses"):
            await pulled(bench, digest, wait_s=0.5)
        assert (await pulled(bench, digest, "n1", wait_s=0.1)).model is None, "the other one goes on"
        loop = bench.controller.loop
        pulls = Pulls(loop, loop._nodes)
        try:
            await pulls.join(loop.view.models[digest], "n2").done.wait()  # between two polls
            with pytest.raises(Forbidden, match="n2: its disk refuses"):
                await pulls.pull(digest, ("n1", "n2"), 0.1)
            other.problem = None
            assert (await pulls.pull(digest, ("n2",), 15.0)).nodes == ("n2",)
        finally:
            await pulls.close()
        bench.node.pulled.set()


async def test_a_failure_of_which_nobody_is_told_is_not_kept_for_long(bench: Bench) -> None:
    digest = await registered(bench)
    bench.node.problem = Forbidden("the bucket refuses")
    now = [0.0]
    loop = bench.controller.loop
    pulls = Pulls(loop, loop._nodes, clock=lambda: now[0])
    try:
        failed = pulls.join(loop.view.models[digest], "n1")
        await failed.done.wait()
        now[0] = KEPT_S - 1
        assert pulls.join(loop.view.models[digest], "n1") is failed
        now[0] = KEPT_S
        assert pulls.join(loop.view.models[digest], "n1") is not failed
    finally:
        await pulls.close()


async def test_a_model_is_prepared_by_the_node_that_began(bench: Bench, nats: Nats) -> None:
    """What is started there meanwhile makes it less idle than others: these would fetch and convert it all again."""
    bench.node.prepared.clear()
    async with ScriptedNode(await nats.bus("n2"), "n2", cpu=bench.node.cpu - 1) as other:
        other.prepared.clear()

        def heard() -> bool:
            nodes = bench.controller.loop.view.nodes
            return all(name in nodes and nodes[name].status is not None for name in ("n1", "n2"))

        await until(heard, what="both are heard")
        asking = asyncio.create_task(
            bench.gateway.ask("register", ctl.RegisterModel(uri="s3://bucket/large", wait_s=10.0))
        )
        await until(lambda: bench.node.prepares, what="the most idle one prepares it")
        bench.node.cpu -= 4  # others are started there
        bench.node.tell()
        await asyncio.sleep(0.5)
        assert other.prepares == []
        bench.node.prepared.set()
        assert (await asking).model is not None

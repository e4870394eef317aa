"""The controller on a real bus, with a provider that does as the test says."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sllm_runtime.control.providing.pool import Errand, Pool, Timing
from sllm_runtime.control.providing.provider import Offer, Shape
from sllm_runtime.control.providing.supplying import Supplying
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.node import AWAITS_NODE
from sllm_runtime.protocol.records import PoolRecord
from sllm_runtime.protocol.subjects import POOL_KEY
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.control.bench import Bench, Gateway, controller_of
from tests.unit.control.scripted_node import ScriptedNode

OFFER = Offer(1, 0, 2, frozenset({"n1"}), Shape(cpu=4.0, memory=2**30))


class Group:
    """A provider: one node, which is the bench's."""

    def __init__(self) -> None:
        self.offer = OFFER
        self.problem: Exception | None = None
        self.looks = 0
        self.removed: list[tuple[str, PoolRecord | None]] = []
        self.bench: Bench | None = None

    async def capacity(self) -> Offer:
        self.looks += 1
        if self.problem is not None:
            raise self.problem
        return self.offer

    async def set_desired(self, nodes: int) -> None:
        raise AssertionError(f"{nodes} are not needed")

    async def remove(self, node: str) -> None:
        assert self.bench is not None
        self.removed.append((node, await self.bench.store.get(POOL_KEY, PoolRecord)))
        self.offer = replace(OFFER, desired=0, members=frozenset())


def supplying(bench: Bench, group: Group, pause: asyncio.Event) -> Supplying:
    """Each look waits for ``pause``, but the first."""

    async def until_told(_seconds: float) -> None:
        await pause.wait()
        pause.clear()

    loop, timing = bench.controller.loop, Timing(idle=0.001, cooldown=0.0)
    group.bench = bench
    return Supplying(loop, loop._ledger, group, Pool(timing), 1.0, until_told)


async def test_a_node_goes_when_the_store_has_that_it_does(bench: Bench) -> None:
    """Idle, drained, stored, removed, in this order, a look each; it is looked again as often as the test says."""
    group, again = Group(), asyncio.Event()
    await until(lambda: "n1" in bench.controller.loop.view.nodes)
    made = supplying(bench, group, again)
    made.start()

    def looked_again() -> bool:
        again.set()
        return bool(group.removed)

    await until(looked_again, what="it was given back")
    ((name, stored),) = group.removed
    assert (name, stored and stored.leaving) == ("n1", ("n1",))
    assert bench.controller.loop.view.nodes["n1"].record.draining
    await made.close()


async def test_who_is_not_sure_to_lead_any_more_removes_nothing_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped while it gave one of two nodes back; who leads by now may use the other one."""
    loop, again, two = bench.controller.loop, asyncio.Event(), frozenset({"g1", "g2"})

    class Stopped(Group):
        async def remove(self, node: str) -> None:
            await super().remove(node)
            monkeypatch.setattr(loop, "_may_act", lambda: False)

    group = Stopped()
    group.offer = replace(OFFER, desired=2, members=two)
    group.bench, looked = bench, asyncio.Event()

    async def pause(_seconds: float) -> None:
        looked.set()
        await again.wait()

    made = Supplying(loop, loop._ledger, group, Pool(Timing(lost=0.0)), 1.0, pause)
    made.start()
    await asyncio.wait_for(looked.wait(), GIVE_UP_S)
    await made.close()
    assert len(group.removed) == 1


async def test_a_provider_that_fails_is_asked_again_and_said_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    group, again = Group(), asyncio.Event()
    group.problem = Unavailable("the cloud is away")
    made = supplying(bench, group, again)
    made.start()
    for problem in (group.problem, group.problem, OSError(28, "No space left on device", "/pool")):
        group.problem = problem
        looks = group.looks
        again.set()
        await until(lambda before=looks: group.looks > before)  # type: ignore[misc]
    again.set()
    await until(lambda: "No space left" in caplog.text)
    assert caplog.text.count("the cloud is away") == 1
    group.problem = None
    again.set()
    pool = bench.controller.loop.view.pool
    assert pool is not None
    await until(lambda: (now := bench.controller.loop.view.pool) is not None and now.offer == OFFER)
    await made.close()


async def test_a_model_is_prepared_on_a_node_that_is_made_for_it(nats: Nats) -> None:
    """Nobody is there: who registers it is told that a node is awaited, and the node when it comes is at work."""
    empty = replace(OFFER, desired=0, members=frozenset())
    async with controller_of(nats) as controller:
        loop, gateway = controller.loop, Gateway(await nats.bus("gw"))
        loop.change(lambda view: replace(view, pool=Pool(Timing(boot=90.0), offer=empty)))

        def errands() -> dict[str, Errand]:
            assert loop.view.pool is not None
            return dict(loop.view.pool.errands)

        request = ctl.RegisterModel(uri="/models/tiny", wait_s=0.01)
        waits: ctl.Registered = await gateway.ask("register", request)
        await until(lambda: errands() == {"/models/tiny": Errand("")}, what="a node is wanted")
        while waits.progress is None or waits.progress.stage != AWAITS_NODE:
            waits = await gateway.ask("register", request)
        assert waits.progress.message == "waiting for a node: one is asked for, expected in 90 s"
        async with ScriptedNode(await nats.bus("n1"), "n1") as node:
            registered: ctl.Registered = await gateway.ask("register", ctl.RegisterModel(uri="/models/tiny"))
            assert registered.model is not None
            assert [command.uri for command in node.prepares] == ["/models/tiny"]
        assert errands() == {}

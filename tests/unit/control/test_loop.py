"""The loop between its plans: who has a turn, what counts as a standstill, what goes out when."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import pytest

from sllm_runtime.control import loop
from sllm_runtime.control.plan import Context, Plan
from sllm_runtime.control.view import View
from sllm_runtime.protocol import ctl, limits, subjects
from sllm_runtime.protocol.node import StartInstance
from sllm_runtime.protocol.records import InstanceRecord
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.control.bench import Bench, manifest, stored_events
from tests.unit.control.scripted_node import ScriptedNode
from tests.unit.control.test_commit import Shut, shut

__all__ = ["shut"]
EXACT = {"fingerprint": "f", "capabilities": ("engine:ours", "exact_resume")}


class Clock:
    """The loop's clocks, which stand until the test has work done or time pass."""

    def __init__(self) -> None:
        self.now, self.used, self.time = time.monotonic(), 0.0, time.time

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.used

    def works(self, seconds: float) -> None:
        self.now, self.used = self.now + seconds, self.used + seconds

    def stands_still(self, seconds: float) -> None:
        self.now += seconds


class Planned:
    """In place of plans: each does ``work`` and is noted, with ``listening_since`` as it begins."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, work: Callable[[], bool]) -> None:
        self.clock, self.work = Clock(), work
        self.since: list[float] = []
        self._loop = bench.controller.loop
        monkeypatch.setattr(loop, "time", self.clock)
        monkeypatch.setattr(loop, "plan", self._plan)
        self._loop._wake.set()

    def _plan(self, view: View, context: Context) -> Plan:
        self.since.append(view.listening_since)
        more = self.work()
        self._loop._wake.set()
        return Plan(view, more=more)

    async def so_many(self, count: int) -> None:
        await until(lambda: len(self.since) >= count)


class Lead:
    """In place of what says whether it leads; at first it is sure."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self._loop, self._clock, self._sure, self._asked = bench.controller.loop, clock, True, 0
        monkeypatch.setattr(self._loop, "_may_act", self._is)

    def _is(self) -> bool:
        self._asked += 1
        return self._sure

    async def is_sure(self, sure: bool, seconds: float) -> None:
        """For so long, looked at every 0.1 s of them."""
        self._sure = sure
        for _ in range(round(seconds / 0.1)):
            self._clock.works(0.1)
            before = self._asked
            self._loop._wake.set()
            await until(partial(self._asked_since, before + 2), what="it looked")

    def _asked_since(self, count: int) -> bool:
        return self._asked > count


@pytest.mark.parametrize("took", [0.0, 1.5 * loop.LONG_S], ids=["more of the same", "one that took long"])
async def test_between_plans_that_follow_at_once_others_have_their_turn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, took: float
) -> None:
    turns: list[int] = []
    before: list[int] = []

    def work() -> bool:
        before.append(len(turns))
        asyncio.get_running_loop().call_soon(turns.append, 0)
        planned.clock.works(took)
        return not took

    planned = Planned(bench, monkeypatch, work)
    await planned.so_many(5)
    assert before[:5] == [0, 1, 2, 3, 4], "whoever was ready when a plan was made had a turn before the next one"


@pytest.mark.parametrize("standstill", [False, True])
async def test_what_a_loop_takes_for_its_own_work_is_no_standstill(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, standstill: bool
) -> None:
    """Else nobody's silence would ever count in a cluster whose plans take long."""
    monkeypatch.setattr(limits, "STALL_S", 0.1)

    def work() -> bool:
        if standstill:
            planned.clock.stands_still(0.2)
        else:
            planned.clock.works(0.2)
        return False

    planned = Planned(bench, monkeypatch, work)
    await planned.so_many(4)
    assert (len(set(planned.since[1:4])) == 1) is not standstill


async def test_who_is_not_sure_to_lead_makes_no_plan(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    own, made, asked = bench.controller.loop, list[View](), list[bool]()

    def planned(view: View, _context: Context) -> Plan:
        made.append(view)
        return Plan(view)

    def unsure() -> bool:
        asked.append(False)
        asyncio.get_running_loop().call_soon(own._wake.set)
        return False

    monkeypatch.setattr(loop, "plan", planned)
    monkeypatch.setattr(own, "_may_act", unsure)
    await until(lambda: len(asked) > 5 or made, what="several plans were due")
    assert not made


async def test_no_silence_counts_from_while_it_was_not_sure_to_lead(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NATS stood still: the proof that it leads may be the first that comes, before any node's report."""
    planned = Planned(bench, monkeypatch, lambda: True)
    lead = Lead(bench, monkeypatch, planned.clock)
    await planned.so_many(3)
    heard = planned.since[-1]
    await lead.is_sure(False, 2.5)  # longer than UNSURE_S
    made = len(planned.since)
    await lead.is_sure(True, 0.1)
    await planned.so_many(made + 3)
    assert len(set(planned.since[:made])) == 1
    assert {heard} < {*planned.since[made:], heard}
    assert len(set(planned.since[made:])) == 1, "from one moment on"


async def test_a_bug_that_keeps_plans_from_being_made_is_told_and_ends_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next leader would meet it as well: what is there is served meanwhile."""

    def work() -> bool:
        asyncio.get_running_loop().call_soon(bench.controller.loop._wake.set)
        if len(planned.since) <= 3:
            raise ZeroDivisionError
        return False

    planned = Planned(bench, monkeypatch, work)
    await planned.so_many(5)
    assert (await bench.gateway.ask("ping", ctl.Nothing())).note == "leading"
    assert caplog.text.count("a bug keeps plans from being made") == 1


async def test_a_source_is_told_to_end_once_it_is_stored_where_its_calls_go_on(
    nats: Nats, bench: Bench, shut: Shut
) -> None:
    """A controller after this one would find it on its way out, and nobody would carry its calls over."""
    other = ScriptedNode(await nats.bus("n2"), "n2")

    def starts(node: ScriptedNode) -> Callable[[StartInstance], InstanceState]:
        def behave(command: StartInstance) -> InstanceState:
            asyncio.get_running_loop().call_soon(lambda: node.put(command.instance, InstanceState.READY, **EXACT))
            return InstanceState.STARTING

        return behave

    bench.node.behave, other.behave = starts(bench.node), starts(other)
    await bench.gateway.deploy(manifest(engine=True, model="/models/tiny", min_instances=1))
    (source,) = bench.live()
    key = subjects.instance_key(source)
    shut.refuses = lambda about, record: about == key and record is not None and bool(record.moves_to)
    bench.node.put(source, InstanceState.READY, running=1, **EXACT)
    async with other:
        await until(lambda: "n2" in bench.controller.loop.view.nodes)
        await bench.gateway.ask("migrate", ctl.Migrate(instance=source, to="n2", wait_s=0.0))
        await until(lambda: len(shut.refused) > 10, what="the destination is ready, and its record is refused")
        assert bench.controller.loop.view.instances[source].stop is not None
        assert not bench.node.stops
        shut.open()
        await until(lambda: bench.node.stops, what="it is told when that is stored")
        assert (await bench.stored(key, InstanceRecord)).moves_to


async def test_what_who_is_not_sure_to_lead_hears_of_is_told_once_it_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = bench.controller.loop
    await bench.gateway.deploy(manifest(min_instances=1))
    (instance,) = bench.live()
    sure, is_sure = False, own._may_act
    monkeypatch.setattr(own, "_may_act", lambda: sure and is_sure())
    bench.node.put(instance, InstanceState.LOST)
    await until(lambda: instance not in bench.live(), what="it has heard that")
    await own._bus.flush()
    lost = "instance.lost", instance
    assert lost not in [(event.kind, event.instance) for event in await stored_events(bench)]
    sure = True
    own._wake.set()

    async def told() -> bool:
        return lost in [(event.kind, event.instance) for event in await stored_events(bench)]

    await until(told, what="it leads all the same")


async def test_a_node_that_dies_is_silent_also_where_each_renewal_takes_a_second(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RENEW_S 0.4, SURE_S 1.5: sure for 0.5 s and not for 0.9 s in turns. Reports come by no store, all the while."""
    planned = Planned(bench, monkeypatch, lambda: True)
    lead = Lead(bench, monkeypatch, planned.clock)
    await planned.so_many(3)

    for _ in range(5):  # 7 s
        await lead.is_sure(False, 0.9)
        await lead.is_sure(True, 0.5)
    assert bench.controller.loop.view.silent("dead", planned.clock.now), "it has said nothing for 7 s"

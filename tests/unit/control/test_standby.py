"""Standing by, being elected, and a leader that is no longer sure. Clocks are handed in: no test depends on how fast
anything is."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.control.daemon import ControllerSettings, lead
from sllm_runtime.control.lease import RENEW_S, SURE_S, Leadership
from sllm_runtime.control.standby import MOST_S, SILENT_S, Silence, stand_by, vacant
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import InvalidRequest, StaleTerm, Unavailable
from sllm_runtime.protocol.records import Lease, Term
from sllm_runtime.protocol.subjects import LEADER, LEASE_KEY, TERM_KEY, node_key
from tests.fixtures.nats import CONTROLLER, CONTROLLER_2, GATEWAY, Nats
from tests.fixtures.waiting import GIVE_UP_S, until

A, B = Term(term=1, controller="a"), Term(term=2, controller="b")


@given(looks=st.lists(st.tuples(st.floats(0, 100), st.sampled_from([0, 1, None])), max_size=50))
def test_silence_never_counts_more_than_was_looked_at(looks: list[tuple[float, int | None]]) -> None:
    """Gaps in the looking (a process that did not run, a store that was away) are nobody's silence."""
    silence, now, most = Silence(), 0.0, 0.0
    before: int | None = None
    for passed, beat in looks:
        now += passed
        if beat is None:
            silence.blind()
        else:
            most = most + min(passed, MOST_S) if beat == before else 0.0
            assert silence.look(A, Lease(term=1, controller="a", beat=beat), now) == pytest.approx(most)
        before = beat


def test_when_a_standby_is_elected() -> None:
    held = Lease(term=2, controller="b", beat=7)
    left = Lease(term=2, controller="b", beat=7, released=True)
    assert vacant(None, None, 0.0, "a"), "nobody ever led"
    assert vacant(B, held, 0.0, "b"), "an earlier life of its own"
    assert vacant(B, left, 0.0, "a"), "it has ended in order"
    assert vacant(B, held, SILENT_S, "a")
    assert vacant(B, None, SILENT_S, "a")
    assert not vacant(B, held, SILENT_S - 0.01, "a")
    assert not vacant(B, None, 0.0, "a"), "elected just now"
    assert not vacant(B, Lease(term=1, controller="a", released=True), 0.0, "a"), "of the term before"


class Time:
    """A clock that only ``pause`` moves; ``each`` is done at every pause."""

    def __init__(self) -> None:
        self.now = 0.0
        self.beats = 0
        self.leader: StateStore | None = None

    def clock(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.now += seconds
        if self.leader is not None and self.beats:
            self.beats -= 1
            await self.leader.put(LEASE_KEY, Lease(term=1, controller=CONTROLLER, beat=self.beats))


async def test_a_standby_waits_while_the_lease_is_renewed_and_then_is_elected(nats: Nats) -> None:
    leader, standby, time = await nats.store(CONTROLLER), await nats.store(CONTROLLER_2), Time()
    await leader.elect(CONTROLLER)
    time.leader, time.beats = leader, 100
    told: list[float] = []
    elected = stand_by(standby, CONTROLLER_2, lambda: told.append(time.now), clock=time.clock, pause=time.pause)
    assert await elected == 2
    assert time.beats == 0, "not before the last beat"
    assert 100 * 0.1 + SILENT_S <= time.now + 0.001 < 100 * 0.1 + SILENT_S + 1
    assert told[0] == 0.0
    with pytest.raises(StaleTerm):
        await leader.put(LEASE_KEY, Lease(term=1, controller=CONTROLLER))


async def test_who_takes_long_to_take_over_is_not_taken_for_silent(nats: Nats) -> None:
    """There may be much to read: it is not replaced again and again by who has as much to read."""
    leader, standby = await nats.store(CONTROLLER), await nats.store(CONTROLLER_2)
    await leader.elect(CONTROLLER)
    leadership = Leadership(leader, await nats.bus(CONTROLLER), CONTROLLER)
    standing_by = asyncio.create_task(stand_by(standby, CONTROLLER_2, lambda: None))
    async with leadership.taking_over():
        await asyncio.wait([standing_by], timeout=SILENT_S + 1.0)
        assert not standing_by.done()
    assert await asyncio.wait_for(standing_by, GIVE_UP_S) == 2, "nobody renews it any more"
    await leadership.release()


async def test_of_many_standbys_one_is_elected(nats: Nats) -> None:
    leader = await nats.store(CONTROLLER)
    await leader.elect(CONTROLLER)
    await leader.put(LEASE_KEY, Lease(term=1, controller=CONTROLLER, released=True))
    stores = [await nats.store(CONTROLLER_2) for _ in range(3)]
    told: list[str] = []
    standing = [
        asyncio.create_task(stand_by(store, f"c{n}", lambda n=n: told.append(f"c{n}")))  # type: ignore[misc]
        for n, store in enumerate(stores)
    ]
    done, waiting = await asyncio.wait(standing, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [2]
    try:
        await until(lambda: len(set(told)) == 2, what="the others stand by")
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def test_a_lost_answer_to_an_election_is_no_second_one(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await nats.store(CONTROLLER)
    publish = store._publish

    async def lossy(key: str, data: bytes, headers: dict[str, str]) -> int:
        await publish(key, data, headers)
        monkeypatch.undo()
        raise Unavailable("the answer was lost")

    monkeypatch.setattr(store, "_publish", lossy)
    assert await store.elect(CONTROLLER, over=0) == 1
    await store.put(LEASE_KEY, Lease(term=1, controller=CONTROLLER))


async def test_a_leader_is_sure_only_as_long_as_it_has_proof(nats: Nats) -> None:
    store, time = await nats.store(CONTROLLER), Time()
    gateway = await nats.bus(GATEWAY)
    heard: list[Term] = []
    await gateway.subscribe(LEADER, Term, lambda term, _: heard.append(term))
    await store.elect(CONTROLLER)
    leadership = Leadership(store, store._bus, CONTROLLER, clock=time.clock)
    assert leadership.sure
    time.now += SURE_S
    assert not leadership.sure
    with pytest.raises(Unavailable, match="still leads"):
        await leadership.assured(0.01)
    running = asyncio.create_task(leadership.run())
    await leadership.assured()
    assert leadership.sure
    await until(lambda: heard, what="it said so")
    assert heard[0] == Term(term=1, controller=CONTROLLER)
    other = await nats.store(CONTROLLER_2)
    await other.elect(CONTROLLER_2)
    with pytest.raises(StaleTerm):
        await running
    time.now += SURE_S
    with pytest.raises(Unavailable):
        await leadership.assured(0.01)
    await leadership.release()
    assert await other.get(LEASE_KEY, Lease) != Lease(term=1, controller=CONTROLLER, released=True)


async def test_a_leader_whose_machine_slept_is_not_sure(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """``time.monotonic`` stands still meanwhile."""
    store, read = await nats.store(CONTROLLER), time.clock_gettime
    await store.elect(CONTROLLER)
    leadership = Leadership(store, store._bus, CONTROLLER)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: read(clock) + (clock == time.CLOCK_BOOTTIME) * 600.0)
    assert not leadership.sure
    await leadership.release()


async def test_who_finds_another_one_leading_after_a_reconnect_is_not_sure_any_more(nats: Nats) -> None:
    """Whatever was proved before."""
    store, time = await nats.store(CONTROLLER), Time()
    await store.elect(CONTROLLER)
    leadership = Leadership(store, store._bus, CONTROLLER, clock=time.clock)
    await (await nats.store(CONTROLLER_2)).elect(CONTROLLER_2)
    assert leadership.sure
    leadership._look()
    await until(lambda: not leadership.sure, what="it has looked")
    await leadership.release()


async def test_where_nothing_can_be_written_reading_is_proof(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk does not keep ready functions from new instances."""
    store, time = await nats.store(CONTROLLER), Time()
    await store.elect(CONTROLLER)

    async def full(*_: object) -> int:
        raise Unavailable("no space left")

    monkeypatch.setattr(store, "_publish", full)
    leadership = Leadership(store, store._bus, CONTROLLER, clock=time.clock)
    time.now += SURE_S
    running = asyncio.create_task(leadership.run())
    await leadership.assured()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await leadership.release()


class Renewals:
    """In place of the pauses of a leadership: how many there were; the next renewal is made when it is ``let``."""

    def __init__(self) -> None:
        self.pauses = 0
        self._let = asyncio.Semaphore(0)

    async def pause(self, _seconds: float) -> None:
        self.pauses += 1
        await self._let.acquire()

    def let(self) -> None:
        self._let.release()


@contextlib.asynccontextmanager
async def renewing(leadership: Leadership) -> AsyncIterator[None]:
    running = asyncio.create_task(leadership.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])
        await leadership.release()


async def test_a_proof_is_as_old_as_its_question(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may have been elected while the answer was on its way."""
    store, time, renewals = await nats.store(CONTROLLER), Time(), Renewals()
    await store.elect(CONTROLLER)
    put = store.put_once

    async def slow(*asked: Any) -> None:
        await put(*asked)
        time.now += SURE_S

    monkeypatch.setattr(store, "put_once", slow)
    leadership = Leadership(store, store._bus, CONTROLLER, clock=time.clock, pause=renewals.pause)
    async with renewing(leadership):
        await until(lambda: renewals.pauses, what="it is renewed")
        assert not leadership.sure


async def test_a_proof_by_reading_is_as_old_as_that_question(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as that of the write before it, which was waited for in vain for most of the time that a proof holds: it
    would be sure for a moment of each renewal, in which no plan may fall."""
    store, time, renewals = await nats.store(CONTROLLER), Time(), Renewals()
    await store.elect(CONTROLLER)
    confirm = store.confirm

    async def stuck(*_: object) -> None:
        time.now += 1.0
        raise Unavailable("no answer")

    async def slow() -> None:
        await confirm()
        time.now += RENEW_S

    monkeypatch.setattr(store, "put_once", stuck)
    monkeypatch.setattr(store, "confirm", slow)
    leadership = Leadership(store, store._bus, CONTROLLER, clock=time.clock, pause=renewals.pause)
    time.now += SURE_S
    async with renewing(leadership):
        await until(lambda: renewals.pauses, what="it is renewed")
        time.now += RENEW_S
        assert leadership.sure
        time.now += SURE_S - RENEW_S
        assert not leadership.sure


@pytest.mark.parametrize("what", ["another write", "the fence that moves"])
async def test_a_proof_is_no_older_for_what_was_before_it(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Writes go one at a time, and behind one that had no answer the fence is moved first: a slow disk takes as long
    again for that."""
    store, time, renewals = await nats.store(CONTROLLER), Time(), Renewals()
    await store.elect(CONTROLLER)
    publish, written = store._publish, list[str]()

    async def slow(key: str, data: bytes, headers: dict[str, str]) -> int:
        sequence = await publish(key, data, headers)
        written.append(key)
        time.now += 0.7
        return sequence

    monkeypatch.setattr(store, "_publish", slow)
    leadership = Leadership(store, store._bus, CONTROLLER, clock=time.clock, pause=renewals.pause)
    first = node_key("n1") if what == "another write" else TERM_KEY
    if what == "another write":  # which has its turn before the lease
        writing = asyncio.create_task(store.put(first, Lease(term=1, controller=CONTROLLER)))
    else:
        writing = asyncio.create_task(asyncio.sleep(0))
        store._unanswered = store._fence
    async with renewing(leadership):
        await until(lambda: renewals.pauses, what="it is renewed")
        assert written == [first, LEASE_KEY]
        time.now += RENEW_S
        assert leadership.sure
        time.now += SURE_S
        assert not leadership.sure
    await writing


async def test_where_nothing_can_be_read_either_nothing_is_proved(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    store, time, renewals = await nats.store(CONTROLLER), Time(), Renewals()
    await store.elect(CONTROLLER)

    async def away(*_: object, **__: object) -> None:
        raise Unavailable("nobody answers")

    monkeypatch.setattr(store, "_publish", away)
    monkeypatch.setattr(store, "_read", away)
    leadership = Leadership(store, store._bus, CONTROLLER, clock=time.clock, pause=renewals.pause)
    time.now += SURE_S
    async with renewing(leadership):
        for tries in (1, 2):
            await until(lambda tries=tries: renewals.pauses == tries, what="it was tried")  # type: ignore[misc]
            assert not leadership.sure
            renewals.let()


async def test_who_is_deposed_while_it_takes_over_does_not_lead(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    store, renewals = await nats.store(CONTROLLER), Renewals()
    await store.elect(CONTROLLER)
    put, tried = store.put_once, list[str]()

    async def counted(*asked: Any) -> None:
        try:
            await put(*asked)
        finally:
            tried.append(asked[0])

    monkeypatch.setattr(store, "put_once", counted)
    leadership = Leadership(store, store._bus, CONTROLLER, pause=renewals.pause)

    async def take_over() -> None:
        async with leadership.taking_over():
            await until(lambda: renewals.pauses, what="it is renewed")
            await (await nats.store(CONTROLLER_2)).elect(CONTROLLER_2)
            renewals.let()
            await until(lambda: len(tried) == 2, what="it is not renewed any more")

    with pytest.raises(StaleTerm, match="term 2 leads"):
        await take_over()
    await leadership.release()


async def test_after_a_reconnect_it_is_looked_at_once_who_leads(nats: Nats) -> None:
    """Not when what was in flight has timed out."""
    store, time = await nats.store(CONTROLLER), Time()
    await store.elect(CONTROLLER)
    leadership = Leadership(store, store._bus, CONTROLLER, clock=time.clock)
    time.now += SURE_S
    assert not leadership.sure
    await nats.kill()
    await nats.start()
    await until(lambda: leadership.sure, what="it has looked")
    await leadership.release()


async def test_settings_that_cannot_work_are_told_before_it_stands_by(nats: Nats) -> None:
    """Else it says READY, and ends by them when the leader has gone and it is elected."""
    wrong = ControllerSettings(**nats.settings(CONTROLLER_2).model_dump(), node_provider="aws")
    async with lead(nats.settings(CONTROLLER), CONTROLLER) as first:
        stop, standing = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(first.run(stop))
        try:
            async with asyncio.timeout(5.0):
                with pytest.raises(InvalidRequest, match="SLLM_NODES_GROUP"):
                    async with lead(wrong, CONTROLLER_2, standing_by=standing.set):
                        pass
            assert not standing.is_set()
        finally:
            stop.set()
            with contextlib.suppress(StaleTerm):
                await running


async def test_what_is_released_is_vacant_at_once(nats: Nats) -> None:
    leader, standby, time = await nats.store(CONTROLLER), await nats.store(CONTROLLER_2), Time()
    await leader.elect(CONTROLLER)
    await Leadership(leader, leader._bus, CONTROLLER).release()
    assert await stand_by(standby, CONTROLLER_2, lambda: None, clock=time.clock, pause=time.pause) == 2
    assert time.now == 0.0


async def test_a_store_that_is_away_is_no_silent_leader(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a standby could look before: of what was not seen nothing counts."""
    leader, standby, time = await nats.store(CONTROLLER), await nats.store(CONTROLLER_2), Time()
    await leader.elect(CONTROLLER)
    get, away = standby.get, SILENT_S - 0.2

    async def now_and_then(*asked: Any, **how: Any) -> Any:
        if away <= time.now < away + 0.1:
            raise Unavailable("nobody answers")
        return await get(*asked, **how)

    monkeypatch.setattr(standby, "get", now_and_then)
    assert await stand_by(standby, CONTROLLER_2, lambda: None, clock=time.clock, pause=time.pause) == 2
    assert time.now > away + SILENT_S


async def test_a_store_that_is_away_is_said_once(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not ten times a second for as long as it is."""
    caplog.set_level(logging.INFO, stand_by.__module__)
    standby, time = await nats.store(CONTROLLER_2), Time()
    get = standby.get

    async def late(*asked: Any, **how: Any) -> Any:
        if time.now < 10.0:
            raise Unavailable("nobody answers")
        return await get(*asked, **how)

    monkeypatch.setattr(standby, "get", late)
    assert await stand_by(standby, CONTROLLER_2, lambda: None, clock=time.clock, pause=time.pause) == 1
    assert caplog.messages == ["cannot see who leads: nobody answers"]


async def test_who_ends_in_order_is_followed_at_once(nats: Nats) -> None:
    stop, standing, next_leads = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def second() -> int:
        async with lead(nats.settings(CONTROLLER_2), CONTROLLER_2, standing_by=standing.set) as controller:
            next_leads.set()
            return controller.term

    async with lead(nats.settings(CONTROLLER), CONTROLLER) as first:
        running = asyncio.create_task(first.run(stop))
        waiting = asyncio.create_task(second())
        await until(standing.is_set, what="the second one stands by")
        stop.set()
        with contextlib.suppress(StaleTerm):  # a disk may have stood still for longer than a lease
            await running
    await until(next_leads.is_set, what="the second one leads")
    assert await waiting > first.term

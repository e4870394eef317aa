"""Who has left NATS: the rule for itself, and by the word of a real nats-server."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.platform import presence
from sllm_runtime.platform.presence import APART_S, LEFT_S, LOOK_S, MOST, NOTHING, SETTLE_S, Absences, Presence
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.node import Ok, StopInstance
from tests.fixtures.nats import CONTROLLER, GATEWAY, NODE, NODE_2, Nats
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import until

LOOKS = st.lists(st.tuples(st.integers(1, 12), st.dictionaries(st.sampled_from("abc"), st.booleans())), max_size=20)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections stand for long."""
    monkeypatch.setattr(presence, "SETTLE_S", 0.0)


@given(LOOKS)
def test_who_was_asked_for_and_not_there_for_so_long_has_left(looks: list[tuple[int, dict[str, bool]]]) -> None:
    """Beside all looks so far, from the last one back."""
    absences, now, past = Absences(), 0.0, []
    for eighths, there in looks:
        now += eighths / 8
        past.append((now, there))
        left = absences.take(there, now)
        for name in "abc":
            since = None
            for at, found in reversed(past):
                if found.get(name, True) or (since is not None and since - at > APART_S):
                    break
                since = at
            assert (name in left) is (since is not None and now - since >= LEFT_S)


async def test_the_server_says_at_once_that_nobody_listens(nats: Nats) -> None:
    bus, node = await nats.bus(CONTROLLER), await nats.bus(NODE)
    subject = subjects.node_command(NODE, "stop")
    assert not await bus.served(subject, NOTHING, timeout_s=60.0)
    stops: list[StopInstance] = []

    async def stop(order: StopInstance) -> Ok:
        stops.append(order)
        return Ok()

    served = await node.serve(subject, StopInstance, stop)
    assert await bus.served(subject, NOTHING, timeout_s=60.0), "it is refused, by who is there"
    assert stops == []
    await served.unsubscribe()
    mute = await node.listen(subject, lambda _subject, _reply, _data: None)
    assert await bus.served(subject, NOTHING, timeout_s=0.2), "who says nothing may be there"
    await mute.unsubscribe()
    await node.flush()
    assert not await bus.served(subject, NOTHING, timeout_s=60.0)


async def test_without_a_connection_nobody_has_left(nats: Nats) -> None:
    bus = await nats.bus(CONTROLLER)
    subject = subjects.node_command(NODE, "stop")
    assert not await bus.served(subject, NOTHING, timeout_s=60.0)
    assert nats.server.child is not None
    with suspended(nats.server.child.pid):
        assert await bus.served(subject, NOTHING, timeout_s=0.2)
    await nats.kill()
    await until(lambda: not bus.connected)
    assert await bus.served(subject, NOTHING, timeout_s=0.2)
    await nats.start()
    await until(lambda: bus.connected)


@given(st.sets(st.integers(0, 40), max_size=40), st.sets(st.integers(0, 40), max_size=5), st.integers(1, 12))
def test_all_have_their_turn_and_who_was_not_there_is_asked_for_each_time(
    present: set[int], absent: set[int], most: int
) -> None:
    absences = Absences()
    overdue = [str(number) for number in sorted(present | absent)]
    gone = {str(number) for number in absent}
    asked: set[str] = set()
    for look in range(7 * len(overdue) + 1):
        names = absences.next(overdue, most)
        assert len(names) == len(set(names)) == min(most, len(overdue))
        known = {name for name in asked if name in gone}
        if len(gone) < most:
            assert known <= set(names)
        asked.update(names)
        absences.take({name: name not in gone for name in names}, look * LOOK_S)
    assert len(gone) >= most or asked == set(overdue)


@pytest.mark.usefixtures("settled")
async def test_who_leaves_is_told_of_and_who_stands_still_or_comes_again_is_not(nats: Nats) -> None:
    bus, node, still = await nats.bus(CONTROLLER), await nats.bus(NODE), await nats.bus(NODE_2)
    now = 0.0
    overdue, left = {NODE, NODE_2}, list[str]()

    async def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    looks = Presence(
        bus, lambda name: subjects.node_command(name, "stop"), NOTHING, lambda: overdue, left.append, lambda: now, pause
    )

    async def look() -> None:
        await pause(presence.LOOK_S)
        await looks.look()

    await still.listen(subjects.node_command(NODE_2, "stop"), lambda _subject, _reply, _data: None)
    there = await node.listen(subjects.node_command(NODE, "stop"), lambda _subject, _reply, _data: None)
    await look()
    await there.unsubscribe()
    await node.flush()
    for _ in range(int(LEFT_S / LOOK_S) - 1):
        await look()
    there = await node.listen(subjects.node_command(NODE, "stop"), lambda _subject, _reply, _data: None)
    for _ in range(8):
        await look()
    assert left == [], "it came again"
    await node.close()
    closed = now
    while not left:  # the server may learn of it, or say so, a look later
        await look()
    assert left == [NODE]
    assert now - closed > LEFT_S, "it may yet come"
    overdue.discard(NODE)
    await look()
    overdue.add(NODE)
    for _ in range(int(LEFT_S / LOOK_S)):
        await look()
    assert left == [NODE], "it has been heard since"


async def test_when_all_reconnect_nobody_has_left_for_a_while(nats: Nats) -> None:
    bus = await nats.bus(CONTROLLER)
    left: list[str] = []
    now = 0.0
    looks = Presence(
        bus, lambda name: subjects.node_command(name, "stop"), NOTHING, lambda: [NODE], left.append, lambda: now
    )

    async def until_left(since: float) -> None:
        nonlocal now
        while not left:
            now += LOOK_S
            await looks.look()
        assert left == [NODE]
        assert now - since >= SETTLE_S + LEFT_S
        left.clear()

    await until_left(0.0)
    again = now
    await nats.kill()
    await until(lambda: not bus.connected)
    await nats.start()
    await until(lambda: looks._settled > again)
    await until_left(again)
    await looks.close()


@pytest.mark.usefixtures("settled")
async def test_who_comes_again_as_the_last_answer_is_on_its_way_has_not_left(nats: Nats) -> None:
    bus = await nats.bus(CONTROLLER)
    left: list[str] = []
    asked, now = 0, 0.0

    def overdue() -> list[str]:
        """Whoever looks asks once, and again where it has come to a verdict."""
        nonlocal asked
        asked += 1
        return [NODE] if asked == 1 else []

    looks = Presence(bus, lambda name: subjects.node_command(name, "stop"), NOTHING, overdue, left.append, lambda: now)
    while asked < 2 and not left:
        asked = 0
        now += LOOK_S
        await looks.look()
    assert left == []
    await looks.close()


@pytest.mark.usefixtures("settled")
async def test_so_many_are_asked_for_at_once(nats: Nats) -> None:
    bus = await nats.bus(CONTROLLER)
    names = [f"n{number}" for number in range(MOST + 50)]
    asked: list[str] = []
    left: list[str] = []
    now = 0.0

    def subject(name: str) -> str:
        asked.append(name)
        return subjects.node_command(name, "stop")

    def gone(name: str) -> None:
        left.append(name)
        names.remove(name)

    looks = Presence(bus, subject, NOTHING, lambda: list(names), gone, lambda: now)
    everybody = list(names)
    while names:
        overdue = len(names)
        now += LOOK_S
        await looks.look()
        assert len(set(asked)) == len(asked) == min(MOST, overdue)
        asked.clear()
    assert sorted(left) == sorted(everybody)


@pytest.mark.usefixtures("settled")
async def test_a_verdict_that_breaks_something_is_not_the_last(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(presence, "LEFT_S", 0.1)
    left: list[str] = []

    def breaks(name: str) -> None:
        left.append(name)
        raise ValueError("it breaks")

    looks = Presence(await nats.bus(GATEWAY), subjects.heard, NOTHING, lambda: ["g2"], breaks)
    looks.start()
    await until(lambda: len(left) > 1)
    await looks.close()
    assert "it breaks" in caplog.text


async def test_it_ends(nats: Nats) -> None:
    looks = Presence(await nats.bus(GATEWAY), subjects.heard, NOTHING, lambda: ["g2"], lambda _: None)
    looks.start()
    await asyncio.sleep(0)
    await looks.close()
    await looks.close()

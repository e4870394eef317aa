"""Logs that are told before they are stored: whoever takes a life over knows what anybody has heard of it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from httpx import Response
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sllm_gateway.backlog import Backlog
from sllm_gateway.hearsay import Hearsay
from sllm_gateway.ledger import streams
from sllm_gateway.lives import Lives, Lost, Over
from sllm_gateway.overheard import Overheard
from sllm_gateway.stored import Stored
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.errors import DeadlineExceeded, ProtocolError, SllmError, Unavailable
from sllm_runtime.protocol.frames import Ids
from sllm_runtime.protocol.limits import BATCH_BYTES
from sllm_runtime.protocol.lives import BEAT_S, LIVES_AGE_S, TAG, AskHeard, Gone, Heard, Log, More, Whole
from sllm_runtime.protocol.subjects import LIVES_STREAM, life_beat
from tests.fixtures.nats import CONTROLLER, GATEWAY, GATEWAY_2, Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import World, entry, world
from tests.unit.gateway.test_resumption import engine
from tests.unit.gateway.test_succession import STEPS, Gateway, asked, gone_on_with, repeating, six, told, two


# --- what waits, and what was heard ---------------------------------------------------------------
@given(st.lists(STEPS, max_size=60), st.lists(st.booleans(), min_size=60, max_size=60))
def test_what_is_stored_and_what_was_heard_are_what_there_was(
    steps: list[tuple[str, int, int]], leader: list[bool]
) -> None:
    """``leader``: whether there is one after each step, which stores what waits then."""
    gateway, backlog, heard = Gateway(), Backlog(), Overheard()
    stored: dict[int, bytes] = {}
    for step, led in zip([*steps, ("write", 0, 1)], [*leader[: len(steps)], False], strict=True):
        before = len(gateway.logs)
        gateway.do(*step)
        for log in gateway.logs[before:]:
            heard.take("l", *backlog.add(log), now=gateway.now)
        while led and backlog.first is not None:
            number, data = backlog.first
            stored[number] = data
            backlog.stored(number)
    logs = stored | heard.after("l", max(stored, default=-1))
    found = streams(codec.unpack(Log, logs[number]) for number in sorted(logs))
    assert told(found) == gateway.left()


def a_log(number: int) -> Log:
    return Log((Gone(f"call-{number}"),))


def test_a_backlog_is_stored_in_order_and_is_bounded() -> None:
    size = len(codec.pack(a_log(0)))
    backlog = Backlog(most=2 * size)
    for number in range(3):
        assert backlog.add(a_log(number))[0] == number
    assert backlog.first == (0, codec.pack(a_log(0)))
    assert not backlog.gap
    backlog.add(a_log(3))
    assert backlog.gap
    assert backlog.first == (3, codec.pack(a_log(3)))
    backlog.stored(0)
    assert backlog.first is not None, "what was given up is not the first of what waits"
    backlog.stored(3)
    assert backlog.first is None
    backlog.clear()
    assert not backlog.gap
    assert backlog.add(a_log(4))[0] == 4


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 60)), max_size=60))
def test_what_was_heard_is_bounded_in_bytes_and_in_time(messages: list[tuple[str, int, int]]) -> None:
    now, kept, heard = 0.0, dict[tuple[str, int], float](), Overheard(most=40)
    for life, number, wait in messages:
        now += wait
        heard.take(life, number, b"x" * 10, now)
        kept = {each: when for each, when in kept.items() if now - when <= LIVES_AGE_S}
        kept.setdefault((life, number), now)
        kept = dict(list(kept.items())[-4:])
        assert {(each, n) for each in "ab" for n in heard.after(each)} == set(kept)


def test_what_is_stored_or_given_up_gives_its_room_back() -> None:
    backlog = Backlog(most=2 * len(codec.pack(a_log(0))))
    for number in range(6):
        backlog.add(a_log(number))
        backlog.stored(number)
    assert not backlog.gap
    for number in range(6, 10):
        backlog.add(a_log(number))
    assert backlog.gap
    backlog.clear()
    backlog.add(a_log(0))
    assert not backlog.gap


def test_a_life_of_which_nothing_is_kept_leaves_nothing() -> None:
    heard = Overheard(most=10)
    for life in "abc":
        heard.take(life, 0, b"x" * 10, 0.0)
    assert list(heard._lives) == ["c"]


def test_what_comes_late_is_in_its_place() -> None:
    """As it was told again: who asks for the next ones asks behind the last that it was given."""
    heard = Overheard()
    for number in (0, 2, 1):
        heard.take("l", number, b"x", 0.0)
    assert list(heard.after("l")) == [0, 1, 2]


def test_what_is_told_again_changes_nothing() -> None:
    heard = Overheard()
    for data in (b"a", b"b"):
        heard.take("l", 1, data, 0.0)
    assert heard.after("l") == {1: b"a"}
    assert heard.after("l", 1) == {}


# --- over NATS ------------------------------------------------------------------------------------
async def test_what_one_has_heard_is_told_to_who_has_not(nats: Nats) -> None:
    """In several messages, where one would be too large; of one that does not answer nothing is waited for."""
    w = await two(nats)
    listener, heir = Hearsay(await nats.bus(GATEWAY_2), GATEWAY_2), Hearsay(await nats.bus(GATEWAY), GATEWAY)
    await listener.start()
    large = [Log((Gone("x" * (BATCH_BYTES // 3) + str(number)),)) for number in range(10)]
    for log in large:
        w.a.tell(log)
    await until(lambda: len(listener._heard.after(w.a.me.life)) == len(large), what="all is heard")
    await heir.start()
    found = await heir.of(w.a.me.life, 1, [GATEWAY_2, "gone"])
    assert found == (dict(list(enumerate(large))[2:]), {"gone"})
    assert await heir.of(w.a.me.life, -1, ["gone"]) == ({}, {"gone"})
    for each in (listener, heir):
        await each.close()


@pytest.mark.parametrize(
    ("error", "silent"),
    [(Unavailable("gone"), True), (DeadlineExceeded("no answer"), True), (ProtocolError("another release"), False)],
)
async def test_who_does_not_answer_to_the_end_may_have_heard_more(error: SllmError, silent: bool) -> None:
    """Not who says that it cannot. What was answered before counts."""
    answers: list[Heard | SllmError] = [Heard(logs={0: a_log(0)}), error]

    async def call(*_: Any, **__: Any) -> Heard:
        answer = answers.pop(0)
        if isinstance(answer, SllmError):
            raise answer
        return answer

    heir = Hearsay(cast(Bus, SimpleNamespace(call=call)), GATEWAY)
    assert await heir.of("l", -1, [GATEWAY_2]) == ({0: a_log(0)}, {GATEWAY_2} if silent else set())


async def test_what_is_too_large_beside_others_is_told_alone(nats: Nats) -> None:
    heir, large = Hearsay(await nats.bus(GATEWAY), GATEWAY), Log((Gone("x" * (BATCH_BYTES + 1)),))
    for number, log in enumerate((large, a_log(1))):
        heir._told(subjects.life_told(GATEWAY_2, "l", number), "", codec.pack(log))
    assert await heir._asked(AskHeard(life="l", after=-1)) == Heard(logs={0: large})


async def test_what_waits_to_be_stored_is_told_again(nats: Nats) -> None:
    """As NATS went away nobody heard it, and its gateway may die before it is stored."""
    w = await two(nats)
    await w.a.beat()
    for number in range(3):
        w.a.tell(Log((Gone(f"call-{number}"),)))
    await w.a.store()
    listener = Hearsay(await nats.bus(GATEWAY_2), GATEWAY_2)
    await listener.start()
    w.a.tell_again()
    await until(lambda: set(listener._heard.after(w.a.me.life)) == {1, 2}, what="what is not stored is heard")
    await listener.close()


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_gateway_tells_what_waits_again(nats: Nats, monkeypatch: pytest.MonkeyPatch, restarts: bool) -> None:
    """Once NATS is back, and as long as nothing of it is stored: the others may have been away."""

    async def stores_nothing(self: Lives) -> None:
        raise Unavailable("no leader")

    monkeypatch.setattr(Lives, "store", stores_nothing)
    async with world(nats) as w:
        lives = w.gateway._succession._lives
        lives.tell(Log((Gone("call-1"),)))
        listener = Hearsay(await nats.bus(GATEWAY_2), GATEWAY_2)
        await listener.start()
        if restarts:
            await nats.kill()
            await nats.start()
        await until(lambda: listener._heard.last(lives.me.life) >= 0, what="what is not stored is heard")
        await listener.close()


async def one_that_listens(nats: Nats) -> tuple[Lives, Lives, Hearsay]:
    """A life that ends without a word, and another gateway, which hears it; a function is there for its streams."""
    async with world(nats) as w:
        await w.deploy(engine("tokens"), entry(fingerprint="f"))
    bus, other = await nats.bus(GATEWAY), await nats.bus(GATEWAY_2)
    dead = Lives(bus, Stored(bus), GATEWAY, repeating(b"d"), time.monotonic)
    listens = Lives(other, Stored(other), GATEWAY_2, repeating(b"o"), time.monotonic)
    hearsay = Hearsay(other, GATEWAY_2)
    await hearsay.start()
    for life in (dead, listens):
        await life.beat()
    return dead, listens, hearsay


async def test_what_was_told_and_never_stored_is_gone_on_with(nats: Nats) -> None:
    """By a gateway of the same name that begins later, from what another one has heard."""
    dead, listens, hearsay = await one_that_listens(nats)
    call, ended = f"call-{dead.me.life[:TAG]}1", f"call-{dead.me.life[:TAG]}2"
    for name in (call, ended):
        order = asked(name, dead.me.life)
        dead.tell(Log((Whole(order=order, body=b"{}", epoch=3, numerics="f", exact=True, ids=((0, 1),)),)))
    await dead.store()
    more = More(call=call, epoch=4, numerics="f", exact=True, ids=(Ids(0, 2, (2,)),))
    dead.tell(Log((more, Gone(ended))))
    await until(lambda: len(hearsay._heard.after(dead.me.life)) == 3, what="all is heard")
    assert hearsay.tells_of(dead.me.life, call)
    assert not hearsay.tells_of(dead.me.life, ended)
    assert not hearsay.tells_of(listens.me.life, call)
    await gone_on_with(nats, call, ended)
    await hearsay.close()


async def test_who_has_heard_it_and_comes_back_late_is_waited_for(nats: Nats) -> None:
    """Away from NATS as the heir asked, for longer than an answer takes; nothing is stored."""
    dead, listens, hearsay = await one_that_listens(nats)
    call, ended = f"call-{dead.me.life[:TAG]}1", f"call-{dead.me.life[:TAG]}2"
    dead.tell(Log((begun(call, dead, (0, 1, 2)),)))
    await until(lambda: hearsay.last(dead.me.life) == 0, what="it is heard")
    await hearsay._subscriptions.pop().unsubscribe()

    async def comes_back() -> None:
        for _ in range(3):
            await asyncio.sleep(BEAT_S)  # as a gateway does that lives
            await listens.beat()
        hearsay._subscriptions.append(await hearsay._bus.serve(subjects.heard(GATEWAY_2), AskHeard, hearsay._asked))

    back = asyncio.create_task(comes_back())
    await gone_on_with(nats, call, ended)
    await back
    await hearsay.close()


async def test_what_is_told_of_a_life_that_is_taken_over_already_is_gone_on_with(nats: Nats) -> None:
    """Its gateway woke, and was killed before it found out that it had been taken for dead."""
    async with world(nats, {"tokens": six}) as w:
        await w.deploy(engine("tokens"), entry(fingerprint="f"))
        other = await nats.bus(GATEWAY_2)
        dead = Lives(other, Stored(other), GATEWAY_2, repeating(b"d"), time.monotonic)
        known, new = (f"call-{dead.me.life[:TAG]}{number}" for number in (1, 2))
        await dead.beat()
        dead.tell(Log((begun(known, dead, (0,)),)))
        await dead.beat(over=True)
        assert (await w.http.get(f"/v1/calls/{known}/events")).text.count("data: ") == 7
        dead.tell(Log((begun(new, dead, (0, 1)),)))
        answered = await until_there(w, f"/v1/calls/{new}/events")
        assert answered.text.count("data: ") == 7
        assert [each.head.recorded for each in w.node.opened] == [((0,),), ((0, 1),)]


async def test_what_was_heard_of_a_life_whose_record_is_gone_is_gone_on_with(nats: Nats) -> None:
    """All servers of a cluster were restarted, which have it in memory, and its gateway with them."""
    async with world(nats, {"tokens": six}) as w:
        await w.deploy(engine("tokens"), entry(fingerprint="f"))
        other = await nats.bus(GATEWAY_2)
        dead = Lives(other, Stored(other), GATEWAY_2, repeating(b"d"), time.monotonic)
        call = f"call-{dead.me.life[:TAG]}1"
        await dead.beat()
        dead.tell(Log((begun(call, dead, (0,)),)))
        succession = w.gateway._succession
        await until(lambda: succession._hearsay.last(dead.me.life) >= 0, what="it is heard")
        await (await nats.bus(CONTROLLER)).jetstream.purge_stream(LIVES_STREAM, subject=life_beat(dead.me.life))
        succession._heard(replace(dead.me, over=True))
        answered = await until_there(w, f"/v1/calls/{call}/events")
        assert answered.text.count("data: ") == 7
        with pytest.raises(Over):
            await dead.beat()


def begun(call: str, lives: Lives, ids: tuple[int, ...]) -> Whole:
    """A stream of that life, with what is known of its first output."""
    return Whole(order=asked(call, lives.me.life), body=b"{}", epoch=3, numerics="f", exact=True, ids=(ids,))


async def until_there(w: World, path: str) -> Response:
    """Its answer, once it is no more 404."""
    answers: list[Response] = []

    async def there() -> bool:
        answers.append(await w.http.get(path))
        return answers[-1].status_code != 404

    await until(there, what=f"{path} is known")
    return answers[-1]


async def test_a_log_that_was_given_up_is_begun_anew_once_it_can_be_stored(nats: Nats) -> None:
    w = await two(nats)
    await w.a.beat()
    w.a._backlog = Backlog(most=0)
    for number in range(2):
        w.a.tell(a_log(number))
    with pytest.raises(Lost):
        await w.a.store()
    w.a.anew()
    assert not w.a.behind
    w.a.tell(a_log(2))
    await w.a.store()
    assert await w.b.log_of(w.a.me.life) == {1: a_log(1), 2: a_log(2)}

"""The state store against a real nats-server: the fence, watches through outages, who may write."""

import asyncio
import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeout
from nats.js.api import ConsumerConfig, PubAck
from nats.js.errors import APIError

from sllm_runtime.platform import reader as reading
from sllm_runtime.platform import state
from sllm_runtime.platform import watch as watching
from sllm_runtime.platform.bus import Handler, Subscription
from sllm_runtime.platform.consumers import HEARTBEAT_S
from sllm_runtime.platform.state import StateStore
from sllm_runtime.platform.streams import STATE_STREAM
from sllm_runtime.platform.watch import Last, Watch, last_messages
from sllm_runtime.protocol.errors import ProtocolError, StaleTerm, Unavailable
from sllm_runtime.protocol.limits import KIB, PROTOCOL_VERSION
from sllm_runtime.protocol.node import NodeRecord
from sllm_runtime.protocol.records import FunctionRecord, Term
from sllm_runtime.protocol.subjects import LIVES_STREAM, TERM_KEY, function_key, life_beat, node_key
from tests.fixtures.nats import CONTROLLER, CONTROLLER_2, GATEWAY, NODE, Nats
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import GIVE_UP_S, until


def _node(name: str, seen: float = 0.0) -> NodeRecord:
    return NodeRecord(node=name, first_seen=seen)


async def _leader(nats: Nats, identity: str = CONTROLLER) -> StateStore:
    store = await nats.store(identity)
    await store.elect(identity)
    return store


async def test_put_get_list_delete(nats: Nats) -> None:
    store = await _leader(nats)
    assert store.term == 1
    assert await store.get(node_key("n1"), NodeRecord) is None
    await store.put(node_key("n1"), _node("n1"))
    await store.put(node_key("n2"), _node("n2"))
    await store.put(function_key("f"), FunctionRecord(function="f", active=None, last_version=0))
    assert await store.get(node_key("n1"), NodeRecord) == _node("n1")
    assert await store.list("nodes.", NodeRecord) == {"nodes.n1": _node("n1"), "nodes.n2": _node("n2")}
    await store.delete(node_key("n1"))
    await store.delete(node_key("n1"))
    assert await store.get(node_key("n1"), NodeRecord) is None
    assert list(await store.list("nodes", NodeRecord)) == ["nodes.n2"]
    assert await store.list("models.", NodeRecord) == {}


async def test_what_a_server_that_lags_shows_is_no_picture_of_the_state(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, or what was there before the last election: it is asked again, until the time is over."""
    read, old = last_messages, await _leader(nats)
    await old.put(node_key("n1"), _node("n1"))
    stale = await read(old._bus, STATE_STREAM, "$KV.sllm_state.>")
    await old.put(node_key("n2"), _node("n2"))
    new = await _leader(nats, CONTROLLER_2)
    lags = [stale, {}]

    async def lagging(*asked: Any) -> dict[str, Last]:
        return lags.pop() if lags else await read(*asked)

    monkeypatch.setattr(state, "last_messages", lagging)
    monkeypatch.setattr(state, "_LAGS_S", 0.0)
    records = await new.everything(GIVE_UP_S)
    assert not lags
    assert records.list("nodes.", NodeRecord) == {"nodes.n1": _node("n1"), "nodes.n2": _node("n2")}
    assert records.get(TERM_KEY, Term) == Term(term=2, controller=CONTROLLER_2)
    assert records.get(node_key("n3"), NodeRecord) is None
    with pytest.raises(StaleTerm, match="term 2 leads"):
        await old.everything(GIVE_UP_S)
    monkeypatch.setattr(state, "last_messages", lambda *_: asyncio.sleep(0, stale))
    with pytest.raises(Unavailable, match="a server lags: it does not have term 2 yet"):
        await new.everything(0.2)


async def test_a_deposed_leader_writes_nothing(nats: Nats) -> None:
    old, new = await _leader(nats), await _leader(nats, CONTROLLER_2)
    await new.put(node_key("n1"), _node("n1", 2.0))
    with pytest.raises(StaleTerm, match="term 2 leads"):
        await old.put(node_key("n1"), _node("n1", 1.0))
    with pytest.raises(StaleTerm):
        await old.delete(node_key("n1"))
    assert await new.get(node_key("n1"), NodeRecord) == _node("n1", 2.0)
    assert await old.elect(CONTROLLER) == 3
    await old.put(node_key("n1"), _node("n1", 3.0))
    with pytest.raises(StaleTerm, match="term 3 leads"):
        await new.put(node_key("n1"), _node("n1", 4.0))
    assert await new.get(TERM_KEY, Term) == Term(term=3, controller=CONTROLLER)


async def test_elections_at_the_same_time_get_different_terms(nats: Nats) -> None:
    stores = [await nats.store(name) for name in (CONTROLLER, CONTROLLER_2)]
    terms = await asyncio.gather(*(store.elect(str(n)) for n, store in enumerate(stores) for _ in range(5)))
    assert sorted(terms) == list(range(1, 11))


async def test_many_writes_at_once_are_all_written(nats: Nats) -> None:
    store = await _leader(nats)
    await asyncio.gather(*(store.put(node_key(f"n{n}"), _node(f"n{n}")) for n in range(100)))
    assert len(await store.list("nodes.", NodeRecord)) == 100


class Lossy:
    """A connection whose answers about ``key`` are lost: of what is told to ``lose``, and before JetStream has it of
    what is told to ``hold``."""

    def __init__(self, store: StateStore, monkeypatch: pytest.MonkeyPatch, *, silent: bool = False) -> None:
        self._silent = silent
        self._js = store._bus.jetstream
        self._publish = self._js.publish
        self.lose: set[str] = set()
        self.hold: set[str] = set()
        self.held: list[tuple[str, bytes, dict[str, str]]] = []
        monkeypatch.setattr(self._js, "publish", self._lossy)

    async def _lossy(self, subject: str, data: bytes, *, headers: dict[str, str], **how: Any) -> PubAck:
        key = subject.removeprefix("$KV.sllm_state.")
        if key in self.hold:
            self.hold.discard(key)
            self.held.append((subject, data, headers))
            if self._silent:
                await asyncio.Event().wait()
            raise NatsTimeout
        answer = await self._publish(subject, data, headers=headers, **how)
        if key in self.lose:
            self.lose.discard(key)
            raise NatsTimeout
        return answer

    async def late(self) -> None:
        """What was held comes now. Raises what JetStream answers."""
        for subject, data, headers in self.held:
            await self._publish(subject, data, headers=headers)


@pytest.mark.parametrize("how", ["again", "given up", "cancelled"])
async def test_a_write_that_comes_late_writes_nothing(nats: Nats, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """There was no answer, and what was written since is newer."""
    leader = await _leader(nats)
    lossy = Lossy(leader, monkeypatch, silent=how == "cancelled")
    lossy.hold = {node_key("n1")}
    if how == "given up":
        with pytest.raises(Unavailable):
            await leader.put_once(node_key("n1"), _node("n1", 1.0))
    elif how == "cancelled":
        writing = asyncio.ensure_future(leader.put(node_key("n1"), _node("n1", 1.0)))
        await until(lambda: lossy.held)
        writing.cancel()
    else:
        await leader.put(node_key("n1"), _node("n1", 1.0))
    await leader.put(node_key("n1"), _node("n1", 2.0))
    with pytest.raises(APIError, match="wrong last sequence"):
        await lossy.late()
    assert await leader.get(node_key("n1"), NodeRecord, direct=False) == _node("n1", 2.0)
    await leader.confirm()
    assert await leader.get(TERM_KEY, Term) == Term(term=1, controller=CONTROLLER)


async def test_who_moves_its_fence_and_hears_no_answer_still_leads(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = await _leader(nats)
    lossy = Lossy(leader, monkeypatch)
    lossy.hold, lossy.lose = {node_key("n1")}, {TERM_KEY}
    await leader.put(node_key("n1"), _node("n1", 1.0))
    assert not lossy.lose
    await leader.confirm()
    await leader.put(node_key("n1"), _node("n1", 2.0))
    with pytest.raises(APIError, match="wrong last sequence"):
        await lossy.late()
    lossy.hold = {TERM_KEY, node_key("n1")}  # this one comes when another leads
    lossy.held.clear()
    await leader.put(node_key("n1"), _node("n1", 3.0))
    other = await _leader(nats, CONTROLLER_2)
    with pytest.raises(APIError, match="wrong last sequence"):
        await lossy.late()
    with pytest.raises(StaleTerm, match="term 2 leads"):
        await leader.put(node_key("n1"), _node("n1", 4.0))
    await other.confirm()


async def test_who_is_elected_and_hears_no_answer_leads(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the term until then alone, which is its own by now."""
    store = await nats.store()
    lossy = Lossy(store, monkeypatch)
    lossy.lose = {TERM_KEY}
    assert await store.elect(CONTROLLER, over=0) == 1
    assert not lossy.lose
    await store.put(node_key("n1"), _node("n1"))
    assert await store.get(TERM_KEY, Term) == Term(term=1, controller=CONTROLLER)


async def test_a_leader_that_was_deposed_moves_no_fence(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = await _leader(nats)
    lossy = Lossy(leader, monkeypatch)
    lossy.hold = {node_key("n1")}
    with pytest.raises(Unavailable):
        await leader.put_once(node_key("n1"), _node("n1"))
    other = await _leader(nats, CONTROLLER_2)
    with pytest.raises(StaleTerm, match="term 2 leads"):
        await leader.put(node_key("n1"), _node("n1"))
    await other.confirm()


@pytest.mark.parametrize("moved", [False, True])
async def test_who_led_as_the_store_was_set_back_leads_no_more(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moved: bool
) -> None:
    """Its own term is there, and with it the fence: it would go on with records that no gateway is ever told of, or,
    where it had moved its fence since, write nothing any more."""
    leader = await _leader(nats)
    await leader.put(node_key("n1"), _node("n1"))
    there, copy = nats.server.directory / "jetstream", tmp_path / "copy"
    await nats.kill()
    shutil.copytree(there, copy)
    await nats.start()
    if moved:
        lossy = Lossy(leader, monkeypatch)
        lossy.lose = {node_key("n2")}
    await leader.put(node_key("n2"), _node("n2"))
    await leader.put(node_key("n3"), _node("n3"))
    await nats.kill()
    shutil.rmtree(there)
    shutil.copytree(copy, there)
    await nats.start()
    with pytest.raises(StaleTerm, match="was set back"):
        await leader.put(node_key("n4"), _node("n4"))
    with pytest.raises(StaleTerm, match="does not lead"):
        await leader.put(node_key("n4"), _node("n4"))
    assert await leader.elect(CONTROLLER) == 2
    await leader.put(node_key("n5"), _node("n5"))
    assert (await leader.everything(GIVE_UP_S)).get(node_key("n2"), NodeRecord) is None


async def test_nobody_writes_without_an_election(nats: Nats) -> None:
    store = await nats.store()
    with pytest.raises(StaleTerm, match="does not lead"):
        await store.put(node_key("n1"), _node("n1"))


async def test_a_record_of_another_shape_is_a_protocol_error(nats: Nats) -> None:
    store = await _leader(nats)
    await store.put(node_key("n1"), _node("n1"))
    with pytest.raises(ProtocolError, match="FunctionRecord"):
        await store.get(node_key("n1"), FunctionRecord)


async def test_records_of_other_versions_are_read_or_refused_by_name(
    nats: Nats, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the version before, and with fields that a later one of the same schema has added: read. Of a later schema:
    refused, and other records are watched all the same."""
    store = await _leader(nats)

    async def put(name: str, schema: int) -> None:
        text = {"node": name, "first_seen": 2.0, "schema": schema, "added": {"later": [1]}}
        await store._write(node_key(name), json.dumps(text).encode(), {})

    await put("before", PROTOCOL_VERSION - 1)
    await put("same", PROTOCOL_VERSION)
    found = await store.list("nodes.", NodeRecord)
    assert [found[f"nodes.{name}"].first_seen for name in ("before", "same")] == [2.0, 2.0]
    await put("later", PROTOCOL_VERSION + 1)
    with pytest.raises(ProtocolError, match=r"nodes\.later has schema 2, 0 and 1 are read"):
        await store.get(node_key("later"), NodeRecord)
    with pytest.raises(ProtocolError, match=r"nodes\.later"):
        await store.list("nodes.", NodeRecord)
    told: list[str] = []
    watch = await store.watch("nodes.>", NodeRecord, lambda key, _: told.append(key))
    assert sorted(told) == ["nodes.before", "nodes.same"]
    assert "nodes.later has schema 2" in caplog.text
    await watch.close()


async def test_a_watch_tells_the_present_then_what_changes(nats: Nats) -> None:
    leader = await _leader(nats)
    await leader.put(node_key("n1"), _node("n1"))
    await leader.put(node_key("gone"), _node("gone"))
    await leader.delete(node_key("gone"))
    reader = await StateStore.open(await nats.bus(GATEWAY), create=False)
    told: list[tuple[str, NodeRecord | None]] = []
    watch = await reader.watch("nodes.>", NodeRecord, lambda key, record: told.append((key, record)))
    assert told == [("nodes.n1", _node("n1"))]
    # One after the other: what is overwritten before it was delivered is never told.
    await leader.put(node_key("n2"), _node("n2"))
    await until(lambda: len(told) == 2)
    await leader.put(node_key("n1"), _node("n1", 5.0))
    await until(lambda: len(told) == 3)
    await leader.delete(node_key("n1"))
    await until(lambda: len(told) == 4)
    assert told[1:] == [("nodes.n2", _node("n2")), ("nodes.n1", _node("n1", 5.0)), ("nodes.n1", None)]
    await watch.close()


async def test_what_a_watcher_fails_to_take_is_told_again(nats: Nats, caplog: pytest.LogCaptureFixture) -> None:
    """News and deletions; and other keys do not wait for it."""
    leader = await _leader(nats)
    reader = await StateStore.open(await nats.bus(GATEWAY), create=False)
    told: list[tuple[str, bool]] = []
    refused = {("nodes.bad", True): 2, ("nodes.bad", False): 1}

    def changed(key: str, record: NodeRecord | None) -> None:
        event = (key, record is not None)
        if refused.get(event):
            refused[event] -= 1
            raise ValueError("not now")
        told.append(event)

    await leader.put(node_key("bad"), _node("bad"))
    await leader.put(node_key("good"), _node("good"))
    watch = await reader.watch("nodes.>", NodeRecord, changed)
    assert sorted(told) == [("nodes.bad", True), ("nodes.good", True)], "a picture is whole when all of it was taken"
    assert told[0] == ("nodes.good", True)
    await leader.delete(node_key("bad"))
    await leader.put(node_key("last"), _node("last"))
    await until(lambda: len(told) == 4)
    assert sorted(told[2:]) == [("nodes.bad", False), ("nodes.last", True)]
    assert caplog.text.count("ValueError: not now") == 3
    await watch.close()


async def test_a_picture_larger_than_what_may_wait_is_told_all_the_same(narrow: None, nats: Nats) -> None:
    """Also to who has other things to do; its connection holds."""
    bus, gateway = await nats.streams(), await nats.bus(GATEWAY)
    subjects = {f"$KV.sllm_state.nodes.n{number}" for number in range(96)}
    for subject in subjects:
        await bus.jetstream.publish(subject, bytes(256 * KIB))
    cut, told = list[int](), set[str]()
    gateway.on_disconnect(lambda: cut.append(1))

    def changed(subject: str, _data: bytes | None) -> None:
        told.add(subject)
        time.sleep(0.01)

    watch = Watch(gateway, STATE_STREAM, "$KV.sllm_state.nodes.>", changed)
    await watch.start()
    assert told == subjects
    await watch.close()
    assert (await last_messages(gateway, STATE_STREAM, "$KV.sllm_state.nodes.>")).keys() == subjects
    assert not cut


async def test_what_cannot_be_listed_in_time_says_so(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_SYNC_S", 0.1)
    await nats.streams()
    gateway = await nats.bus(GATEWAY)
    assert nats.server.child is not None
    with suspended(nats.server.child.pid), pytest.raises(Unavailable, match=r"cannot be listed: no answer"):
        await last_messages(gateway, STATE_STREAM, "$KV.sllm_state.nodes.>")


async def test_a_watch_of_nothing_is_ready_at_once(nats: Nats) -> None:
    await _leader(nats)
    reader = await StateStore.open(await nats.bus(GATEWAY), create=False)
    watch = await asyncio.wait_for(reader.watch("routes.>", NodeRecord, lambda *_: None), GIVE_UP_S)
    assert watch.synced.is_set()
    await watch.close()


@pytest.mark.parametrize("missed", ["one of two", "the last one", "the consumer"])
async def test_a_watch_that_has_missed_something_looks_again(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, missed: str
) -> None:
    """By the gap before what comes next, by what a heartbeat says, or by there being none any more."""
    leader = await _leader(nats)
    reader = await StateStore.open(await nats.bus(GATEWAY), create=False)
    monkeypatch.setattr(reading, "SILENCE_S", 2 * HEARTBEAT_S if missed == "the consumer" else 10 * GIVE_UP_S)
    subscribe, subscribed = reader._bus.subscribe_raw, list[str]()

    async def lossy(subject: str, handler: Handler) -> Subscription:
        subscribed.append(subject)

        async def hear(message: Msg) -> None:
            beat = not message.reply.startswith("$JS.ACK.")
            lost = beat if missed == "one of two" else False
            if not (subject == subscribed[0] and (lost or message.subject.endswith(node_key("n1")))):
                await handler(message)

        return await subscribe(subject, hear)

    monkeypatch.setattr(reader._bus, "subscribe_raw", lossy)
    told = dict[str, NodeRecord | None]()
    watch = await reader.watch("nodes.>", NodeRecord, told.__setitem__)
    if missed == "the consumer":
        for info in await leader._bus.jetstream.consumers_info(STATE_STREAM):
            await leader._bus.jetstream.delete_consumer(STATE_STREAM, info.name)
    await leader.put(node_key("n1"), _node("n1"))
    if missed == "one of two":
        await leader.put(node_key("n2"), _node("n2"))
    await until(lambda: node_key("n1") in told, what="what was missed is told")
    await watch.close()


async def test_why_a_watch_looks_again_is_said_once(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not ten times a second for as long as what it knew is not there: of a stream whose messages have aged, 5 s."""
    caplog.set_level(logging.INFO, watching.__name__)
    controller, gateway = await nats.streams(), await nats.bus(GATEWAY)
    opened, open_ = list[object](), watching._Picture.open

    async def counted(picture: watching._Picture) -> None:
        opened.append(picture)
        await open_(picture)

    monkeypatch.setattr(watching._Picture, "open", counted)
    monkeypatch.setattr(watching, "_LAGS_S", 10 * GIVE_UP_S)
    await gateway.jetstream.publish(life_beat("a"), b"1")
    watch = Watch(gateway, LIVES_STREAM, life_beat(), lambda *_: None)
    await watch.start()
    for times in (1, 2):
        opened.clear()
        await controller.jetstream.purge_stream(LIVES_STREAM)
        watch._anew()
        await until(lambda: len(opened) > 4, what="it has looked again and again")
        await gateway.jetstream.publish(life_beat("a"), b"2")
        await until(watch.synced.is_set, what="it is whole")
        said = [record.getMessage() for record in caplog.records if "anew" in record.getMessage()]
        assert said == [f"watching {life_beat()} anew: a server lags"] * times
    await watch.close()


async def test_a_watch_that_has_ended_or_never_began_is_told_of_no_reconnect(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _leader(nats)
    bus = await nats.bus(GATEWAY)
    before = list(bus._reconnected._callbacks)
    watch = Watch(bus, STATE_STREAM, "$KV.sllm_state.nodes.>", lambda *_: None)
    await watch.start()
    await watch.close()
    assert bus._reconnected._callbacks == before
    monkeypatch.setattr(watching, "_SYNC_S", 0.1)
    assert nats.server.child is not None
    with suspended(nats.server.child.pid), pytest.raises(Unavailable, match="nothing came"):
        await Watch(bus, STATE_STREAM, "$KV.sllm_state.nodes.>", lambda *_: None).start()
    assert bus._reconnected._callbacks == before


async def test_a_watch_through_an_outage_tells_only_what_changed_deletions_too(nats: Nats) -> None:
    leader = await _leader(nats)
    for name in ("same", "changed", "deleted"):
        await leader.put(node_key(name), _node(name))
    gateway = await nats.bus(GATEWAY)
    reader = await StateStore.open(gateway, create=False)
    told: list[tuple[str, NodeRecord | None]] = []
    watch = await reader.watch("nodes.>", NodeRecord, lambda key, record: told.append((key, record)))
    told.clear()
    await nats.kill()
    await until(lambda: not gateway.connected)
    await nats.start()
    await leader.put(node_key("changed"), _node("changed", 1.0))
    await leader.delete(node_key("deleted"))
    await until(lambda: len(told) == 2 and watch.synced.is_set())
    assert set(told) == {("nodes.changed", _node("changed", 1.0)), ("nodes.deleted", None)}
    await leader.put(node_key("later"), _node("later"))
    await until(lambda: told[-1] == ("nodes.later", _node("later")))
    await watch.close()


async def test_a_write_during_an_outage_is_written_when_the_server_is_back(nats: Nats) -> None:
    leader = await _leader(nats)
    await nats.kill()
    writing = asyncio.ensure_future(leader.put(node_key("n1"), _node("n1")))
    await nats.start()
    await asyncio.wait_for(writing, GIVE_UP_S)
    assert await leader.get(node_key("n1"), NodeRecord) == _node("n1")


async def test_gateways_and_nodes_cannot_write_state_and_nodes_cannot_make_consumers(nats: Nats) -> None:
    leader = await _leader(nats)
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    for bus in (gateway, node):
        with pytest.raises(NatsError):
            await bus.jetstream.publish(f"$KV.sllm_state.{TERM_KEY}", b"{}", timeout=0.3)
    with pytest.raises(NatsError):
        await node.jetstream.add_consumer(STATE_STREAM, ConsumerConfig(deliver_subject=node.new_inbox()), timeout=0.3)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await node.jetstream.get_last_msg(STATE_STREAM, f"$KV.sllm_state.{TERM_KEY}", direct=True)
    assert await leader.get(TERM_KEY, Term) == Term(term=1, controller=CONTROLLER)

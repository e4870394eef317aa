"""What somebody has decided is stored before it is done, and is not done where it cannot be stored."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sllm_runtime.control import deletion, ledger, loop, registry
from sllm_runtime.control.view import View
from sllm_runtime.platform.streams import STATE_STREAM
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.errors import FunctionNotFound, ModelNotFound, NotStorable, Unavailable
from sllm_runtime.protocol.node import Ok, StartInstance
from sllm_runtime.protocol.records import FunctionRecord, ModelRecord, Route, VersionRecord
from sllm_runtime.protocol.states import InstanceState, VersionState
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.control.bench import Bench, manifest
from tests.unit.control.scripted_node import digest_of

FUNCTION = subjects.function_key("chat")


class Shut:
    """The controller's store takes no record for which ``refuses(key, record)``, where it is ``full`` for want of room,
    which nobody waits for for long; ``open`` ends that."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses: Callable[[str, Any], bool] = lambda key, record: False
        self.refused: list[str] = []
        self.full = False
        store = bench.controller.loop._ledger._store
        put, delete = store.put, store.delete

        async def put_or_not(key: str, record: msgspec.Struct) -> None:
            self._look(key, record)
            await put(key, record)

        async def delete_or_not(key: str) -> None:
            self._look(key, None)
            await delete(key)

        monkeypatch.setattr(store, "put", put_or_not)
        monkeypatch.setattr(store, "delete", delete_or_not)
        monkeypatch.setattr(ledger, "FULL_S", 0.3)
        monkeypatch.setattr(ledger, "AGAIN_S", 0.02)
        monkeypatch.setattr(bench.controller.loop._ledger, "_shortage", lambda: "the disk is full" if self.full else "")

    def _look(self, key: str, record: Any) -> None:
        if self.refuses(key, record):
            self.refused.append(key)
            raise Unavailable(f"{key} was not written: no space")

    def fill(self) -> None:
        """Nothing is taken, for want of room."""
        self.full, self.refuses = True, lambda key, record: True

    def open(self) -> None:
        self.full = False
        self.refuses = lambda key, record: False


@pytest.fixture
def shut(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Shut:
    return Shut(bench, monkeypatch)


async def test_a_function_whose_deletion_is_not_stored_is_not_deleted(bench: Bench, shut: Shut) -> None:
    await bench.gateway.deploy(manifest())
    shut.fill()
    with pytest.raises(Unavailable, match="cannot be stored now: the disk is full"):
        await bench.gateway.ask("delete", ctl.Delete(function="chat"))
    assert not bench.controller.loop.view.functions["chat"].deleting
    assert not bench.node.stops
    acquired = await bench.gateway.acquire()
    assert acquired.route is not None, "it is called as before"
    shut.open()
    assert not (await bench.stored(FUNCTION, FunctionRecord)).deleting, "and is not deleted when there is space again"


async def test_deleted_is_said_once_the_store_has_it(bench: Bench, shut: Shut, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "LONG_POLL_S", 1.0)
    await bench.gateway.deploy(manifest())
    shut.refuses = lambda key, record: key == FUNCTION and record is None

    async def said() -> str:
        answer: Ok = await bench.gateway.ask("delete", ctl.Delete(function="chat"))
        return answer.note

    async def waits() -> bool:
        return await said() == "draining: nothing runs any more; its records wait to be removed"

    await until(waits, what="its instance has ended")
    kept = await bench.store.get(FUNCTION, FunctionRecord)
    assert kept is not None
    assert kept.deleting, "another controller would go on with it"
    shut.open()

    async def gone() -> bool:
        return await said() == "deleted"

    with contextlib.suppress(FunctionNotFound):
        await until(gone, what="it is deleted")
    assert await bench.stored(FUNCTION, FunctionRecord) is None


async def test_a_version_gets_the_route_once_that_is_stored(bench: Bench, shut: Shut) -> None:
    """Until then, and where it cannot be, the version before has it: here, in the store and for gateways."""
    await bench.gateway.deploy(manifest())

    def full_from_here(command: StartInstance) -> InstanceState:
        shut.full, shut.refuses = True, lambda key, record: key == FUNCTION
        return InstanceState.READY

    bench.node.behave = full_from_here
    deploying = asyncio.create_task(bench.gateway.deploy(manifest(), b"other"))
    await until(lambda: shut.refused, what="it is ready, and its activation is written")
    assert bench.controller.loop.view.functions["chat"].active == 1
    with pytest.raises(Unavailable, match="cannot be stored now: the disk is full"):
        await deploying
    view = bench.controller.loop.view
    assert (view.functions["chat"].active, view.versions["chat", 2].state) == (1, VersionState.FAILED)
    shut.open()
    bench.node.behave = lambda command: InstanceState.READY
    assert (await bench.stored(FUNCTION, FunctionRecord)).active == 1
    assert (await bench.stored(subjects.route_key("chat", 1), Route)).active
    again = await bench.gateway.deploy(manifest(), b"other")
    assert again.version is not None
    assert again.version.version == 3


async def test_rollback_cordon_and_a_model_s_deletion_are_stored_first_too(bench: Bench, shut: Shut) -> None:
    await bench.gateway.deploy(manifest())
    await bench.gateway.deploy(manifest(), b"other")
    await bench.gateway.ask("register", ctl.RegisterModel(uri="/models/tiny"))
    shut.fill()
    model = digest_of("/models/tiny")
    for verb, request in (
        ("rollback", ctl.Rollback(function="chat")),
        ("cordon", ctl.Cordon(node="n1", drain=True)),
        ("model", ctl.ModelRef(digest=model, verb="delete")),
    ):
        with pytest.raises(Unavailable, match="cannot be stored now"):
            await bench.gateway.ask(verb, request)
    view = bench.controller.loop.view
    assert view.functions["chat"].active == 2
    assert not view.nodes["n1"].record.draining
    assert model in view.models
    assert not bench.node.commands, "no node has removed it"
    shut.open()
    assert (await bench.stored(FUNCTION, FunctionRecord)).active == 2
    await bench.gateway.ask("model", ctl.ModelRef(digest=model, verb="delete"))
    with pytest.raises(ModelNotFound):
        await bench.gateway.ask("model", ctl.ModelRef(digest=model))


async def test_what_is_decided_is_written_once(bench: Bench, shut: Shut) -> None:
    await bench.gateway.deploy(manifest())
    await bench.gateway.deploy(manifest(), b"other")
    await bench.stored(FUNCTION, FunctionRecord)
    written = list[str]()

    def taken(key: str, _record: Any) -> bool:
        written.append(key)
        return False

    shut.refuses = taken
    await bench.gateway.ask("rollback", ctl.Rollback(function="chat"))
    decided = [FUNCTION, subjects.version_key("chat", 1), subjects.version_key("chat", 2)]
    assert [written.count(key) for key in decided] == [1, 1, 1]


async def test_what_changes_while_a_decision_is_stored_is_in_it(bench: Bench, shut: Shut) -> None:
    """A record that others change meanwhile is decided anew from how it is then."""
    await bench.gateway.deploy(manifest())
    await bench.gateway.deploy(manifest(), b"other")
    own_loop = bench.controller.loop
    shut.refuses = lambda key, record: True
    rolling = asyncio.create_task(own_loop.commit(lambda view: registry.rollback(view, "chat", None)))
    await until(lambda: shut.refused)

    def counted(view: View) -> View:
        return view.put_function(msgspec.structs.replace(view.functions["chat"], last_version=7))

    own_loop.change(counted)
    shut.open()
    await rolling
    record = await bench.stored(FUNCTION, FunctionRecord)
    assert record == own_loop.view.functions["chat"]
    assert (record.active, record.last_version) == (1, 7)


async def test_what_was_stored_of_a_decision_and_is_decided_otherwise_is_stored_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest version is to go with a deployment; while that is stored somebody calls it."""
    monkeypatch.setattr(registry, "KEEP_RETIRED", 1)
    for what in (b"1", b"2"):
        await bench.gateway.deploy(manifest(), what)
    for name in list(bench.node.instances):
        bench.node.put(name, InstanceState.STOPPED)
    await bench.none_left()
    loop = bench.controller.loop
    store, oldest, gone, go = loop._ledger._store, ("chat", 1), asyncio.Event(), asyncio.Event()
    delete = store.delete

    async def slowly(key: str) -> None:
        await delete(key)
        if key == subjects.version_key(*oldest):
            gone.set()
            await go.wait()

    monkeypatch.setattr(store, "delete", slowly)
    deploying = asyncio.create_task(bench.gateway.deploy(manifest(), b"3"))
    await asyncio.wait_for(gone.wait(), GIVE_UP_S)
    acquiring = asyncio.create_task(bench.gateway.acquire(version=1))
    await until(lambda: loop.view.of(oldest), what="a call has had one of it started")
    go.set()
    await deploying
    assert (await acquiring).route is not None
    assert oldest in loop.view.versions
    stored = await bench.stored(subjects.version_key(*oldest), VersionRecord)
    assert stored == loop.view.versions[oldest]


async def test_a_decision_that_is_called_back_while_it_is_stored_is_not_done(bench: Bench, shut: Shut) -> None:
    """Nor by the controller after this one: what stood is stored again."""
    await bench.gateway.deploy(manifest())
    await bench.gateway.deploy(manifest(), b"other")
    own_loop = bench.controller.loop
    shut.refuses = lambda key, record: key == FUNCTION
    rolling = asyncio.create_task(own_loop.commit(lambda view: registry.rollback(view, "chat", None)))
    await until(lambda: shut.refused)
    rolling.cancel()
    await asyncio.wait([rolling])
    shut.open()
    assert own_loop.view.functions["chat"].active == 2
    assert (await bench.stored(FUNCTION, FunctionRecord)).active == 2


async def test_a_decision_waits_no_longer_for_others_than_for_the_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "STORE_S", 0.05)
    async with bench.controller.loop._turn():
        with pytest.raises(Unavailable, match="other decisions wait"):
            await bench.controller.loop.commit(lambda view: view)


async def test_a_record_that_can_never_be_stored_fails_its_writer_alone(bench: Bench) -> None:
    """The server refuses what is larger than its limit, and would end the connection for it."""
    own_loop = bench.controller.loop
    huge = ModelRecord(digest="sha256:huge", uri="x" * 2**20, nbytes=1, partitions=(1,))
    own = ModelRecord(digest="sha256:own", uri="/own", nbytes=1, partitions=(1,))
    refused = asyncio.create_task(own_loop.commit(lambda view: registry.know(view, huge)))
    later = asyncio.create_task(own_loop.commit(lambda view: registry.know(view, own)))
    with pytest.raises(NotStorable, match=r"models\.huge cannot be stored: it has .*, .* fit"):
        await asyncio.wait_for(refused, GIVE_UP_S)
    await asyncio.wait_for(later, GIVE_UP_S)
    assert huge.digest not in own_loop.view.models
    assert await bench.stored(subjects.model_key(own.digest), ModelRecord) == own


async def test_a_stream_that_takes_no_such_size_is_told_from_one_that_is_away(nats: Nats) -> None:
    """A server of somebody else may limit its messages further: that is an answer, and no other try helps."""
    store = await nats.store()
    await store.elect("ctl")
    stream = (await store._bus.jetstream.stream_info(STATE_STREAM)).config
    await store._bus.jetstream.update_stream(stream.evolve(max_msg_size=1024))
    with pytest.raises(NotStorable, match="cannot be stored"):
        await store.put("models.x", ModelRecord(digest="d", uri="x" * 2048, nbytes=1, partitions=(1,)))

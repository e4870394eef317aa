"""Rollback, deletion, models and lists, over the bus."""

import asyncio
import hashlib
import time
from dataclasses import replace

import msgspec
import pytest

from sllm_runtime.control import registry
from sllm_runtime.control.view import Node
from sllm_runtime.platform import bundles
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.errors import (
    Conflict,
    CorruptCheckpoint,
    DeadlineExceeded,
    FunctionNotFound,
    ModelNotFound,
    NodeNotFound,
    SecretNotFound,
    Unavailable,
    VersionNotFound,
)
from sllm_runtime.protocol.node import NodeRecord, Storage
from sllm_runtime.protocol.records import FunctionRecord, Route, VersionRecord
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.control.bench import Bench, Gateway, controller_of, manifest
from tests.unit.control.scripted_node import ScriptedNode


async def test_rollback_moves_the_route_at_once(bench: Bench) -> None:
    await bench.gateway.deploy(manifest())
    await bench.gateway.deploy(manifest(), b"other")
    info: ctl.FunctionInfo = await bench.gateway.ask("rollback", ctl.Rollback(function="chat"))
    assert info.record.active == 1
    assert (await bench.stored(subjects.route_key("chat", 1), Route)).active
    assert not (await bench.stored(subjects.route_key("chat", 2), Route)).active
    with pytest.raises(Conflict, match="no version to go back to"):
        await bench.gateway.ask("rollback", ctl.Rollback(function="chat"))
    with pytest.raises(VersionNotFound, match="version 7"):
        await bench.gateway.ask("rollback", ctl.Rollback(function="chat", version=7))


async def test_what_is_asked_again_is_done_once(nats: Nats, node: ScriptedNode) -> None:
    """Of the next controller too: the one before may have died between what it did and its answer."""
    gateway = Gateway(await nats.bus("gw"))
    rollback = ctl.Rollback(function="chat", request="a" * 32)
    async with controller_of(nats):
        for data in (b"one", b"two", b"three"):
            await gateway.deploy(manifest(), data)
        first: ctl.FunctionInfo = await gateway.ask("rollback", rollback)
    async with controller_of(nats, "ctl2"):
        again: ctl.FunctionInfo = await gateway.ask("rollback", rollback)
        assert (first.record.active, again.record.active) == (2, 2)
        other: ctl.FunctionInfo = await gateway.ask("rollback", ctl.Rollback(function="chat", request="b" * 32))
        assert other.record.active == 1
        assert (await gateway.ask("delete", ctl.Delete(function="gone", again=True))).note == "deleted"
        assert (await gateway.ask("delete_secret", ctl.SecretRef(name="gone", again=True))).note == "deleted"
        with pytest.raises(SecretNotFound):
            await gateway.ask("delete_secret", ctl.SecretRef(name="gone"))


async def test_delete_drains_and_force_cancels(bench: Bench) -> None:
    await bench.gateway.deploy(manifest())
    (name,) = bench.live()
    bench.node.put(name, InstanceState.READY, running=1)
    drained = asyncio.create_task(bench.gateway.ask("delete", ctl.Delete(function="chat")))
    await until(lambda: bench.node.stops)
    assert bench.node.stops[0].grace_s == 300.0
    assert await bench.stored(subjects.route_key("chat", 1), Route) is None
    with pytest.raises(FunctionNotFound):
        await bench.gateway.acquire()
    with pytest.raises(Conflict, match="being deleted"):
        await bench.gateway.deploy(manifest(), b"other")
    forced = await bench.gateway.ask("delete", ctl.Delete(function="chat", force=True))
    assert forced.note == "deleted"
    assert (await drained).note == "deleted"
    assert bench.node.stops[-1].grace_s == 0
    assert await bench.stored(subjects.function_key("chat"), FunctionRecord) is None
    assert await bench.stored(subjects.version_key("chat", 1), VersionRecord) is None
    assert not await bundles.exists(bench.gateway.bus, f"sha256:{hashlib.sha256(b'bundle').hexdigest()}")
    with pytest.raises(FunctionNotFound):
        await bench.gateway.ask("delete", ctl.Delete(function="chat"))


async def test_a_model_is_kept_while_a_version_needs_it(bench: Bench) -> None:
    registered: ctl.Registered = await bench.gateway.ask("register", ctl.RegisterModel(uri="/models/tiny"))
    assert registered.model is not None
    digest = registered.model.digest
    await bench.gateway.deploy(manifest(model=digest[:20]))
    info: ctl.ModelInfo = await bench.gateway.ask("model", ctl.ModelRef(digest=digest[7:15]))
    assert (info.nodes, info.used_by) == (("n1",), ("chat:v1",))
    with pytest.raises(Conflict, match="chat:v1"):
        await bench.gateway.ask("model", ctl.ModelRef(digest=digest, verb="delete"))
    bench.node.problem = CorruptCheckpoint("chunk 3 differs")
    checked: ctl.ModelInfo = await bench.gateway.ask("model", ctl.ModelRef(digest=digest, verb="validate"))
    assert checked.problem == "n1: chunk 3 differs"
    for kept in (DeadlineExceeded("it goes on; ask again"), Unavailable("the disk is away")):
        bench.node.problem = kept
        with pytest.raises(type(kept), match=f"n1: {kept.message}"):
            await bench.gateway.ask("model", ctl.ModelRef(digest=digest, verb="validate"))
    bench.node.problem = None
    await bench.gateway.ask("delete", ctl.Delete(function="chat", force=True))
    await bench.gateway.ask("model", ctl.ModelRef(digest=digest, verb="delete"))
    assert (await bench.gateway.ask("models", ctl.Listing())).models == ()
    assert [command.verb for command in bench.node.commands] == [*["validate"] * 3, "delete"]


async def test_a_model_is_not_said_to_be_deleted_on_nodes_that_were_not_heard_yet(bench: Bench) -> None:
    """By a controller that has just begun to lead, or a node that was away all that time."""
    registered: ctl.Registered = await bench.gateway.ask("register", ctl.RegisterModel(uri="/models/tiny"))
    assert registered.model is not None
    loop = bench.controller.loop
    await loop.commit(lambda view: replace(view, nodes={**view.nodes, "n9": Node(NodeRecord(node="n9"))}))
    info = await bench.gateway.ask("model", ctl.ModelRef(digest=registered.model.digest, verb="delete"))
    assert info.problem == "not removed everywhere: n9: it was not heard yet, and may have it still"


async def test_a_model_whose_deletion_is_asked_of_the_next_controller_goes_from_the_nodes(bench: Bench) -> None:
    """The one before has forgotten it, and may have told no node so."""
    registered: ctl.Registered = await bench.gateway.ask("register", ctl.RegisterModel(uri="/models/tiny"))
    assert registered.model is not None
    digest, loop = registered.model.digest, bench.controller.loop
    await until(lambda: registry.holders(loop.view, frozenset({digest})), what="n1 has told of it")
    await loop.commit(lambda view: registry.drop_model(view, digest))
    away = "not removed everywhere: n1: its disk is away"
    for named, again, left in ((digest[7:15], True, away), (digest, False, away), (digest[7:15], False, "")):
        bench.node.problem = Unavailable("its disk is away") if left else None
        asked = ctl.ModelRef(digest=named, verb="delete", again=again)
        assert (await bench.gateway.ask("model", asked)).problem == left
    assert [(command.verb, command.digest) for command in bench.node.commands] == [("delete", digest)] * 3
    nowhere = ctl.ModelRef(digest="abcd", verb="delete", again=True)
    assert (await bench.gateway.ask("model", nowhere)).problem == ""
    with pytest.raises(ModelNotFound):
        await bench.gateway.ask("model", msgspec.structs.replace(nowhere, again=False))
    assert len(bench.node.commands) == 3, "no node can be asked for a beginning"


async def test_a_node_that_is_not_heard_and_has_a_model_that_is_deleted_is_named(bench: Bench) -> None:
    """It can be asked for again once the node is back, though nobody knows the model any more."""
    registered: ctl.Registered = await bench.gateway.ask("register", ctl.RegisterModel(uri="/models/tiny"))
    assert registered.model is not None
    digest, loop = registered.model.digest, bench.controller.loop
    await until(lambda: registry.holders(loop.view, frozenset({digest})), what="n1 has told of it")
    bench.node.silent = True
    loop.change(lambda view: view.put_node(replace(view.nodes["n1"], lost=True)))
    delete = ctl.ModelRef(digest=digest, verb="delete")
    problem = (await bench.gateway.ask("model", delete)).problem
    assert problem == "not removed everywhere: n1: it is not heard, and has it still"
    bench.node.silent = False
    bench.node.tell()
    await until(lambda: loop.view.alive("n1", time.monotonic()), what="n1 is heard again")
    assert (await bench.gateway.ask("model", delete)).problem == ""
    assert [command.verb for command in bench.node.commands] == ["delete"]


async def test_a_model_is_looked_for_wherever_it_may_be(bench: Bench, nats: Nats) -> None:
    """Where it is only coming, or where a report has no room for all, no report names it."""
    registered: ctl.Registered = await bench.gateway.ask("register", ctl.RegisterModel(uri="/models/tiny"))
    assert registered.model is not None
    digest = registered.model.digest
    validate, delete = (ctl.ModelRef(digest=digest, verb=verb) for verb in ("validate", "delete"))
    async with ScriptedNode(await nats.bus("n2"), "n2") as other:

        async def says(storage: Storage | None, untold: int) -> None:
            other.storage, other.untold = storage, untold
            other.tell()

            def heard() -> bool:
                known = bench.controller.loop.view.nodes.get("n2")
                status = known.status if known is not None else None
                return status is not None and (status.storage, status.untold) == (storage, untold)

            await until(heard, what="n2 is heard")

        other.problem = ModelNotFound("it is not here")
        await says(Storage(), 0)
        assert (await bench.gateway.ask("model", validate)).problem == ""
        assert not other.commands, "it has told of all that it has"
        await says(Storage(), 2)
        assert (await bench.gateway.ask("model", validate)).problem == ""
        bench.node.problem = other.problem
        with pytest.raises(NodeNotFound, match="no living node has model"):
            await bench.gateway.ask("model", validate)
        await says(Storage(), 0)
        other.problem = Unavailable("its disk is away")
        assert (await bench.gateway.ask("model", delete)).problem == "not removed everywhere: n2: its disk is away"
        assert [command.verb for command in other.commands] == ["validate", "validate", "delete"]


async def test_lists(bench: Bench) -> None:
    await bench.gateway.deploy(manifest())
    functions: ctl.FunctionList = await bench.gateway.ask("functions", ctl.Listing())
    assert [info.record.function for info in functions.functions] == ["chat"]
    assert len(functions.functions[0].instances) == 1
    nodes: ctl.NodeList = await bench.gateway.ask("nodes", ctl.Listing())
    assert [(node.record.node, node.alive) for node in nodes.nodes] == [("n1", True)]
    assert (await bench.gateway.ask("ping", ctl.Nothing())).note == "leading"

"""``/api/v1`` with a scripted controller and the real stores."""

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from nats.aio.msg import Msg

from sllm.sse import Event, Parser
from sllm_gateway import controller, views
from sllm_gateway.app import running
from sllm_gateway.openapi import document
from sllm_gateway.operations import OPERATIONS
from sllm_gateway.server import listen
from sllm_gateway.settings import GatewaySettings
from sllm_runtime.platform import bundles, trace
from sllm_runtime.platform.owned import end
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.calls import Began, CallOrder, Ended, Journaled
from sllm_runtime.protocol.errors import (
    FunctionError,
    FunctionNotFound,
    InstanceLost,
    InvalidRequest,
    ModelNotFound,
    NoController,
    StartFailed,
    Unavailable,
    Unsatisfiable,
)
from sllm_runtime.protocol.events import Event as Happened
from sllm_runtime.protocol.events import LogRecord
from sllm_runtime.protocol.http import API, CALLS, EVENT_STREAM
from sllm_runtime.protocol.limits import CONTROLLER_WAIT_S, MAX_BUNDLE, TOLD_AFTER_S
from sllm_runtime.protocol.node import (
    DeviceMemory,
    Gpu,
    InstanceStatus,
    NodeRecord,
    NodeStatus,
    Ok,
    PathLoad,
    Progress,
    Storage,
)
from sllm_runtime.protocol.records import FunctionRecord, InstanceRecord, ModelRecord, VersionRecord
from sllm_runtime.protocol.states import CallState, InstanceState, VersionState
from tests.fixtures.named import named, needs_ipv6
from tests.fixtures.nats import CONTROLLER, GATEWAY, GATEWAY_2, NODE, Nats, stored
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, World, entry, hang, manifest, world
from tests.unit.gateway.test_expansion import doubled
from tests.unit.platform.test_trace import TRACE

SSE = {"accept": "text/event-stream"}
OF_NODE = f"{subjects.events_by('node', NODE)}.>"
"""Subjects of what the node tells."""
BUNDLE = b"PK" + bytes(range(256)) * 4000
DIGEST = f"sha256:{hashlib.sha256(BUNDLE).hexdigest()}"
DEPLOY: dict[str, Any] = {
    "manifest": manifest("f").model_dump(mode="json"),
    "bundle": DIGEST,
    "bundle_bytes": len(BUNDLE),
}


def version(number: int = 1, state: VersionState = VersionState.ACTIVE) -> VersionRecord:
    return VersionRecord(
        function="f", version=number, manifest=manifest("f"), bundle=DIGEST, bundle_bytes=9, content="c", state=state
    )


ABLE = ("engine:ours", "lora")
INFO = ctl.FunctionInfo(
    record=FunctionRecord(function="f", active=2, last_version=2),
    versions=(version(1, VersionState.RETIRED), version(2)),
    instances=(
        InstanceRecord(
            instance="i1",
            function="f",
            version=2,
            node="n1",
            state=InstanceState.READY,
            fingerprint="fp",
            capabilities=ABLE,
        ),
    ),
)
MODEL = ctl.ModelInfo(
    record=ModelRecord(digest="sha256:ab", uri="/m", nbytes=10, partitions=(10,)), nodes=("n1",), used_by=("f.1",)
)


def events(text: str) -> list[Event]:
    return [event for event in Parser().feed(text.encode()) if event.comment is None]


async def test_a_bundle_is_put_once_and_checked(nats: Nats) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(BUNDLE), 100_000):
            yield BUNDLE[start : start + 100_000]

    path = f"{API}/bundles/{DIGEST.removeprefix('sha256:')}"
    async with world(nats) as w:
        assert (await w.http.head(path)).status_code == 404
        wrong = await w.http.put(path, content=b"something else")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (422, "digest_mismatch")
        assert (await w.http.head(path)).status_code == 404
        put = await w.http.put(path, content=pieces())
        assert (put.status_code, put.json()) == (201, {"digest": DIGEST, "bytes": len(BUNDLE)})
        assert (await w.http.head(path)).status_code == 200
        assert await bundles.fetch(partial(bundles.part, w.controller.bus), DIGEST, len(BUNDLE)) == BUNDLE
        assert (await w.http.put(f"{API}/bundles/xyz", content=b"")).status_code == 400


async def test_a_bundle_above_the_limit_is_413(nats: Nats) -> None:
    async with world(nats, max_bundle=1000) as w:
        response = await w.http.put(f"{API}/bundles/{'0' * 64}", content=BUNDLE)
    assert response.status_code == 413


def test_a_limit_of_bundles_that_nobody_else_keeps_is_refused() -> None:
    """A deployment names no more than that, an SDK packs no more, and no worker unpacks it."""
    assert GatewaySettings.load({"SLLM_MAX_BUNDLE": "1000"}).max_bundle == 1000
    with pytest.raises(InvalidRequest, match="SLLM_MAX_BUNDLE"):
        GatewaySettings.load({"SLLM_MAX_BUNDLE": str(MAX_BUNDLE + 1)})


def test_heartbeats_that_come_too_late_for_clients_are_refused() -> None:
    """The SDK, as most proxies, takes a stream that is silent for 60 s for broken."""
    with pytest.raises(InvalidRequest, match="SLLM_HEARTBEAT"):
        GatewaySettings.load({"SLLM_HEARTBEAT": "60"})


@pytest.mark.parametrize("host", ["nobody.invalid", "192.0.2.1"])
def test_a_wrong_host_is_not_put_down_to_the_port(host: str) -> None:
    with pytest.raises(InvalidRequest, match="SLLM_HOST"):
        listen(GatewaySettings.load({"SLLM_HOST": host}))


@needs_ipv6
@pytest.mark.parametrize("addresses", [["::1"], ["::1", "127.0.0.1"], ["127.0.0.1", "192.0.2.1"]])
def test_a_name_is_heard_at_each_address_that_it_has_on_this_machine(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which of them a caller comes his resolver says. A name with addresses of IPv6 alone was no address of this
    machine, and one with both was heard at the other."""
    named(monkeypatch, "box", *addresses)
    found = listen(GatewaySettings.load({"SLLM_HOST": "box", "SLLM_PORT": "0"}))
    try:
        assert [each.getsockname()[0] for each in found] == [each for each in addresses if each != "192.0.2.1"]
        assert len({each.getsockname()[1] for each in found}) == 1
        for each in found:
            socket.create_connection(each.getsockname()[:2], timeout=GIVE_UP_S).close()
    finally:
        for each in found:
            each.close()


async def test_a_deployment_tells_its_progress_and_its_result(nats: Nats) -> None:
    asked: list[ctl.Deploy] = []

    async def deploy(request: ctl.Deploy) -> ctl.Deployed:
        asked.append(request)
        if len(asked) < 3:
            return ctl.Deployed(progress=Progress(stage="model", done=len(asked), total=3))
        return ctl.Deployed(version=version(2))

    async with world(nats) as w:
        await w.controller.serve("deploy", ctl.Deploy, deploy)
        await w.controller.serve("function", ctl.FunctionRef, _info)
        await w.deploy(manifest("f"), version=2)
        response = await w.http.post(f"{API}/functions", json=DEPLOY, headers=SSE)
        plain = await w.http.post(f"{API}/functions", json=DEPLOY)
    found = events(response.text)
    assert [event.event for event in found] == ["progress", "progress", "done", "message"]
    assert json.loads(found[0].data)["done"] == 1
    assert json.loads(found[2].data)["function"]["active"] == 2
    assert found[3].done
    assert len({request.request for request in asked[:3]}) == 1
    assert plain.json()["version"] == 2


async def test_a_deployment_goes_on_when_the_controller_is_sure_that_it_leads(nats: Nats) -> None:
    asked: list[ctl.Deploy] = []

    async def deploy(request: ctl.Deploy) -> ctl.Deployed:
        asked.append(request)
        if len(asked) < 3:
            raise NoController("the controller waits: the store of the state does not answer")
        return ctl.Deployed(version=version(2))

    async with world(nats) as w:
        await w.controller.serve("deploy", ctl.Deploy, deploy)
        await w.controller.serve("function", ctl.FunctionRef, _info)
        await w.deploy(manifest("f"), version=2)
        found = events((await w.http.post(f"{API}/functions", json=DEPLOY, headers=SSE)).text)
    assert [event.event for event in found] == ["progress", "done", "message"]
    assert json.loads(found[0].data)["stage"] == "controller"
    assert len({request.request for request in asked}) == 1


async def _info(request: ctl.FunctionRef) -> ctl.FunctionInfo:
    if request.function != "f":
        raise FunctionNotFound(f"no function is named {request.function!r}")
    return INFO


async def test_a_refused_deployment_has_its_status_and_a_late_one_an_event(nats: Nats) -> None:
    async def refuse(request: ctl.Deploy) -> ctl.Deployed:
        raise Unsatisfiable("needs 1 x H100; n1 has none", field="gpu")

    async def fail_late(request: Any) -> ctl.Registered:
        await begun.wait()
        raise StartFailed("boom", stage="import")

    begun = asyncio.Event()
    async with world(nats, headers_wait=0.1) as w:
        await w.controller.serve("deploy", ctl.Deploy, refuse)
        await w.controller.serve("register", ctl.RegisterModel, fail_late)
        refused = await w.http.post(f"{API}/functions", json=DEPLOY, headers=SSE)
        async with w.http.stream("POST", f"{API}/models", json={"uri": "/m"}, headers=SSE) as late:
            begun.set()
            await late.aread()
        wrong = await w.http.post(f"{API}/functions", json={**DEPLOY, "bundle": "x"}, headers=SSE)
        garbage = await w.http.post(f"{API}/functions", content=b"{", headers=SSE)
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "gpu")
    assert late.status_code == 200
    assert events(late.text)[0].event == "error"
    assert json.loads(events(late.text)[0].data)["error"]["stage"] == "import"
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "bundle")
    assert garbage.json()["error"]["code"] == "malformed_json"


async def test_a_schema_that_checks_nothing_is_refused_before_the_controller_is_asked(nats: Nats) -> None:
    asked: list[ctl.Deploy] = []

    async def deploy(request: ctl.Deploy) -> ctl.Deployed:
        asked.append(request)
        return ctl.Deployed(version=version(2))

    async with world(nats) as w:
        await w.controller.serve("deploy", ctl.Deploy, deploy)
        for schema in ({"type": "nonsense"}, {"$ref": "file:///etc/hostname"}, doubled(40)):
            handler = {**DEPLOY["manifest"]["handler"], "input_schema": schema}
            body = {**DEPLOY, "manifest": {**DEPLOY["manifest"], "handler": handler}}
            refused = await w.http.post(f"{API}/functions", json=body, headers=SSE)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (422, "invalid_manifest")
            assert error["field"] == "handler.input_schema"
    assert asked == []


async def test_functions_and_rollback_and_delete(nats: Nats) -> None:
    deletes: list[ctl.Delete] = []
    rollbacks: list[ctl.Rollback] = []

    async def functions(_: ctl.Listing) -> ctl.FunctionList:
        return ctl.FunctionList(functions=(INFO,))

    async def rollback(request: ctl.Rollback) -> ctl.FunctionInfo:
        rollbacks.append(request)
        return INFO

    async def delete(request: ctl.Delete) -> Ok:
        deletes.append(request)
        return Ok(note="deleted" if len(deletes) > 1 else "draining: 1 call")

    async def warmup(request: ctl.Warmup) -> ctl.Warmed:
        waits = Progress(stage="placement", message="all capacity is in use") if request.instances > 1 else None
        return ctl.Warmed(function="f", version=2, wanted=request.instances, ready=1, progress=waits)

    async with world(nats) as w:
        await w.controller.serve("warmup", ctl.Warmup, warmup)
        await w.controller.serve("functions", ctl.Listing, functions)
        await w.controller.serve("function", ctl.FunctionRef, _info)
        await w.controller.serve("rollback", ctl.Rollback, rollback)
        await w.controller.serve("delete", ctl.Delete, delete)
        await w.deploy(manifest("f"), version=2)
        assert [f["name"] for f in (await w.http.get(f"{API}/functions")).json()["functions"]] == ["f"]
        view = (await w.http.get(f"{API}/functions/f")).json()
        assert [(v["version"], v["active"], v["state"]) for v in view["versions"]] == [
            (1, False, "RETIRED"),
            (2, True, "ACTIVE"),
        ]
        assert view["instances"] == [
            {"instance": "i1", "version": 2, "node": "n1", "state": "READY", "error": None}
            | {"fingerprint": "fp", "capabilities": list(ABLE)}
        ]
        assert (await w.http.get(f"{API}/functions/g")).status_code == 404
        assert (await w.http.get(f"{API}/functions/G$")).status_code == 404
        assert (await w.http.post(f"{API}/functions/f/rollback", json={"version": 1})).json()["active"] == 2
        assert (await w.http.post(f"{API}/functions/f/rollback")).status_code == 200
        assert [r.version for r in rollbacks] == [1, None]
        warm = await w.http.post(f"{API}/functions/f/warmup")
        assert (warm.status_code, warm.json()["ready"], warm.json()["progress"]) == (200, 1, None)
        late = await w.http.post(f"{API}/functions/f/warmup", json={"instances": 2})
        assert (late.status_code, late.json()["progress"]["message"]) == (202, "all capacity is in use")
        assert (await w.http.post(f"{API}/functions/f/warmup", json={"instances": 0})).status_code == 400
        assert (await w.http.delete(f"{API}/functions/f?force=true")).json()["deleted"] is True
        wrong = await w.http.delete(f"{API}/functions/f?force=maybe")
        assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "force")
        assert [d.force for d in deletes] == [True, True]


async def test_a_rollback_whose_leader_lost_its_proof_is_not_said_to_be_asked_again(nats: Nats) -> None:
    async def rollback(request: ctl.Rollback) -> ctl.FunctionInfo:
        # As ``Service._sure`` after the handler: it is stored, and the store went away.
        raise NoController("the controller waits: the store of the state does not answer; try again")

    async with world(nats) as w:
        await w.controller.serve("rollback", ctl.Rollback, rollback)
        unnamed = await w.http.post(f"{API}/functions/f/rollback", json={})
        assert unnamed.json()["error"]["retryable"] is False
        named = await w.http.post(f"{API}/functions/f/rollback", json={"version": 1})
        assert named.json()["error"]["retryable"] is True


async def test_a_rollback_that_is_done_is_not_said_to_be_asked_again(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "CONTROLLER_WAIT_S", 0.1)  # ``function`` says ``timeout_s`` and ``wait_s`` itself
    done = list[ctl.Rollback]()

    async def rollback(request: ctl.Rollback) -> ctl.FunctionInfo:
        done.append(request)
        return msgspec.structs.replace(INFO, next="v1")  # the first of two pages

    async with world(nats) as w:
        await w.controller.serve("rollback", ctl.Rollback, rollback)
        await w.deploy(manifest("f"), version=2)
        answer = await w.http.post(f"{API}/functions/f/rollback", json={})
        assert done
        assert (answer.status_code, answer.json()["error"]["retryable"]) == (503, False)


async def test_a_rollback_that_one_heard_who_is_gone_is_not_said_to_be_not_done(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller.Controller.ask, "__kwdefaults__", {"timeout_s": 5.0, "wait_s": 0.5})
    heard = asyncio.Event()

    async def rollback(request: ctl.Rollback) -> ctl.FunctionInfo:
        heard.set()  # it is stored; then the process dies
        await asyncio.sleep(60)
        raise AssertionError

    async with world(nats) as w:
        await w.controller.serve("rollback", ctl.Rollback, rollback)
        asked = asyncio.create_task(w.http.post(f"{API}/functions/f/rollback", json={}))
        await asyncio.wait_for(heard.wait(), 5)
        await w.controller._subscriptions.pop().unsubscribe()
        w.gateway._leader._ask_again()  # the connection was gone for a moment, or another one led for a moment
        error = (await asked).json()["error"]
        assert error["retryable"] is False
        assert "was not done" not in error["message"]


async def test_a_rollback_that_is_done_is_not_asked_for_again_whatever_came_then(nats: Nats) -> None:
    async def rollback(request: ctl.Rollback) -> ctl.FunctionInfo:
        return msgspec.structs.replace(INFO, next="v1")

    async def function(request: ctl.FunctionRef) -> ctl.FunctionInfo:
        raise Unavailable("16384 requests are being answered; try again")  # ``Server.handle`` says so

    async with world(nats) as w:
        await w.controller.serve("rollback", ctl.Rollback, rollback)
        await w.controller.serve("function", ctl.FunctionRef, function)
        await w.deploy(manifest("f"), version=2)
        answer = await w.http.post(f"{API}/functions/f/rollback", json={})
        assert answer.json()["error"]["retryable"] is False


async def test_a_rollback_that_may_be_done_is_not_to_be_asked_for_again(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who has given it no name: again it goes back one version further, to one that nobody meant."""
    monkeypatch.setattr(controller.Controller.ask, "__kwdefaults__", {"timeout_s": 0.3, "wait_s": None})

    async def rollback(_: ctl.Rollback) -> ctl.FunctionInfo:
        await asyncio.sleep(1.0)  # longer than anybody waits here
        return INFO

    async with world(nats) as w:
        await w.controller.serve("rollback", ctl.Rollback, rollback)
        unnamed = await w.http.post(f"{API}/functions/f/rollback", json={})
        assert (unnamed.status_code, unnamed.json()["error"]["code"]) == (503, "no_controller")
        assert "done once" not in unnamed.json()["error"]["message"]
        assert unnamed.json()["error"]["retryable"] is False
        assert (unnamed.headers["x-should-retry"], "retry-after" in unnamed.headers) == ("false", False)
        for body in ({"version": 1}, {"request": "a" * 32}):
            again = await w.http.post(f"{API}/functions/f/rollback", json=body)
            assert again.json()["error"]["retryable"] is True


async def test_a_deletion_under_a_controller_of_before_is_done_when_the_function_is_gone(nats: Nats) -> None:
    """That one knows nothing of ``Delete.begun``, and of a function that went between two questions only that there is
    none."""
    gone = False

    async def delete(_: ctl.Delete) -> Ok:
        nonlocal gone
        if gone:
            raise FunctionNotFound("there is no function 'f'; `sllm fn list` shows what there is")
        gone = True
        return Ok(note="draining: 1 call")

    async with world(nats) as w:
        await w.controller.serve("delete", ctl.Delete, delete)
        answer = await w.http.delete(f"{API}/functions/f")
        assert (answer.status_code, answer.json().get("deleted")) == (200, True)
        again = await w.http.delete(f"{API}/functions/f?begun=true")
        assert (again.status_code, again.json().get("deleted")) == (200, True)
        assert (await w.http.delete(f"{API}/functions/f")).status_code == 404


async def test_models_and_nodes_and_status(nats: Nats) -> None:
    verbs: list[str] = []

    async def models(_: ctl.Listing) -> ctl.ModelList:
        return ctl.ModelList(models=(MODEL,))

    async def model(request: ctl.ModelRef) -> ctl.ModelInfo:
        verbs.append(request.verb)
        if request.digest != "abcd":
            raise ModelNotFound("no such model")
        return MODEL

    async def nodes(_: ctl.Listing) -> ctl.NodeList:
        status = NodeStatus(
            node="n1", boot="b", sequence=1, term=1, cpu=2, memory=4, free_cpu=1, free_memory=3,
            gpus=(Gpu(index=0, kind="L4", memory=24),), models=("sha256:ab", "sha256:cd", "sha256:ef"),
            resident=("sha256:ab", "sha256:ef"), remote=("sha256:ef",), dram_used=2, dram_limit=8, untold=4,
            paths=(PathLoad(path="disk", bandwidth=1e9, queued=5),), condition="podman hangs",
            storage=Storage(ssd_used=1, integrity=False, devices=(DeviceMemory(device="fake:0", limit=3, used=2),)),
            instances=(
                InstanceStatus(instance="i1", function="f", version=2, state=InstanceState.READY, running=3),
                InstanceStatus(instance="i0", function="f", version=1, state=InstanceState.STOPPED),
            ),
        )  # fmt: skip
        known = ctl.NodeInfo(record=NodeRecord(node="n1"), status=status, alive=True)
        return ctl.NodeList(nodes=(known, ctl.NodeInfo(record=NodeRecord(node="n2"))))

    async with world(nats) as w:
        down = (await w.http.get(f"{API}/status")).json()
        await w.controller.serve("models", ctl.Listing, models)
        await w.controller.serve("model", ctl.ModelRef, model)
        await w.controller.serve("nodes", ctl.Listing, nodes)
        assert (await w.http.get(f"{API}/models")).json()["models"][0]["used_by"] == ["f.1"]
        assert (await w.http.get(f"{API}/models/abcd")).json()["bytes"] == 10
        assert (await w.http.post(f"{API}/models/abcd/validate")).status_code == 200
        assert (await w.http.delete(f"{API}/models/ABCD")).status_code == 200
        assert (await w.http.get(f"{API}/models/0123")).status_code == 404
        assert (await w.http.get(f"{API}/models/zz")).status_code == 400
        assert verbs == ["describe", "validate", "delete", "describe"]
        found = (await w.http.get(f"{API}/nodes")).json()["nodes"]
        assert [(n["node"], n["alive"], n["free_cpu"]) for n in found] == [("n1", True, 1), ("n2", False, 0)]
        assert found[0]["gpus"][0]["kind"] == "L4"
        assert [each["condition"] for each in found] == ["podman hangs", ""]
        one, other = [(await w.http.get(f"{API}/nodes/{name}")).json() for name in ("n1", "n2")]
        assert (await w.http.get(f"{API}/nodes", params={"detail": "true"})).json()["nodes"] == [one, other]
        assert (await w.http.get(f"{API}/nodes/none")).json()["error"]["code"] == "node_not_found"
        up = (await w.http.get(f"{API}/status")).json()
    assert one["tiers"] == {"sha256:ab": ["dram", "ssd"], "sha256:cd": ["ssd"], "sha256:ef": ["dram", "source"]}
    storage = one["storage"]
    assert (storage["dram_used"], storage["ssd_used"], storage["integrity"]) == (2, 1, False)
    assert storage["paths"] == [{"path": "disk", "bandwidth": 1e9, "queued": 5}]
    assert storage["devices"] == [{"device": "fake:0", "limit": 3, "used": 2}]
    assert one["here"] == [{"instance": "i1", "function": "f", "version": 2, "state": "READY", "running": 3}]
    assert (one["instances"], one["models"], one["untold"]) == (1, 3, 4)
    assert (other["storage"], other["tiers"], other["here"], other["alive"]) == (None, {}, [], False)
    assert (down["controller"], up["controller"], up["nodes"]) == (False, True, 2)


async def test_a_controller_is_waited_for_and_without_one_the_answer_is_503(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "CONTROLLER_WAIT_S", 0.5)
    async with world(nats) as w:
        response = await w.http.get(f"{API}/functions")
        monkeypatch.setattr(controller, "CONTROLLER_WAIT_S", GIVE_UP_S)
        asking = asyncio.create_task(w.http.post(f"{API}/nodes/n1/cordon"))
        done, _ = await asyncio.wait({asking}, timeout=0.5)
        assert not done, "it waits for one"
        await w.controller.serve("cordon", ctl.Cordon, _cordoned)
        cordoned = await asking
        await w.controller.serve("forget", ctl.Forget, _forgotten)
        forgotten = await w.http.delete(f"{API}/nodes/n1")
    assert response.status_code == 503
    assert (response.json()["error"]["code"], response.json()["error"]["retryable"]) == ("no_controller", True)
    assert float(response.headers["retry-after"]) >= 0.5, "who asked has waited already, and is not to ask at once"
    assert cordoned.json()["cordoned"]
    assert forgotten.json() == {"node": "n1", "forgotten": True}


async def _cordoned(request: ctl.Cordon) -> ctl.NodeInfo:
    return ctl.NodeInfo(record=NodeRecord(node=request.node, cordoned=request.cordoned))


async def _forgotten(request: ctl.Forget) -> Ok:
    assert request.node == "n1"
    return Ok(note="forgotten")


def line(text: str, call: str | None = None) -> LogRecord:
    return LogRecord(at=1.0, function="f", version=1, instance="i1", node=NODE, stream="stdout", text=text, call=call)


async def _texts(w: World, **query: Any) -> list[str]:
    response = await w.http.get(f"{API}/functions/f/logs", params=query)
    found = events(response.text)
    assert found[-1].done
    return [json.loads(event.data)["text"] for event in found[:-1]]


async def test_logs_are_kept_filtered_and_followed(nats: Nats) -> None:
    async with world(nats) as w:
        await w.controller.serve("function", ctl.FunctionRef, _info)
        assert await _texts(w) == []
        for number in range(10):
            w.node.bus.publish_now(subjects.logs(NODE, "f"), line(f"line {number}", f"call-{number % 2}"))
        w.node.bus.publish_now(subjects.logs(NODE, "other"), line("not mine"))
        await stored(w.controller.bus, subjects.LOGS_STREAM, f"sllm.logs.{NODE}.*", 11)
        assert await _texts(w) == [f"line {n}" for n in range(10)]
        assert await _texts(w, limit=3, call="call-1") == ["line 5", "line 7", "line 9"]
        assert await _texts(w, since=4e9) == []
        assert len(await _texts(w, since=4e9, ago=60)) == 10, "the asker's clock is ahead"
        assert await _texts(w, since=0, ago=0) == [], "or behind"
        async with w.http.stream("GET", f"{API}/functions/f/logs", params={"follow": "true", "limit": 1}) as response:
            parser, seen = Parser(), []
            async for piece in response.aiter_bytes():
                seen += [json.loads(event.data)["text"] for event in parser.feed(piece) if event.comment is None]
                if len(seen) == 1:
                    w.node.bus.publish_now(subjects.logs(NODE, "f"), line("news"))
                if seen[-1:] == ["news"]:
                    break
        assert seen == ["line 9", "news"]


async def test_who_reads_on_gets_each_behind_the_last_that_came(nats: Nats) -> None:
    """Of logs and events, whatever the limit: at any gateway, since their numbers are those of the stream."""
    async with world(nats) as w:
        await w.controller.serve("function", ctl.FunctionRef, _info)
        for number in range(6):
            w.node.bus.publish_now(subjects.logs(NODE, "f"), line(f"line {number}"))
            event = Happened(kind="instance.ready", at=float(number), component="node", function="f")
            w.node.bus.publish_now(subjects.event("node", NODE, event.kind, "f"), event)
        await stored(w.controller.bus, subjects.LOGS_STREAM, subjects.logs(NODE, "f"), 6)
        await stored(w.controller.bus, subjects.EVENTS_STREAM, OF_NODE, 6)
        for path in ("functions/f/logs", "events?function=f"):

            async def read(last: str | None = None, path: str = path, **query: Any) -> list[Event]:
                headers = {"Last-Event-ID": last} if last is not None else {}
                *found, done = events((await w.http.get(f"{API}/{path}", params=query, headers=headers)).text)
                assert done.done
                return found

            whole = await read()
            assert len(whole) >= 6
            assert await read(whole[1].id, limit=1) == whole[2:]
            assert await read(whole[-1].id) == []
            assert await read(str(10**17)) == [], "of a stream that was there before this one"
            wrong = await w.http.get(f"{API}/{path}", headers={"Last-Event-ID": "x"})
            assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "Last-Event-ID")


async def test_who_began_to_follow_before_there_was_a_line_reads_on_with_the_first(nats: Nats) -> None:
    """An empty stream stands at 0, and each line behind that is news, whatever the limit."""
    async with world(nats) as w:
        await w.controller.serve("function", ctl.FunctionRef, _info)
        path, query = f"{API}/functions/f/logs", {"follow": "true", "limit": "2"}
        async with w.http.stream("GET", path, params=query) as response:
            async for piece in response.aiter_bytes():
                (place,) = Parser().feed(piece)
                break
        assert place.id == "0"
        for number in range(5):
            w.node.bus.publish_now(subjects.logs(NODE, "f"), line(f"line {number}"))
        await stored(w.controller.bus, subjects.LOGS_STREAM, subjects.logs(NODE, "f"), 5)
        *found, _ = events((await w.http.get(path, params={"limit": 2}, headers={"Last-Event-ID": place.id})).text)
        assert [json.loads(event.data)["text"] for event in found] == [f"line {n}" for n in range(5)]


async def test_following_goes_on_over_a_restart_of_nats(nats: Nats) -> None:
    seen: list[str] = []

    async def read() -> None:
        parser = Parser()
        async with w.http.stream("GET", f"{API}/functions/f/logs", params={"follow": "true"}) as response:
            async for piece in response.aiter_bytes():
                seen.extend(json.loads(e.data)["text"] for e in parser.feed(piece) if e.comment is None)

    async with world(nats) as w:
        reading = asyncio.create_task(read())
        w.node.bus.publish_now(subjects.logs(NODE, "f"), line("before"))
        await until(lambda: seen == ["before"])
        await nats.kill()
        await nats.start()
        await until(lambda: w.node.bus.connected and w.gateway.problem() == "")
        w.node.bus.publish_now(subjects.logs(NODE, "f"), line("after"))
        await until(lambda: seen == ["before", "after"])
        reading.cancel()
        await asyncio.wait([reading])


async def test_logs_of_nothing_and_wrong_queries(nats: Nats) -> None:
    async with world(nats) as w:
        await w.controller.serve("function", ctl.FunctionRef, _info)
        assert (await w.http.get(f"{API}/functions/g/logs")).status_code == 404
        wrong = await w.http.get(f"{API}/functions/f/logs?limit=x")
        assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "limit")
        assert (await w.http.get(f"{API}/functions/f/logs?limit=99999")).status_code == 400
        for since in ("nan", "inf", "-inf", "1e300"):
            wrong = await w.http.get(f"{API}/functions/f/logs?since={since}")
            assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "since"), since
        for ago in ("nan", "inf", "-1", "1e300"):
            wrong = await w.http.get(f"{API}/functions/f/logs?ago={ago}")
            assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "ago"), ago


async def test_what_names_nothing_is_refused_in_few_words(nats: Nats) -> None:
    long = "x" * 5000
    async with world(nats) as w:
        for request in ("zz", "A" * 32, "a" * 33, long):
            wrong = await w.http.delete(f"{API}/deployments/{request}")
            assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "request")
            assert len(wrong.text) < 300
        for path in (f"/fn/{long}", f"/fn/{long}/v1", f"/fn/{long}/{long}", f"/{long}"):
            lost = await w.http.post(path)
            assert lost.status_code == 404
            assert len(lost.text) < 400, path
        for path in (f"functions/{long}", f"functions/{long}/logs", f"bundles/{long}", f"models/{long}"):
            assert len((await w.http.get(f"{API}/{path}")).text) < 300, path
        for text in ("chat/completions", "completions"):
            body = {"model": long[:256], "messages": [{"role": "user", "content": "a"}], "prompt": "a"}
            lost = await w.http.post(f"/v1/{text}", json=body)
            assert lost.status_code == 404
            assert len(lost.text) < 300
        assert len((await w.http.get(f"/v1/models/{long}")).text) < 300


async def test_the_trace_of_a_request_goes_to_node_and_controller(nats: Nats) -> None:
    """In the header of NATS' messages, where tools look for it, and with the call."""
    heard: list[str | None] = []
    asked: list[str] = []

    async def opened(message: Msg) -> None:
        heard.append((message.headers or {}).get("traceparent"))

    async def listed(request: ctl.Listing) -> ctl.NodeList:
        asked.append(trace.current())
        return ctl.NodeList(nodes=())

    async with world(nats) as w:
        await (await nats.bus(NODE)).subscribe_raw(subjects.node_open(NODE, "x")[:-1] + "*", opened)
        await w.controller.serve("nodes", ctl.Listing, listed)
        await w.deploy(manifest("f", streams=False), entry(), script=answers)
        for said in (TRACE, "of nobody"):
            assert (await w.http.post("/fn/f", headers={"traceparent": said})).status_code == 200
            assert (await w.http.get(f"{API}/nodes", headers={"traceparent": said})).status_code == 200
        await until(lambda: len(heard) == 2, what="both calls were seen")
        made, asked_too = heard[1] or "", asked[1]
        assert (heard[0], asked[0]) == (TRACE, TRACE)
        assert [each.head.traceparent for each in w.node.opened] == [TRACE, made]
        assert len({trace.trace_id(each) for each in (TRACE, made, asked_too)} - {""}) == 3, "each request has one"


async def test_what_tracing_systems_add_to_a_trace_goes_to_the_function(nats: Nats) -> None:
    """Also where another instance goes on with the call, and where it is kept; not without its trace."""
    later = f"01{TRACE[2:]}-more"
    lines = [("traceparent", later), ("tracestate", "a=1, b=2"), ("tracestate", "c=3")]

    async def once(run: Run) -> None:
        if run.head.epoch == 1:
            run.end(InstanceLost("it died"))
        else:
            await answers(run)

    async with world(nats) as w:
        await w.deploy(manifest("f", streams=False, retries=1), entry(), entry("i2"), script=once)
        assert (await w.http.post("/fn/f", headers=lines)).status_code == 200
        assert (await w.http.post("/fn/f", headers=[*lines, ("Prefer", "respond-async")])).status_code == 202
        await until(lambda: len(w.node.opened) == 4, what="both were begun again")
        assert {(each.head.traceparent, each.head.tracestate) for each in w.node.opened} == {(TRACE, "a=1,b=2,c=3")}
        for traced in ([], [("traceparent", "of nobody")], [("traceparent", TRACE)] * 2):
            w.node.opened.clear()
            assert (await w.http.post("/fn/f", headers=[*traced, *lines[1:]])).status_code == 200
            assert {each.head.tracestate for each in w.node.opened} == {""}


async def answers(run: Run) -> None:
    run.out("done")
    run.end()


async def test_a_function_and_a_call_are_explained(nats: Nats) -> None:
    """A call also when it has ended, and at another gateway than its own; by its instance's start."""
    asked = []

    async def explain(request: ctl.Explain) -> ctl.Explained:
        if request.function != "f":
            raise FunctionNotFound(request.function)
        asked.append((request.function, request.version, request.instance))
        near = ctl.Candidate(node="n1", seconds=0.5, expected="0.50 s")
        return ctl.Explained(
            function=request.function, version=1, policy="StartupTime", decision="a start on n1", node="n1",
            candidates=(near, ctl.Candidate(node="n2", why="it is cordoned")),
        )  # fmt: skip

    async with world(nats) as w:
        await w.controller.serve("explain", ctl.Explain, explain)
        await w.deploy(manifest("f"), entry(), script=hang)
        of_function = (await w.http.get(f"{API}/explain/f")).json()
        async with w.http.stream("POST", "/fn/f", headers=SSE) as response:
            call = response.headers["sllm-call-id"]
            of_call = (await w.http.get(f"{API}/explain/{call}")).json()
            assert (await w.http.post(f"/v1/calls/{call}/cancel")).status_code == 202
            await response.aread()
        await until(lambda: len(w.gateway.calls) == 0, what="it is over")
        ended = (await w.http.get(f"{API}/explain/{call}")).json()
        lost = [await w.http.get(f"{API}/explain/{name}") for name in ("CALL-1", "call-1")]
        no_function = await w.http.get(f"{API}/explain/none")
        settings = GatewaySettings.load(nats.env(GATEWAY_2), gateway=GATEWAY_2, port=0)
        async with running(await nats.bus(GATEWAY_2), settings) as other:
            assert await other._recent.anywhere(call) == w.gateway._recent.here(call)
            assert await other._recent.anywhere("call-1") is None
    assert of_function["candidates"][1] == {
        "node": "n2", "seconds": None, "expected": "", "why": "it is cordoned", "ways": [],
    }  # fmt: skip
    assert of_function["call"] is None
    assert (of_call["call"], of_call["state"], of_call["instance"]) == (call, "RUNNING", entry().instance)
    assert of_call["timeline"].startswith("timeline queue=")
    assert (ended["call"], ended["state"], ended["instance"]) == (call, "CANCELLED", entry().instance)
    assert ended["timeline"].startswith("timeline queue=")
    assert ended["error"] == "cancelled on request"
    assert asked == [("f", None, ""), *[("f", 1, entry().instance)] * 2]
    assert [each.status_code for each in lost] == [404, 404]
    assert {each.json()["error"]["code"] for each in lost} == {"call_not_found"}
    assert no_function.json()["error"]["code"] == "function_not_found"


async def test_a_kept_call_is_explained_when_no_gateway_remembers_it(nats: Nats) -> None:
    """One that found its instance and succeeded leaves no event."""
    asked: list[ctl.Explain] = []

    async def explain(request: ctl.Explain) -> ctl.Explained:
        if request.function != "f":
            raise FunctionNotFound(request.function)
        asked.append(request)
        return ctl.Explained(function="f", version=1, policy="StartupTime", decision="a start on n1")

    async with world(nats, scripts={"f": answers}) as w:
        await w.deploy(manifest("f"), entry())
        call = (await w.http.post("/fn/f", headers={"prefer": "respond-async"})).json()["id"]
        async with w.http.stream("GET", f"/v1/calls/{call}/events") as response:
            await response.aread()
    async with world(nats) as w:
        await w.controller.serve("explain", ctl.Explain, explain)
        assert w.gateway._recent.here(call) is None
        found = (await w.http.get(f"{API}/explain/{call}")).json()
        await w.controller.bus.jetstream.purge_stream(subjects.CALLS_STREAM)
        lost = await w.http.get(f"{API}/explain/{call}")
    assert (found["call"], found["state"], found["instance"]) == (call, "SUCCEEDED", entry().instance)
    assert [(each.version, each.instance) for each in asked] == [(1, entry().instance)]
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "call_not_found")


async def test_a_kept_call_is_explained_while_nobody_leads(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller is waited for where nobody else knows what was asked for."""
    waited: list[tuple[str, float | None]] = []

    async def nobody(_: Any, verb: str, request: ctl.Explain, reply: Any, *, wait_s: float | None = None) -> Any:
        waited.append((request.function, wait_s))
        raise NoController("nobody leads")

    async with world(nats, scripts={"f": answers}) as w:
        await w.deploy(manifest("f"), entry())
        call = (await w.http.post("/fn/f", headers={"prefer": "respond-async"})).json()["id"]
        async with w.http.stream("GET", f"/v1/calls/{call}/events") as response:
            await response.aread()
    async with world(nats) as w:
        start = ctl.StartTold(instance=entry().instance, node="n1", state="READY", at=1.0)
        told = ctl.Explained(
            function="f", version=1, policy="StartupTime", decision="a start on n1", past=True, starts=(start,)
        )
        w.controller.bus.publish_now(subjects.decision("f"), told)
        await stored(w.controller.bus, subjects.DECISIONS_STREAM, subjects.decision("f"), 1)
        monkeypatch.setattr(controller.Controller, "ask", nobody)
        found = (await w.http.get(f"{API}/explain/{call}")).json()
        assert waited == [("f", TOLD_AFTER_S)]
        waited.clear()
        unknown = await w.http.get(f"{API}/explain/call-nobody")
    assert (found["call"], found["state"], found["decision"]) == (call, "SUCCEEDED", "a start on n1")
    assert waited == [("call-nobody", CONTROLLER_WAIT_S)], "it may be a function's name"
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "no_controller")


async def test_starts_are_explained_that_no_controller_remembers(nats: Nats) -> None:
    """By what another one has recorded of them, also while none answers."""
    leads = [True]

    async def explain(request: ctl.Explain) -> ctl.Explained:
        if not leads:
            raise Unavailable("nobody leads")
        if request.function != "f":
            raise FunctionNotFound(request.function)
        here = ctl.StartTold(instance=entry().instance, node="n1", state="READY")
        return ctl.Explained(
            function="f", version=1, policy="StartupTime", decision="all capacity is in use", possible=False,
            starts=(here,), since=1.0,
        )  # fmt: skip

    def of(instance: str, took: float | None, state: str = "READY", at: float = 1.0) -> ctl.Explained:
        start = ctl.StartTold(instance=instance, node="n1", state=state, seconds=0.5, took=took, at=at)
        return ctl.Explained(
            function="f", version=1, policy="StartupTime", decision="a start on n1", past=True, starts=(start,)
        )

    async with world(nats) as w:
        for kind, message in (("call.cold", ""), ("call.failed", "it raised")):
            lost = Happened(
                kind=kind, at=1.0, component="gateway", function="f", version=1, call="call-of-before",
                instance="before" if kind == "call.cold" else None, message=message,
            )  # fmt: skip
            subject = subjects.event("gateway", GATEWAY, kind, "f", lost.call)
            w.gateway._bus.publish_now(subject, lost)
        await stored(w.controller.bus, subjects.EVENTS_STREAM, "sllm.events.*.*.*.*.*.call-of-before", 2)
        of_before = (of("before", None), of("before", 0.75), of("cut", None, "STARTING"), of("bad", None, "FAILED"))
        namesake = of("of-a-function-of-that-name-before", 0.5, at=0.5)
        for told in (namesake, *of_before, of(entry().instance, 0.25)):
            w.controller.bus.publish_now(subjects.decision("f"), told)
        await stored(w.controller.bus, subjects.DECISIONS_STREAM, subjects.decision("f"), 5)
        await w.controller.serve("explain", ctl.Explain, explain)
        await w.deploy(manifest("f"), entry(), script=hang)
        of_function = (await w.http.get(f"{API}/explain/f")).json()
        forgotten = (await w.http.get(f"{API}/explain/call-of-before")).json()
        async with w.http.stream("POST", "/fn/f", headers=SSE) as response:
            call = response.headers["sllm-call-id"]
            remembered = (await w.http.get(f"{API}/explain/{call}")).json()
            leads.clear()
            alone = (await w.http.get(f"{API}/explain/{call}")).json()
            assert (await w.http.post(f"/v1/calls/{call}/cancel")).status_code == 202
            await response.aread()
        await until(lambda: len(w.gateway.calls) == 0, what="it is over")
    starts = {each["instance"]: (each["state"], each["seconds"], each["took"]) for each in of_function["starts"]}
    assert starts == {
        "before": ("", 0.5, 0.75),
        "cut": ("", 0.5, None),
        "bad": ("FAILED", 0.5, None),
        entry().instance: ("READY", 0.5, 0.25),
    }
    assert (forgotten["state"], forgotten["instance"], forgotten["error"]) == ("FAILED", "before", "it raised")
    assert forgotten["starts"][0]["took"] == 0.75
    assert of_function["decision"] == "all capacity is in use", "what would be done now"
    for each in (remembered, alone):
        assert (each["decision"], each["past"], each["call"]) == ("a start on n1", True, call)


async def test_a_start_of_which_only_that_it_was_is_remembered_has_its_record(nats: Nats) -> None:
    """On large clusters a controller soon forgets what it was decided by."""
    start = ctl.StartTold(instance=entry().instance, node="n1", state="READY", seconds=0.5, took=0.25)
    so_far = ctl.Explained(
        function="f", version=1, policy="StartupTime", decision="a start on n1", node="n1", past=True, starts=(start,)
    )
    near = ctl.Candidate(node="n1", seconds=0.5, expected="0.50 s")

    async def explain(_: ctl.Explain) -> ctl.Explained:
        return so_far

    async with world(nats) as w:
        await w.controller.serve("explain", ctl.Explain, explain)
        told = msgspec.structs.replace(so_far, candidates=(near,), starts=(msgspec.structs.replace(start, at=1.0),))
        w.controller.bus.publish_now(subjects.decision("f"), told)
        await stored(w.controller.bus, subjects.DECISIONS_STREAM, subjects.decision("f"), 1)
        await w.deploy(manifest("f"), entry(), script=answers)
        call = (await w.http.post("/fn/f", headers=SSE)).headers["sllm-call-id"]
        found = (await w.http.get(f"{API}/explain/{call}")).json()
    assert [each["node"] for each in found["candidates"]] == ["n1"]
    assert (found["past"], found["starts"][0]["at"]) == (True, 0.0), "what it has come to is known better"


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_call_of_a_function_that_is_gone_is_explained(nats: Nats, recorded: bool) -> None:
    """By its start, if that is recorded; else by what its gateway knows of it."""

    async def explain(_: ctl.Explain) -> ctl.Explained:
        raise FunctionNotFound("there is no function f")

    start = ctl.StartTold(instance=entry().instance, node="n1", state="READY", at=1.0)
    async with world(nats) as w:
        await w.controller.serve("explain", ctl.Explain, explain)
        if recorded:
            told = ctl.Explained(
                function="f", version=1, policy="StartupTime", decision="a start on n1", past=True, starts=(start,)
            )
            w.controller.bus.publish_now(subjects.decision("f"), told)
            await stored(w.controller.bus, subjects.DECISIONS_STREAM, subjects.decision("f"), 1)
        await w.deploy(manifest("f"), entry(), script=answers)
        call = (await w.http.post("/fn/f", headers=SSE)).headers["sllm-call-id"]
        answer = await w.http.get(f"{API}/explain/{call}")
    found = answer.json()
    assert (answer.status_code, found["call"], found["state"]) == (200, call, "SUCCEEDED")
    assert found["decision"] == ("a start on n1" if recorded else "there is no function f")
    assert [each["instance"] for each in found["starts"]] == [entry().instance] * recorded


async def test_events_are_read(nats: Nats) -> None:
    async with world(nats) as w:
        event = Happened(kind="instance.ready", at=1.0, component="node", function="f")
        w.node.bus.publish_now(subjects.events_by("node", NODE), event)  # as earlier releases do
        for kind, call in (("call.failed", "call-1"), ("call.moved", "call-2"), ("node.started", None)):
            told = Happened(kind=kind, at=2.0, component="node", function="f" if call else None, call=call)
            w.node.bus.publish_now(subjects.event("node", NODE, kind, told.function, call), told)
        await stored(w.controller.bus, subjects.EVENTS_STREAM, OF_NODE, 3)

        async def read(**wanted: str) -> list[str]:
            found = events((await w.http.get(f"{API}/events", params=wanted)).text)
            kinds = [json.loads(each.data)["kind"] for each in found if each.event == "event"]
            return [kind for kind in kinds if kind != "gateway.ready"]

        assert await read() == ["instance.ready", "call.failed", "call.moved", "node.started"]
        assert await read(function="f") == ["instance.ready", "call.failed", "call.moved"]
        assert await read(kind="call") == ["call.failed", "call.moved"]
        assert await read(kind="instance.ready") == ["instance.ready"]
        assert await read(call="call-2") == ["call.moved"]
        assert await read(kind="call.failed", call="call-2") == []
        refused = (await w.http.get(f"{API}/events", params={"kind": "instance.redy"})).json()["error"]
        assert refused["message"].startswith("no event is of kind ")
        assert "instance.ready, " in refused["message"]
        for wrong in ({"kind": "a.b.c"}, {"kind": "instance.redy"}, {"call": "a b"}, {"function": "*"}):
            answer = await w.http.get(f"{API}/events", params=wrong)
            assert (answer.status_code, answer.json()["error"]["field"]) == (400, next(iter(wrong)))


async def test_what_befalls_a_call_is_logged_also_where_its_event_is_dropped(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def raises(run: Run) -> None:
        run.end(FunctionError("ValueError: no"))

    async with world(nats) as w:
        await w.deploy(manifest("f"), entry(), script=raises)
        await w.deploy(manifest("full", concurrency=1, max_instances=1), entry("i2", concurrency=1), script=hang)
        monkeypatch.setattr("sllm_runtime.platform.announce.BURST", 0)
        caplog.set_level("INFO")
        failed = await w.http.post("/fn/f")
        running, waiting = (asyncio.create_task(w.http.post("/fn/full", headers=SSE)) for _ in range(2))
        await until(lambda: "call.queued" in caplog.text, what="the second one waits for the first")
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait([running, waiting])
        await until(lambda: not len(w.gateway.calls))
        assert await w.told() == [], "there were too many events"
    said = {(each.message, each.__dict__.get("call")) for each in caplog.records}
    assert ("call.failed: function_error: ValueError: no", failed.headers["sllm-call-id"]) in said
    assert {message.partition(":")[0] for message, call in said if call} >= {"call.queued", "call.cancelled"}


async def test_the_gateway_tells_of_itself_and_of_calls_that_fail_by_no_fault_of_their_caller(nats: Nats) -> None:
    async def raises(run: Run) -> None:
        run.end(FunctionError("ValueError: no"))

    async with world(nats) as w:
        await w.deploy(manifest("f"), entry(), script=raises)
        failed = await w.http.post("/fn/f")
        assert failed.status_code == 500
        assert (await w.http.post("/fn/nothing")).status_code == 404
        assert (await w.http.post("/fn/f", content=b"[")).status_code == 400
        assert (await w.http.post("/fn/f", content=b"[]")).status_code == 422
        metrics = (await w.http.get("/metrics")).text
        await stored(w.controller.bus, subjects.EVENTS_STREAM, f"{subjects.events_by('gateway', GATEWAY)}.>", 2)
        found = [
            json.loads(each.data) for each in events((await w.http.get(f"{API}/events")).text) if each.data[0] == "{"
        ]
    assert [each["kind"] for each in found] == ["gateway.ready", "call.failed"]
    for code in ("function_error", "malformed_json", "invalid_argument"):
        assert f'sllm_calls_total{{code="{code}",function="f"}} 1.0' in metrics
    assert "nothing" not in metrics
    (_, told) = found
    assert told["call"] == failed.headers["sllm-call-id"]
    assert (told["function"], told["version"], told["message"]) == ("f", 1, "ValueError: no")
    assert told["fields"] == {"code": "function_error"}


def references(found: object) -> Iterator[str]:
    if isinstance(found, dict):
        yield from ([found["$ref"]] if "$ref" in found else [])
    for each in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from references(each)


def test_the_openapi_document_says_what_bodies_are() -> None:
    described = document()
    schemas, paths = described["components"]["schemas"], described["paths"]
    assert {ref.rpartition("/")[2] for ref in references(described)} <= set(schemas)
    body = paths["/fn/{name}"]["post"]["requestBody"]["content"]
    assert body == {"application/json": {"schema": {"type": "object"}}}
    assert set(paths["/fn/{name}"]["post"]["responses"]["200"]["content"]) == {"application/json", EVENT_STREAM}
    assert set(paths[f"{API}/functions/{{name}}"]["delete"]["responses"]) == {"200", "202", "default"}
    assert "application/octet-stream" in paths[f"{API}/bundles/{{digest}}"]["put"]["requestBody"]["content"]
    assert "required" not in schemas["RollbackRequest"], "what has a default may be left out"
    assert schemas["DeployRequest"]["required"] == ["manifest", "bundle", "bundle_bytes"]


def test_the_openapi_document_says_what_clients_are_made_from() -> None:
    """Each method has a name of its own, a bound where the route has one, and no body where none is needed."""
    paths = document()["paths"]
    methods = [method for path in paths.values() for method in path.values()]
    names = [method["operationId"] for method in methods]
    assert len(names) == len(set(names)) == len(OPERATIONS)
    schemas = {
        (each["name"], place): each["schema"]
        for place, path in paths.items()
        for method in path.values()
        for each in method["parameters"]
    }
    assert schemas["limit", CALLS] == {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}
    assert schemas["limit", f"{API}/events"] == {"type": "integer", "minimum": 0, "maximum": 10_000, "default": 1000}
    assert schemas["detail", f"{API}/nodes"]["type"] == "boolean"
    assert schemas["wish", f"{API}/nodes/{{node}}/{{wish}}"]["enum"] == ["cordon", "uncordon", "drain"]
    digest = schemas["digest", f"{API}/models/{{digest}}"]
    assert jsonschema_rs.is_valid(digest, "sha256:0af1")
    assert not jsonschema_rs.is_valid(digest, "0af")
    needed = {
        method["operationId"]: method["requestBody"].get("required", False)
        for method in methods
        if "requestBody" in method
    }
    assert needed["deploy_function"]
    assert not any(needed[name] for name in ("warm_function", "rollback_function", "migrate_instance"))


@pytest.mark.parametrize("path", ["/fn/{name}", "/fn/{name}/{version}", "/v1/completions", "/v1/chat/completions"])
def test_the_openapi_document_says_how_a_call_is_kept(path: str) -> None:
    called = document()["paths"][path]["post"]
    headers = {each["name"] for each in called["parameters"] if each["in"] == "header"}
    assert headers == {"Idempotency-Key", "Prefer", "traceparent", "tracestate"}
    promised = called["responses"]["202"]["content"]["application/json"]["schema"]
    assert promised == {"$ref": "#/components/schemas/PromisedView"}


def test_what_is_answered_is_as_the_openapi_document_says() -> None:
    view = json.loads(views.function(INFO).model_dump_json())
    root = {**document(), "$ref": "#/components/schemas/FunctionView"}
    assert jsonschema_rs.is_valid(root, view)
    assert not jsonschema_rs.is_valid(root, {**view, "active": "one"})


def test_a_function_that_is_being_deleted_is_shown_so() -> None:
    going = msgspec.structs.replace(INFO, record=msgspec.structs.replace(INFO.record, deleting=True))
    assert [views.function(info).deleting for info in (INFO, going)] == [False, True]


async def test_the_openapi_document_names_every_route(nats: Nats) -> None:
    async with world(nats) as w:
        served = (await w.http.get(f"{API}/openapi.json")).json()
        routes = w.gateway._front._router.routes
    assert served == json.loads(json.dumps(document()))
    described = {(operation.method.upper(), operation.path) for operation in OPERATIONS}
    real = {
        (method, route.path)  # type: ignore[attr-defined]
        for route in routes
        for method in route.methods  # type: ignore[attr-defined]
    }
    assert described == {(m, p) for m, p in real if m != "HEAD" or p.endswith("bundles/{digest}")}


@pytest.mark.parametrize("reference", sorted(set(json.dumps(document()).split('"#/components/schemas/')[1:])))
def test_every_schema_that_is_named_is_there(reference: str) -> None:
    name = reference.split('"')[0]
    assert name in document()["components"]["schemas"]


async def test_a_gateway_that_is_ended_before_it_has_begun_leaves_nothing(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No controller has made the streams that it waits for; why it ended is not hidden by how."""
    settings = GatewaySettings.load(nats.env(GATEWAY_2), gateway=GATEWAY_2, port=0)
    bus, begun, opens = await nats.bus(GATEWAY_2), asyncio.Event(), StateStore.open

    async def opened(*args: Any, **options: Any) -> StateStore:
        begun.set()
        return await opens(*args, **options)

    async def run() -> None:
        async with running(bus, settings):
            pytest.fail("it runs without the platform's state")

    monkeypatch.setattr(StateStore, "open", opened)
    starting = asyncio.create_task(run())
    await asyncio.wait_for(begun.wait(), GIVE_UP_S)
    done, _ = await asyncio.wait({starting}, timeout=0.2)  # it asks, and waits for an answer
    assert not done
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_a_call_that_has_ended_waits_for_nothing_whatever_others_wait_for(nats: Nats) -> None:
    async def explain(request: ctl.Explain) -> ctl.Explained:
        return ctl.Explained(function=request.function, version=1, policy="P", decision="d")

    begun = list[Run]()

    async def once(run: Run) -> None:
        begun.append(run)
        if len(begun) == 1:
            run.end()
        else:
            await hang(run)

    async with world(nats) as w:
        await w.controller.serve("explain", ctl.Explain, explain)
        await w.deploy(manifest("full", concurrency=1, max_instances=1), entry("i2", concurrency=1), script=once)
        first = await w.http.post("/fn/full")
        assert first.status_code == 200
        others = [asyncio.create_task(w.http.post("/fn/full", headers=SSE)) for _ in range(2)]

        async def waits() -> bool:
            calls = (await w.http.get("/v1/calls")).json()["calls"]
            return any(each["state"] == "QUEUED" for each in calls)

        await until(waits, what="one of them waits")
        found = (await w.http.get(f"{API}/explain/{first.headers['sllm-call-id']}")).json()
        await end(others)
    assert (found["state"], found["waits"]) == ("SUCCEEDED", "")


async def test_how_a_call_ended_is_told_also_where_its_start_was_over_later(nats: Nats) -> None:
    """And not that it was where that start was."""

    async def explain(request: ctl.Explain) -> ctl.Explained:
        raise FunctionNotFound(request.function)

    async with world(nats) as w:
        await w.controller.serve("explain", ctl.Explain, explain)
        for bus, who, name, kind, message, instance in (
            (w.gateway._bus, "gateway", GATEWAY, "call.cancelled", "the caller went away", None),
            (w.controller.bus, "controller", CONTROLLER, "instance.ready", "in 5 s", "late-1"),
        ):
            told = Happened(
                kind=kind, at=1.0, component=who, function="f", version=1, call="call-of-before", instance=instance,
                message=message,
            )  # fmt: skip
            bus.publish_now(subjects.event(who, name, kind, "f", told.call), told)
            await bus.flush()
        await stored(w.controller.bus, subjects.EVENTS_STREAM, "sllm.events.*.*.*.*.*.call-of-before", 2)
        found = (await w.http.get(f"{API}/explain/call-of-before")).json()
    assert (found["state"], found["error"], found["instance"]) == ("CANCELLED", "the caller went away", None)


@pytest.mark.parametrize(("began", "ended"), [(40.0, 30.0), (90.0, 150.0), (150.0, 120.0)])
def test_no_call_begins_before_it_was_made_or_ends_before_that(began: float, ended: float) -> None:
    """A clock was set back meanwhile, or who took the call over has another one."""
    order = CallOrder(
        call="call-1", gateway="g1", function="fn", version=1, kind="fn", seed=7, parts=0, durable=True, created=100.0
    )
    begun, done = Began(at=began, numerics="", epoch=1), Ended(at=ended, state=CallState.SUCCEEDED)
    view = views.call(Journaled(order=order, began=begun, ended=done))
    assert view.started is not None
    assert view.finished is not None
    assert view.created <= view.started <= view.finished

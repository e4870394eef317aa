"""What happens to calls when messages, nodes or NATS go away."""

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

import httpx
import pytest

from sllm_gateway import link
from sllm_runtime.platform.nats_server import free_port
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.protocol.frames import Beat, Cancel, Frame, FrameKind, Open, Opened, Segment
from sllm_runtime.protocol.http import error_view
from tests.fixtures.nats import NODE_2, Nats
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, ScriptedController, ScriptedNode, entry, hang, manifest, world

SSE = {"accept": "text/event-stream"}


def values(text: str) -> list[object]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ") and line != "data: [DONE]"]


async def numbers(run: Run) -> None:
    """Paced, so that faults fall in the middle."""
    for number in range(run.arguments["n"]):
        run.out(number)
        await asyncio.sleep(0.005)
        await run.room()
    run.end()


async def test_lost_frames_are_asked_for_again(nats: Nats) -> None:
    lost: list[int] = []

    def lose(segment: Segment) -> bool:
        index = segment.frames[0].index
        if index % 7 == 3 and index not in lost:
            lost.append(index)
            return True
        return False

    async with world(nats) as w:
        w.node.lose = lose
        await w.deploy(manifest("numbers"), entry(), script=numbers)
        response = await w.http.post("/fn/numbers", json={"n": 60}, headers=SSE)
        assert values(response.text) == list(range(60))
        assert len(lost) >= 8
        metrics = (await w.http.get("/metrics")).text
        assert "sllm_frames_resend_requests_total 0.0" not in metrics


async def test_nats_killed_and_restarted_in_mid_stream_loses_and_repeats_nothing(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("numbers"), entry(), script=numbers)
        reading = [asyncio.create_task(w.http.post("/fn/numbers", json={"n": 300}, headers=SSE)) for _ in range(5)]
        await until(lambda: len(w.node.runs) == 5 and all(r.outbox.acked > 20 for r in w.node.runs.values()))
        await nats.kill()
        await nats.start()
        for response in await asyncio.gather(*reading):
            assert values(response.text) == list(range(300))
            assert response.text.endswith("data: [DONE]\n\n")
        assert (await w.http.get("/readyz")).status_code == 200


async def test_a_gateway_that_did_not_run_blames_nobody(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOST_AFTER_S", 1.5)
    go_on = asyncio.Event()

    async def begin(run: Run) -> None:
        run.out(1)
        await until(lambda: run.outbox.acked == 1)
        stall()
        await asyncio.wait_for(go_on.wait(), GIVE_UP_S)
        run.out(2)
        run.end()

    def stall() -> None:
        time.sleep(2.0)  # nothing of the gateway runs meanwhile; at its next tick nothing was read yet
        asyncio.get_running_loop().call_later(0.1, go_on.set)

    async with world(nats) as w:
        await w.deploy(manifest("begin"), entry(), script=begin)
        response = await w.http.post("/fn/begin", headers=SSE)
        assert values(response.text) == [1, 2]
        assert response.text.endswith("data: [DONE]\n\n")


async def test_a_silent_node_is_lost(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOST_AFTER_S", 1.5)

    async def begin(run: Run) -> None:
        run.out(1)
        await until(lambda: run.outbox.acked == 1)
        w.node.silent = True

    async with world(nats) as w:
        await w.deploy(manifest("begin"), entry(), script=begin)
        began = time.monotonic()
        response = await w.http.post("/fn/begin", headers=SSE)
        assert time.monotonic() - began > 1.0, "it had its time"
        assert "instance_lost" in response.text
        assert "[DONE]" not in response.text


async def test_no_node_is_silent_while_nats_stands_still(nats: Nats) -> None:
    """Its machine's disk or its link: nothing comes from anybody, and the connection stands."""

    async def works(run: Run) -> None:
        await done.wait()
        run.out("done")
        run.end()

    async with world(nats) as w:
        done = asyncio.Event()
        await w.deploy(manifest("works", streams=False), entry(), script=works)
        call = asyncio.create_task(w.http.post("/fn/works"))
        await until(lambda: bool(w.node.runs))
        assert nats.server.child is not None
        with suspended(nats.server.child.pid):
            await asyncio.sleep(limits.LOST_AFTER_S + 2.0)
        done.set()
        assert (await call).text == '"done"'


async def test_a_node_that_has_left_nats_is_lost_before_its_silence_says_so(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOST_AFTER_S", 1000.0)
    async with world(nats) as w:
        other = ScriptedNode(await nats.bus(NODE_2), NODE_2)
        other.scripts["goes"] = hang
        await other.start()
        try:
            await w.deploy(manifest("goes"), entry("i2", NODE_2))
            await w.deploy(manifest("stays"), entry(), script=hang)
            goes, stays = [asyncio.create_task(w.http.post(f"/fn/{name}", headers=SSE)) for name in ("goes", "stays")]
            for node in (other, w.node):
                await until(lambda: [run.outbox.acked for run in node.runs.values()] == [1])  # noqa: B023 - awaited here
        finally:
            await other.close()
        text = (await goes).text
        assert values(text)[0] == "begun"
        assert f"node {NODE_2} has left; call again" in text
        assert not stays.done()
        stays.cancel()


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("how", ["silent", "gone", "reborn"])
async def test_one_that_may_have_been_taken_is_not_run_again_by_accident(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, retries: int, how: str
) -> None:
    """Its instance has it, and is not heard any more, is no more, or has forgotten it; another one is there."""
    monkeypatch.setattr(link, "OPEN_TRY_S", 0.2)
    opened, asks = ScriptedNode._open, link.Link.open

    async def ask(self: link.Link, node: str, request: Open, *before: Any) -> Opened:
        soon = request.head.instance == "i1" and how == "silent"
        monkeypatch.setattr(limits, "RPC_TIMEOUT_S", 0.4 if soon else GIVE_UP_S)
        return await asks(self, node, request, *before)

    async def unheard(node: ScriptedNode, request: Open) -> Opened:
        if request.head.instance == "i1" and node.runs:
            return Opened(status="gone", note="its next life knows nothing of it")
        answer = await opened(node, request)
        if request.head.instance == "i1":
            node.silent = True
            if how == "gone":
                await node.close()
            await asyncio.Event().wait()
        return answer

    async def works(run: Run) -> None:
        if run.head.instance == "i2":
            run.out(2)
            run.end()

    monkeypatch.setattr(ScriptedNode, "_open", unheard)
    monkeypatch.setattr(link.Link, "open", ask)
    async with world(nats) as w:
        other = ScriptedNode(await nats.bus(NODE_2), NODE_2)
        other.scripts["works"] = works
        await other.start()
        try:
            await w.deploy(
                manifest("works", retries=retries), entry(), entry("i2", NODE_2, concurrency=1), script=works
            )
            response = await w.http.post("/fn/works", json={}, headers=SSE)
        finally:
            await other.close()
        assert ("instance_lost" in response.text) == (retries == 0)
        assert values(response.text) == [2] * retries or retries == 0
        assert len(other.runs) == retries


async def test_a_restarted_node_that_knows_nothing_ends_its_calls_at_once(nats: Nats) -> None:
    async def begin(run: Run) -> None:
        run.out(1)
        await until(lambda: run.outbox.acked == 1)
        w.node.runs.clear()
        w.node.report(boot="b2")

    async with world(nats) as w:
        await w.deploy(manifest("begin"), entry(), script=begin)
        w.node.report(boot="b1")
        response = await w.http.post("/fn/begin", headers=SSE)
        assert "instance_lost" in response.text


async def test_a_worker_that_dies_is_told_at_once_and_the_next_call_works(nats: Nats) -> None:
    async def die(run: Run) -> None:
        run.out(1)
        run.end(InstanceLost("the worker was killed (SIGKILL)"))

    async with world(nats) as w:
        await w.deploy(manifest("die"), entry(), script=die)
        text = (await w.http.post("/fn/die", headers=SSE)).text
        assert json.loads(text.split("data: ")[-1])["error"]["retryable"] is True
        w.node.scripts["die"] = numbers
        assert (await w.http.post("/fn/die", json={"n": 1})).json() == [0]


async def test_a_lost_instance_is_tried_again_where_the_function_allows_it(nats: Nats) -> None:
    async def once(run: Run) -> None:
        if run.head.epoch == 1:
            run.end(InstanceLost("killed"))
        else:
            await numbers(run)

    async with world(nats) as w:
        await w.deploy(manifest("once", retries=1), entry(), entry("i2"), script=once)
        assert (await w.http.post("/fn/once", json={"n": 2})).json() == [0, 1]
        assert [opened.head.instance for opened in w.node.opened] == ["i1", "i2"]


async def test_a_lost_open_is_asked_again_and_runs_once(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("numbers"), entry(), script=numbers)
        await w.node.close()  # nobody listens, then somebody does
        await w.node.bus.flush()  # else what is asked may still come to nobody, and would count as heard
        calling = asyncio.create_task(w.http.post("/fn/numbers", json={"n": 2}))
        await until(lambda: w.gateway.calls.dispatcher.waiting("numbers") == 1)
        w.node._tasks = type(w.node._tasks)("node")
        await w.node.start()
        assert (await calling).json() == [0, 1]
        assert len(w.node.runs) == 1


async def test_frames_of_another_node_or_epoch_are_not_taken(nats: Nats) -> None:
    async def wait(run: Run) -> None:
        forged = Frame(0, FrameKind.OUTPUT, b'"forged"')
        w.node.send(Segment(run.head.call, run.head.epoch + 1, (forged,)))
        await until(lambda: any(cancel.epoch == run.head.epoch + 1 for cancel in w.node.cancels))
        run.out("mine")
        run.end()

    async with world(nats) as w:
        await w.deploy(manifest("wait"), entry(), script=wait)
        assert (await w.http.post("/fn/wait")).json() == ["mine"]


async def test_frames_of_a_call_that_nobody_knows_are_dropped_and_stopped(nats: Nats) -> None:
    async with world(nats) as w:
        w.node.send(Beat("call-of-yesterday", 3, 17))
        await until(lambda: w.node.cancels)
        assert w.node.cancels[0].call == "call-of-yesterday"
        assert isinstance(w.node.cancels[0], Cancel)


async def test_the_daemon_serves_drains_and_ends_with_its_parent(nats: Nats) -> None:
    controller = ScriptedController(await nats.bus("ctl"))
    await controller.start()
    port = free_port()
    token = nats.server.directory / "token"
    token.write_text("secret\n")
    env = {
        **os.environ, **nats.env("gw"), "SLLM_GATEWAY": "gw", "SLLM_PORT": str(port), "SLLM_TOKEN_FILE": str(token),
    }  # fmt: skip
    daemon = await asyncio.create_subprocess_exec(sys.executable, "-m", "sllm_gateway", env=env)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:

            async def answers() -> bool:
                assert daemon.returncode is None, "it has ended, and who answers is another one"
                try:
                    return (await http.get("/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            await until(answers)
            assert (await http.get("/livez")).status_code == 200
            refused = await http.post("/fn/x")
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
            assert refused.headers["www-authenticate"] == "Bearer"
            wrong = await http.get("/v1/models", headers={"authorization": "Bearer wrong"})
            assert wrong.json()["error"]["type"] == "authentication_error"
            right = await http.get("/v1/models", headers={"authorization": "Bearer secret"})
            assert right.json() == {"object": "list", "data": []}
        daemon.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(daemon.wait(), GIVE_UP_S) == 0
    finally:
        if daemon.returncode is None:
            daemon.kill()
            await daemon.wait()
        await controller.close()


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"SLLM_HOST": "0.0.0.0"}, "SLLM_TOKEN_FILE"),
        ({"SLLM_TOKEN_FILE": "/nonexistent"}, "cannot read"),
        ({"SLLM_PORT": "x"}, "SLLM_PORT"),
        ({"SLLM_GATEWAY": "gw.example.com"}, "SLLM_GATEWAY"),
        ({"SLLM_NATS_URL": "nats://127.0.0.1:99999"}, "SLLM_NATS_URL"),
    ],
)
async def test_a_wrong_setting_is_named_at_once(env: dict[str, str], says: str) -> None:
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sllm_gateway",
        env={**os.environ, "SLLM_NATS_URL": "nats://127.0.0.1:1", **env}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await asyncio.wait_for(daemon.communicate(), GIVE_UP_S)
    assert daemon.returncode not in (0, None)
    assert says in err.decode()


def test_the_error_of_every_code_has_the_same_shape() -> None:
    view = error_view(InstanceLost("gone").body(), "call-1")
    assert view == {"error": {"code": "instance_lost", "message": "gone", "retryable": True, "call_id": "call-1"}}


async def test_one_of_which_its_caller_has_read_something_does_not_begin_again(nats: Nats) -> None:
    async with world(nats) as w:

        async def dies(run: Run) -> None:
            run.out(len(w.node.opened))
            await until(lambda: run.outbox.acked)
            run.end(InstanceLost("i1 died"))

        await w.deploy(manifest("dies", retries=1), entry(), entry("i2"), script=dies)
        response = await w.http.post("/fn/dies", json={}, headers=SSE)
        assert "instance_lost" in response.text
        assert len(w.node.opened) == 1

"""The main job against the real platform: deploy functions, call them cold and warm, over HTTP."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sllm.answers import Trace
from sllm_runtime.protocol import timeline
from sllm_runtime.protocol.http import API, CALL_ID, EVENT_STREAM, SERVER_TIMING
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import here, sllm_json
from tests.fixtures.deployed import (
    client_of,
    deploy,
    events,
    gone,
    live,
    view,
    wait,
    wait_cold,
    worker_of,
)
from tests.fixtures.loaderd import numbers_model
from tests.fixtures.waiting import GIVE_UP_S

FUNCTIONS = Path(__file__).parents[2] / "functions"
ASK = {"prompt": "def ", "max_tokens": 12}
WARM = (timeline.QUEUE, timeline.FIRST_TOKEN, timeline.TOKENS)
COLD = (timeline.QUEUE, *timeline.START_STAGES, timeline.FIRST_TOKEN, timeline.TOKENS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("main")) as started:
        deploy(started, str(FUNCTIONS / "coder" / "function.py"), name="coder", keep_alive=3)
        yield started


def ask(cluster: Cluster, name: str = "coder", **arguments: Any) -> tuple[list[Any], Trace]:
    """One streamed call: its values, and what is known of it."""
    trace = Trace()
    with client_of(cluster) as client:
        return list(client.stream(name, arguments or ASK, trace=trace)), trace


def node_of(cluster: Cluster) -> dict[str, Any]:
    """The cluster's only node, as the platform describes it."""
    (node,) = cluster.http.get(f"{API}/nodes").json()["nodes"]
    return dict(node)


def sse(cluster: Cluster, path: str, body: dict[str, Any]) -> str:
    """The bytes of one stream, as text."""
    answer = cluster.http.post(path, json=body, headers={"Accept": EVENT_STREAM})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(EVENT_STREAM)
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers[CALL_ID].startswith("call-")
    return answer.text


def inside(directory: Path) -> int:
    """Calls of ``gated`` that got in."""
    return len(list(directory.glob("in-*")))


def test_cold_and_warm_give_the_same_tokens_and_say_where_the_time_went(cluster: Cluster) -> None:
    wait_cold(cluster, "coder")
    cold, cold_trace = ask(cluster)
    # Another one, which no stall of the machine makes cold between two calls.
    deploy(cluster, str(FUNCTIONS / "coder" / "function.py"), name="stays", keep_alive=300)
    warm, warm_trace = ask(cluster, "stays")
    with client_of(cluster) as client:
        client.request("DELETE", f"{API}/functions/stays")
    assert cold == warm
    assert len(cold) > 3
    assert tuple(span.name for span in cold_trace.timeline) == COLD
    assert tuple(span.name for span in warm_trace.timeline) == WARM
    for trace in (cold_trace, warm_trace):
        assert all(span.ms >= 0 and span.at >= 0 for span in trace.timeline)
        first, tokens = trace.timeline[-2:]
        assert tokens.at == pytest.approx(first.at + first.ms, abs=0.2)
    setup = cold_trace.timeline[COLD.index(timeline.SETUP)]
    first = cold_trace.timeline[-2]
    assert first.at >= setup.at + setup.ms - 0.2, "the first token comes after the start"


def test_cold_and_warm_by_json_is_the_array_of_pieces(cluster: Cluster) -> None:
    pieces, _ = ask(cluster)
    answer = cluster.http.post("/fn/coder", json=ASK)
    assert answer.json() == pieces
    assert answer.headers["content-type"] == "application/json"
    named = re.findall(r"(\w+);dur=([0-9.]+)", answer.headers[SERVER_TIMING])
    assert {name for name, _ in named} >= set(WARM)


def test_stream_is_what_the_contract_says(cluster: Cluster) -> None:
    while "event: progress" in (text := sse(cluster, "/fn/coder", ASK)):
        pass  # that one was cold
    pieces = cluster.http.post("/fn/coder", json=ASK).json()
    expected = "".join(f"id: {number}\ndata: {json.dumps(piece)}\n\n" for number, piece in enumerate(pieces))
    head, _, tail = text.partition(": timeline ")
    assert head == expected
    assert re.fullmatch(r"(\w+=[0-9.]+@[0-9.]+ ?)+\ndata: \[DONE\]\n\n", tail)


def test_waiting_callers_are_told_how_far_the_start_is(cluster: Cluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with ThreadPoolExecutor() as threads, client_of(cluster) as client:
        deploying = threads.submit(deploy, cluster, "versioned", name="slow", env={"NUMBER": "1"}, keep_alive=1)
        deploying.result()
        wait_cold(cluster, "slow")
        deploying = threads.submit(
            deploy, cluster, "versioned", name="slow", env={"NUMBER": "2", "START_GATE": str(gate)}, keep_alive=1
        )
        wait(lambda: len(view(cluster, "slow").versions) == 2, "the second version is being prepared")
        gate.touch()
        deploying.result()
        wait_cold(cluster, "slow")
        gate.unlink()
        events = client.events("POST", "/fn/slow", json={})
        told = next(events)
        assert (told.event, told.id) == ("progress", None)
        assert json.loads(told.data)["stage"]
        gate.touch()
        rest = [event for event in events if event.event != "progress"]
    assert [event.data for event in rest if event.id is not None] == ['"2"', '"2"']
    assert rest[-1].done


def test_to_zero_and_back(cluster: Cluster) -> None:
    tokens, _ = ask(cluster)
    worker = worker_of(cluster, "coder")
    wait_cold(cluster, "coder")
    wait(lambda: gone(worker), "the worker has ended")
    wait(lambda: node_of(cluster)["free_cpu"] == node_of(cluster)["cpu"], "all of the node is free again")
    assert node_of(cluster)["resident"] >= 1, "its weights stay in memory"
    again, trace = ask(cluster)
    assert again == tokens
    assert trace.timeline[1].name == timeline.SANDBOX
    assert worker_of(cluster, "coder") != worker


def test_an_instance_is_kept_for_the_next_call_and_not_longer(cluster: Cluster, tmp_path: Path) -> None:
    keep_alive, gate = 2.5, tmp_path / "gate"
    deploy(cluster, "gated::gated", name="kept", keep_alive=keep_alive)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(ask, cluster, "kept", gate=str(gate))
        wait(lambda: inside(tmp_path) == 1, "it runs")
        worker = worker_of(cluster, "kept")
        began = time.monotonic()
        gate.touch()
        assert call.result()[0][-1] == {"most": 1}
    wait_cold(cluster, "kept")
    assert time.monotonic() - began >= keep_alive
    assert gone(worker) or wait(lambda: gone(worker), "the worker has ended")


def test_least_instances_stay_without_a_caller(cluster: Cluster, tmp_path: Path) -> None:
    deploy(cluster, "gated::gated", name="least", min_instances=1, max_instances=2, concurrency=1, keep_alive=1)
    assert len(live(cluster, "least")) == 1
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(ask, cluster, "least", gate=str(tmp_path / "gate")) for _ in range(2)]
        wait(lambda: inside(tmp_path) == 2, "a second instance took the second call")
        (tmp_path / "gate").touch()
        assert len({call.result()[0][0]["instance"] for call in calls}) == 2
    wait(lambda: len(live(cluster, "least")) == 1, "one instance is left")
    assert len(events(cluster, "least", "instance.ready")) == 2
    assert ask(cluster, "least", gate=str(tmp_path / "gate"))[1].timeline[1].name == timeline.FIRST_TOKEN


def ready(cluster: Cluster, name: str) -> set[str]:
    return {instance.instance for instance in view(cluster, name).instances if instance.state == "READY"}


@pytest.mark.parametrize("what", ["worker", pytest.param("invoker", marks=pytest.mark.slow)])
def test_the_least_instances_come_back_after_what_kills_them(cluster: Cluster, what: str) -> None:
    deploy(cluster, "kinds::awaited", name="stays", min_instances=1)
    before = ready(cluster, "stays")
    if what == "worker":
        os.kill(worker_of(cluster, "stays"), signal.SIGKILL)
    else:
        cluster.kill(what)
    wait(lambda: ready(cluster, "stays") - before, "another one without a call")
    assert not ready(cluster, "stays") & before
    here(cluster.env, "fn", "delete", "stays", "--force")


def test_instances_are_there_before_anybody_calls(cluster: Cluster) -> None:
    deploy(cluster, "kinds::awaited", name="warmed", max_instances=2, concurrency=1, keep_alive=60)
    told = sllm_json(cluster.env, "fn", "warmup", "warmed", "--instances", "2")
    assert (told["wanted"], told["ready"], told["version"]) == (2, 2, 1)
    assert len(ready(cluster, "warmed")) == 2
    assert ask(cluster, "warmed", text="a")[1].timeline[1].name == timeline.FIRST_TOKEN, "no start was waited for"
    many = here(cluster.env, "fn", "warmup", "warmed", "--instances", "3", expect=2)
    assert "max_instances is 2" in many.stderr
    here(cluster.env, "fn", "delete", "warmed", "--force")


# --- kinds of functions ---------------------------------------------------------------------------
POINT = {"point": {"x": 1}, "pair": {"left": "l", "right": "r"}, "numbers": [1, 2]}
PLAIN = {"sum": 1.5, "pair": POINT["pair"], "point": {"x": 1, "y": 0.5}, "numbers": [1, 2], "flag": False}
PAIRS = [{"left": "0", "right": "r"}, {"left": "1", "right": "r"}]
KINDS: list[tuple[str, dict[str, Any], Any, list[Any]]] = [
    ("plain", POINT, PLAIN, [PLAIN]),
    ("awaited", {"text": "ä"}, "Ä", ["Ä"]),
    ("yields", {"count": 2}, PAIRS, PAIRS),
    ("yields_async", {"count": 3}, [0, 1, 2], [0, 1, 2]),
    ("returns_iterator", {"count": 2}, [0, 1], [0, 1]),
    ("anything", {"a": 1, "c": {"d": [None]}}, [1, 2, {"c": {"d": [None]}}], [[1, 2, {"c": {"d": [None]}}]]),
    ("AsyncCounter", {}, [10, 11], [10, 11]),
]


@pytest.mark.parametrize(("kind", "arguments", "whole", "streamed"), KINDS, ids=[kind for kind, *_ in KINDS])
def test_kinds(cluster: Cluster, kind: str, arguments: dict[str, Any], whole: Any, streamed: list[Any]) -> None:
    name = deploy(cluster, f"kinds::{kind}", name=kind.lower().replace("_", "-"), keep_alive=10).function.name
    assert cluster.http.post(f"/fn/{name}", json=arguments).json() == whole
    assert [json.loads(line[6:]) for line in sse(cluster, f"/fn/{name}", arguments).splitlines()
            if line.startswith("data: ") and line != "data: [DONE]"] == streamed  # fmt: skip


def test_a_class_is_set_up_once_for_all_calls_of_its_instance(cluster: Cluster) -> None:
    deploy(cluster, "kinds::Counter", name="counter", keep_alive=30)
    assert [cluster.http.post("/fn/counter", json={"step": step}).json() for step in (1, 2, 3)] == [1, 3, 6]
    assert cluster.http.post("/fn/counter").json() == 7, "no body is no argument"


def test_a_module_of_the_users_own_gets_the_checkpoints_weights(cluster: Cluster, tmp_path: Path) -> None:
    import torch

    arrays = numbers_model(tmp_path / "model", rows=64)
    deploy(cluster, "built", name="built", model=str(tmp_path / "model"), keep_alive=1)
    ids = [0, 5, 32]
    answer = cluster.http.post("/fn/built", json={"ids": ids}).json()
    weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
    hidden = weights["embed.weight"][ids]
    for number in range(4):
        hidden = torch.tanh(hidden @ weights[f"layers.{number}.weight"].T)
    expected = hidden @ weights["head.weight"].T * torch.arange(7)
    assert torch.allclose(torch.tensor(answer), expected, rtol=1e-4, atol=1e-5)


SCRIPT = """
import asyncio, json
from sllm import Function, model_function

FACTOR = 3

@model_function(memory="256MiB", keep_alive=1)
def tripled(count: int):
    for number in range(count):
        yield number * FACTOR

async def later(function):
    return [value async for value in function.aio.stream(count=2)]

tripled.deploy()
found = Function.lookup("tripled")
print(json.dumps([list(tripled.stream(3)), found.remote(count=2), asyncio.run(later(found)), list(tripled(2))]))
"""


def test_a_function_that_no_file_can_be_imported_for_is_pickled(cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=SCRIPT, env=cluster.env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0, 3, 6], [0, 3], [0, 3], [0, 3]]
    manifest = view(cluster, "tripled").manifest
    assert manifest is not None
    assert manifest.handler.python == f"{sys.version_info.major}.{sys.version_info.minor}"


# --- how many at once -----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gated", "gated_async"])
def test_as_many_calls_at_once_as_it_says_and_never_more(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    name = deploy(cluster, f"gated::{kind}", name=kind.replace("_", "-"), concurrency=3, keep_alive=1).function.name
    gate = tmp_path / "gate"
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(ask, cluster, name, gate=str(gate)) for _ in range(7)]
        wait(lambda: inside(tmp_path) == 3, "three calls run")
        gate.touch()
        values = [call.result()[0] for call in calls]
    assert max(last["most"] for _, last in values) == 3
    assert len({first["instance"] for first, _ in values}) == 1
    on_main = {first["main"] for first, _ in values}
    assert on_main == {kind == "gated_async"}, "async on the one loop, sync in threads"
    threads_of = {first["thread"] for first, _ in values}
    assert len(threads_of) == 1 if kind == "gated_async" else len(threads_of) >= 3, "a thread for each call"


def test_one_start_however_many_wait(cluster: Cluster, tmp_path: Path) -> None:
    deploy(cluster, "gated::gated_async", name="crowd", concurrency=20, max_instances=4, keep_alive=1)
    wait_cold(cluster, "crowd")
    before = len(events(cluster, "crowd", "instance.starting"))
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(20) as threads:
        calls = [threads.submit(ask, cluster, "crowd", gate=str(gate)) for _ in range(20)]
        wait(lambda: inside(tmp_path) == 20, "twenty calls run")
        gate.touch()
        assert len({call.result()[0][0]["instance"] for call in calls}) == 1
    assert len(events(cluster, "crowd", "instance.starting")) == before + 1


def test_more_callers_get_more_instances_up_to_the_most(cluster: Cluster, tmp_path: Path) -> None:
    deploy(cluster, "gated::gated", name="wide", concurrency=1, max_instances=3, keep_alive=1)
    gate = tmp_path / "gate"
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(ask, cluster, "wide", gate=str(gate)) for _ in range(6)]
        wait(lambda: inside(tmp_path) == 3, "three calls run")
        assert len(live(cluster, "wide")) == 3
        gate.touch()
        values = [call.result()[0] for call in calls]
    assert len({first["instance"] for first, _ in values}) == 3
    assert {last["most"] for _, last in values} == {1}
    wait_cold(cluster, "wide")


def test_who_waits_for_room_is_told_why_and_is_served_when_there_is_some(cluster: Cluster, tmp_path: Path) -> None:
    """Of two that do not fit beside each other: what runs cannot go on elsewhere, and nothing idle would do."""
    memory = node_of(cluster)["memory"] * 3 // 5
    for name in ("takes", "waits"):
        deploy(cluster, "gated::gated", name=name, memory=memory, keep_alive=300)
    gate = tmp_path / "gate"
    with ThreadPoolExecutor() as threads, client_of(cluster) as client:
        first = threads.submit(ask, cluster, "takes", gate=str(gate))
        wait(lambda: inside(tmp_path) == 1, "the first one has all the room")
        events = client.events("POST", "/fn/waits", json={"gate": str(gate)})
        told = next(event for event in events if "capacity is in use" in event.data)
        assert (told.event, told.id, json.loads(told.data)["stage"]) == ("progress", None, "capacity")
        assert " of memory (has " in told.data
        assert live(cluster, "waits") == []
        gate.touch()
        rest = [event for event in events if event.comment is None and event.event != "progress"]
        assert first.result()[0][-1] == {"most": 1}
    assert [event.id for event in rest if not event.done] == ["0", "1"]
    assert rest[-1].done
    for name in ("takes", "waits"):
        here(cluster.env, "fn", "delete", name, "--force")


def test_who_is_more_urgent_has_room_before_who_waits_already(cluster: Cluster, tmp_path: Path) -> None:
    memory = node_of(cluster)["memory"] * 3 // 5
    gates = {name: tmp_path / name / "gate" for name in ("holds", "patient", "urgent")}
    for name, gate in gates.items():
        gate.parent.mkdir()
        deploy(cluster, "gated::gated", name=name, memory=memory, keep_alive=300, priority=5 * (name == "urgent"))

    def waits(name: str) -> bool:
        return f'sllm_queue_depth{{function="{name}"}} 1.0' in cluster.http.get("/metrics").text

    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(ask, cluster, "holds", gate=str(gates["holds"]))]
        wait(lambda: inside(gates["holds"].parent) == 1, "it has all the room")
        calls.append(threads.submit(ask, cluster, "patient", gate=str(gates["patient"])))
        wait(lambda: waits("patient"), "the patient one waits")
        calls.append(threads.submit(ask, cluster, "urgent", gate=str(gates["urgent"])))
        wait(lambda: waits("urgent"), "the urgent one waits as well")
        gates["holds"].touch()
        wait(lambda: inside(gates["urgent"].parent) == 1, "the urgent one has it")
        assert inside(gates["patient"].parent) == 0
        for gate in gates.values():
            gate.touch()
        assert [call.result()[0][-1] for call in calls] == [{"most": 1}] * 3
    for name in gates:
        here(cluster.env, "fn", "delete", name, "--force")


def test_what_fits_has_a_node_kept_where_others_would_leave_no_room_for_ever(cluster: Cluster, tmp_path: Path) -> None:
    """``busy`` is never without a call: the next one is in before one ends. When ``late`` has waited for as long as one
    of them may last, ``busy`` takes no more."""
    memory = node_of(cluster)["memory"] * 3 // 5
    options: dict[str, Any] = {"memory": memory, "concurrency": 2, "keep_alive": 300}
    deploy(cluster, "gated::gated", name="busy", timeout=6, **options)
    deploy(cluster, "gated::gated", name="late", **options)
    calls: list[Future[tuple[list[Any], Trace]]] = []
    gates: list[Path] = []

    def begin(threads: ThreadPoolExecutor, name: str) -> Path:
        gate = tmp_path / str(len(gates)) / "gate"
        gate.parent.mkdir()
        gates.append(gate)
        calls.append(threads.submit(ask, cluster, name, gate=str(gate)))
        return gate

    made_room = len(events(cluster, "busy", "instance.draining"))  # for the trial of ``late``

    def draining() -> list[str]:
        return [event["message"] for event in events(cluster, "busy", "instance.draining")[made_room:]]

    def open_all() -> None:
        for each in gates:
            each.touch()

    def begun(at: Path) -> bool:
        return inside(at.parent) == 1 or bool(draining())

    with ThreadPoolExecutor(4) as threads, contextlib.ExitStack() as opened:
        gate = begin(threads, "busy")
        opened.callback(open_all)
        wait(lambda: inside(gate.parent) == 1, "a call has all the room")
        late, until = begin(threads, "late"), time.monotonic() + GIVE_UP_S
        while not draining():
            assert time.monotonic() < until, "it waits for ever"
            before, gate = gate, begin(threads, "busy")
            wait(functools.partial(begun, gate), "the next one is in, or there is none any more")
            before.touch()
        gate.touch()
        wait(lambda: inside(late.parent) == 1, "it has its place")
    assert [call.result()[0][-1].keys() for call in calls] == [{"most"}] * len(calls)
    assert len(calls) > 3
    assert "makes room for late, which has waited for " in draining()[0]
    for name in ("busy", "late"):
        here(cluster.env, "fn", "delete", name, "--force")

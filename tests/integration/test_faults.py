"""Processes that die, stop or hang while calls run: a clear end in time or no trace at all, and the next call works."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sllm_runtime.protocol.limits import LOST_AFTER_S
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import (
    commands,
    deploy,
    descendants,
    gone,
    live,
    sleepers,
    wait,
    wait_cold,
    worker_of,
    workers,
)
from tests.fixtures.streams import Stream
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import GIVE_UP_S

pytestmark = pytest.mark.chaos
PROMPT: dict[str, Any] = {"prompt": "def ", "max_tokens": 150, "at": 120}


@pytest.fixture(scope="module")
def cluster(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform")) as running:
        deploy(running, "slow_stream", concurrency=8, keep_alive=300)
        deploy(running, "gated_coder::fn", name="coder", model=str(coder / "model"), keep_alive=300)
        yield running


@pytest.fixture
def ready(cluster: Cluster) -> Cluster:
    """The platform serves, and both functions have an instance."""
    wait(lambda: works(cluster, "slow-stream", {"count": 1}), "slow-stream answers")
    wait(lambda: works(cluster, "coder", {"gate": "", "max_tokens": 1}), "coder answers")
    return cluster


def works(cluster: Cluster, name: str, arguments: dict[str, Any]) -> bool:
    return cluster.http.post(f"/fn/{name}", json=arguments).status_code == 200


def read(cluster: Cluster, name: str, arguments: dict[str, Any]) -> tuple[list[Any], Stream]:
    """A whole stream: its values, and how it ended."""
    with Stream(cluster, name, arguments) as stream:
        return list(stream.values()), stream


@pytest.fixture(scope="module")
def text(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The pieces that ``coder`` gives for PROMPT when nothing goes wrong."""
    gate = tmp_path_factory.mktemp("open") / "gate"
    gate.touch()
    values, stream = read(cluster, "coder", {**PROMPT, "gate": str(gate)})
    assert stream.done
    assert len(values) > PROMPT["at"]
    return values


def broken_by(cluster: Cluster, name: str, fault: Callable[[], object]) -> tuple[list[Any], dict[str, Any], float]:
    """``fault`` in the middle of a stream: the values that came, the error event, the seconds from fault to error.

    How soon an error comes tells what noticed the fault; so does its message, however slow the machine is."""
    with Stream(cluster, name) as stream:
        values = stream.values()
        head = [next(values) for _ in range(10)]
        fault()
        struck = time.monotonic()
        head += values
        assert stream.status == 200
        assert stream.error is not None
        assert not stream.done
        return head, stream.error, stream.ended - struck


# --- workers --------------------------------------------------------------------------------------
def test_a_worker_killed_in_mid_stream(ready: Cluster) -> None:
    """The caller is told of its death, not of a silence; the next call works."""
    old = worker_of(ready, "slow-stream")
    values, error, _ = broken_by(ready, "slow-stream", lambda: os.kill(old, signal.SIGKILL))
    assert values == list(range(len(values)))
    assert error["code"] == "instance_lost"
    assert error["retryable"]
    assert "died while it worked on this call" in error["message"]
    again, stream = read(ready, "slow-stream", {"count": 3, "pause": 0})
    assert again == [0, 1, 2]
    assert stream.done
    assert worker_of(ready, "slow-stream") != old


def test_a_worker_killed_in_an_openai_stream(ready: Cluster, coder: Path) -> None:
    """There the error is a plain ``data`` of OpenAI's shape, and no ``[DONE]`` follows it. (A call that may go on
    elsewhere does: ``test_resume``.)"""
    deploy(ready, str(coder / "function.py"), name="opted-out", resumable=False)
    victim, lines = worker_of(ready, "opted-out"), list[str]()
    body = {"model": "opted-out", "prompt": "def ", "max_tokens": 1000, "stream": True}
    with ready.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            lines.append(line.removeprefix("data: "))
            if len(lines) == 5:
                os.kill(victim, signal.SIGKILL)
    assert "[DONE]" not in lines
    assert all("error" not in json.loads(line) for line in lines[:-1])
    assert json.loads(lines[-1])["error"]["code"] == "instance_lost"


def test_every_call_of_a_killed_worker_is_told(ready: Cluster) -> None:
    """Four streams and one call that is not streamed, all on one instance."""
    with ThreadPoolExecutor(5) as pool:
        streams = [pool.submit(read, ready, "slow-stream", {"count": 10_000}) for _ in range(4)]
        plain = pool.submit(ready.http.post, "/fn/slow-stream", json={"count": 10_000})
        wait(lambda: in_hand(ready) == 5, "five calls run")
        os.kill(worker_of(ready, "slow-stream"), signal.SIGKILL)
        for future in streams:
            values, stream = future.result(GIVE_UP_S)
            assert values == list(range(len(values)))
            assert stream.error is not None
            assert stream.error["code"] == "instance_lost"
        answer = plain.result(GIVE_UP_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "instance_lost")


def in_hand(cluster: Cluster) -> int:
    """Calls between acceptance and end, as its gateway counts them."""
    (line,) = [line for line in cluster.http.get("/metrics").text.splitlines() if line.startswith("sllm_calls_open ")]
    return int(float(line.split()[1]))


def test_a_function_that_kills_its_process(ready: Cluster) -> None:
    deploy(ready, "dies_midstream")
    values, stream = read(ready, "dies-midstream", {"count": 3})
    assert values == list(range(len(values)))  # what it had yielded just before may die with it
    assert stream.error is not None
    assert stream.error["code"] == "instance_lost"
    assert "signal 9" in stream.error["message"] or "SIGKILL" in stream.error["message"]
    answer = ready.http.post("/fn/dies-midstream", json={"count": 0})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "instance_lost")


def test_a_worker_that_is_stopped_is_killed(ready: Cluster) -> None:
    """SIGSTOP: no heartbeat. After some five seconds it is killed, and its caller is told."""
    old = worker_of(ready, "slow-stream")
    values, error, _ = broken_by(ready, "slow-stream", lambda: os.kill(old, signal.SIGSTOP))
    assert values == list(range(len(values)))
    assert error["code"] == "instance_lost"
    assert f"gave no sign of life for {LOST_AFTER_S:g} s and was killed" in error["message"]
    wait(lambda: gone(old), "the stopped worker is gone")
    assert works(ready, "slow-stream", {"count": 1})


def test_a_function_deaf_to_cancel_is_killed(ready: Cluster, tmp_path: Path) -> None:
    """One that blocks a thread, and one that blocks its loop, side by side: a function has five seconds to hear it.

    A cancel that comes before it blocks ends it at its yield: the caller leaves when it does block."""
    names, old, cancelled, ended = ("blocks-forever", "blocks-loop"), dict[str, int](), dict[str, float](), {}
    for name in names:
        deploy(ready, name.replace("-", "_"))
        old[name] = worker_of(ready, name)
    for name in names:
        mark = tmp_path / name
        with Stream(ready, name, {"mark": str(mark)}) as stream:
            assert next(stream.values()) == "before"
            wait(mark.exists, f"{name} blocks")
        cancelled[name] = time.monotonic()

    def both_gone() -> bool:
        for name in names:
            if name not in ended and gone(old[name]):
                ended[name] = time.monotonic()
        return len(ended) == len(names)

    wait(both_gone, lambda: f"{old} are gone, only {ended} is\n{ready.logs()}")
    for name in names:
        assert ended[name] - cancelled[name] > LOST_AFTER_S - 1.5
        with Stream(ready, name) as stream:
            assert next(stream.values()) == "before"


def test_a_function_that_catches_everything_is_cancelled_all_the_same(ready: Cluster, coder: Path) -> None:
    """``except Exception`` around ``generate`` stops no cancel: the slot is free again, and the worker lives on."""
    deploy(ready, "swallows_cancel", model=str(coder / "model"), concurrency=1)
    old = worker_of(ready, "swallows-cancel")
    for _ in range(2):
        with Stream(ready, "swallows-cancel") as stream:
            assert isinstance(next(stream.values()), str)
    assert worker_of(ready, "swallows-cancel") == old


def test_out_of_memory_in_a_call(ready: Cluster) -> None:
    deploy(ready, "oom_in_call")
    answer = ready.http.post("/fn/oom-in-call", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "function_error")
    assert "MemoryError" in answer.json()["error"]["message"]
    assert works(ready, "oom-in-call", {"gib": 0})


# --- what functions start -------------------------------------------------------------------------
def test_processes_of_a_function_end_with_its_instance(ready: Cluster) -> None:
    """A child left running, and one that detached itself by two forks and two sessions."""
    deploy(ready, "spawns_child", keep_alive=0)
    deploy(ready, "forks_daemon", keep_alive=0)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(works, ready, "forks-daemon", {})]
        calls += [pool.submit(works, ready, "spawns-child", {"seconds": 36_001})]
        assert all(call.result(GIVE_UP_S) for call in calls)
    wait_cold(ready, "spawns-child")
    wait_cold(ready, "forks-daemon")
    wait(lambda: not sleepers(36_001), "the child is gone")
    wait(lambda: not workers("forks-daemon"), "the detached process is gone")


# --- daemons --------------------------------------------------------------------------------------
def streams_through(cluster: Cluster, text: list[str], gate: Path, fault: Callable[[], object]) -> None:
    """Six paced streams and two of the engine, begun before ``fault`` and read to their right end: none can end
    before ``gate`` is there."""
    with ThreadPoolExecutor(8) as pool:
        futures: list[tuple[Future[tuple[list[Any], Stream]], list[Any]]] = []
        paced = {"count": 100, "pause": 0.02, "gate": str(gate), "at": 90}
        for _ in range(6):
            futures.append((pool.submit(read, cluster, "slow-stream", paced), list(range(100))))
        for _ in range(2):
            futures.append((pool.submit(read, cluster, "coder", {**PROMPT, "gate": str(gate)}), text))
        wait(lambda: in_hand(cluster) == 8, "eight calls run")
        fault()
        gate.touch()
        for future, right in futures:
            values, stream = future.result(GIVE_UP_S)
            assert stream.error is None
            assert values == right
            assert stream.done
            assert stream.ids == list(range(len(right)))


def test_nats_killed_in_mid_stream(ready: Cluster, text: list[str], tmp_path: Path) -> None:
    """No token is lost or repeated, and none of the streams ends early."""
    old: list[int] = []
    streams_through(ready, text, tmp_path / "gate", lambda: old.append(ready.kill("nats")))
    ready.wait_restarted("nats", old[0])
    wait(lambda: works(ready, "slow-stream", {"count": 1}), "calls work again")
    deploy(ready, "kinds::awaited", name="after-nats")
    assert ready.http.post("/fn/after-nats", json={"text": "a"}).json() == "A"


def test_nats_killed_while_calls_wait_and_begin(ready: Cluster) -> None:
    """Calls that come while it is away are answered when it is there again, each once."""
    old = ready.kill("nats")
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(read, ready, "slow-stream", {"count": 5, "pause": 0.01}) for _ in range(4)]
        for answer in answers:
            values, stream = answer.result(GIVE_UP_S)
            assert stream.error is None
            assert values == list(range(5))
    ready.wait_restarted("nats", old)


def test_controller_killed_in_mid_stream(ready: Cluster, text: list[str], tmp_path: Path) -> None:
    """Streams and warm functions do not notice; a cold function starts once it is back."""
    deploy(ready, "kinds::awaited", name="cold", keep_alive=0)
    wait_cold(ready, "cold")
    old: list[int] = []

    def fault() -> None:
        old.append(ready.kill("controller"))
        assert works(ready, "slow-stream", {"count": 1, "pause": 0}), "a warm function needs no controller"

    streams_through(ready, text, tmp_path / "gate", fault)
    ready.wait_restarted("controller", old[0])
    assert ready.http.post("/fn/cold", json={"text": "a"}).json() == "A"
    assert len(live(ready, "slow-stream")) == 1, "the new controller knows the instance of the old one"


def test_loaderd_killed_in_mid_stream(ready: Cluster, text: list[str], tmp_path: Path) -> None:
    """Running instances keep their weights; the next start waits for it to be back."""
    old, gate = list[int](), tmp_path / "gate"
    streams_through(ready, text, gate, lambda: old.append(ready.kill("loaderd")))
    ready.wait_restarted("loaderd", old[0])
    os.kill(worker_of(ready, "coder"), signal.SIGKILL)
    wait(lambda: works(ready, "coder", {"gate": "", "max_tokens": 1}), "a new instance has loaded its weights")
    assert read(ready, "coder", {**PROMPT, "gate": str(gate)})[0] == text


def test_invoker_killed_in_mid_stream(ready: Cluster) -> None:
    """Its workers die with it. Callers are told, the next call works, and nobody is left over."""
    family = descendants(ready.pid("invoker"))
    assert worker_of(ready, "slow-stream") in family
    old: list[int] = []
    values, error, _ = broken_by(ready, "slow-stream", lambda: old.append(ready.kill("invoker")))
    assert values == list(range(len(values)))
    assert error["code"] == "instance_lost"
    wait(lambda: all(gone(pid) for pid in family), "its fork server and workers are gone")
    ready.wait_restarted("invoker", old[0])
    wait(lambda: works(ready, "slow-stream", {"count": 1}), "calls work again")


def test_fork_server_killed_in_mid_stream(ready: Cluster) -> None:
    """Its workers die with it, the node stays: the next start waits for a new one."""
    below, titles = descendants(ready.pid("invoker")), commands()
    servers = [pid for pid in below & titles.keys() if titles[pid][0].startswith("sllm-zygote")]
    assert servers

    def fault() -> None:
        for pid in servers:
            os.kill(pid, signal.SIGKILL)

    values, error, _ = broken_by(ready, "slow-stream", fault)
    assert values == list(range(len(values)))
    assert error["code"] == "instance_lost"
    assert "silent" not in error["message"]
    assert "no sign of life" not in error["message"]
    wait(lambda: works(ready, "slow-stream", {"count": 1}), "calls work again")


def test_gateway_killed_in_mid_stream(ready: Cluster, tmp_path: Path) -> None:
    """Its callers' connections break, without a false end. The node cancels what ran for it."""
    mark = tmp_path / "closed"
    with Stream(ready, "slow-stream", {"count": 100_000, "mark": str(mark)}) as stream:
        values = stream.values()
        assert next(values) == 0
        old = ready.kill("gateway")
        list(values)
        assert stream.broken
        assert not stream.done
    wait(mark.exists, "the node cancels the call")
    ready.wait_restarted("gateway", old)
    wait(lambda: works(ready, "slow-stream", {"count": 1}), "calls work again")


def test_a_gateway_that_hangs_holds_no_slot_for_ever(ready: Cluster, tmp_path: Path) -> None:
    """It acknowledges nothing: after five seconds the node cancels what runs for it. Woken, it serves again."""
    mark = tmp_path / "closed"
    pid = ready.pid("gateway")
    with Stream(ready, "slow-stream", {"count": 100_000, "mark": str(mark)}) as stream:
        values = stream.values()
        assert next(values) == 0
        with suspended(pid):
            wait(mark.exists, "the node cancels the call")
        seen = [0, *values]
        assert seen == list(range(len(seen)))
        assert stream.error is not None
        assert not stream.done
    assert works(ready, "slow-stream", {"count": 1})


@pytest.mark.parametrize("component", ["nats", "invoker"])
def test_a_pause_is_no_loss(ready: Cluster, text: list[str], tmp_path: Path, component: str) -> None:
    """A process that stands still for two seconds costs those seconds and nothing else."""
    pid = ready.pid(component)

    def fault() -> None:
        with suspended(pid):
            time.sleep(2.0)  # the fault itself, not a wait for something

    streams_through(ready, text, tmp_path / "gate", fault)
    assert ready.pid(component) == pid


def test_nats_that_stands_still_for_longer_than_silence_counts_costs_no_call(ready: Cluster) -> None:
    """A machine that sleeps for a moment, a disk that hangs: nobody hears anybody, and every connection stands."""
    worker = worker_of(ready, "slow-stream")
    with Stream(ready, "slow-stream", {"count": 300, "pause": 0.05}) as stream:
        values = stream.values()
        head = [next(values) for _ in range(10)]
        with suspended(ready.pid("nats")):
            time.sleep(LOST_AFTER_S + 2.0)
        head += values
        assert stream.error is None
        assert stream.done
        assert head == list(range(300))
    assert worker_of(ready, "slow-stream") == worker


def test_after_all_this_everything_is_given_back(ready: Cluster) -> None:
    """Without functions the node has all that it had, and no worker but warm ones."""
    for function in ready.http.get("/api/v1/functions").json()["functions"]:
        answer = ready.http.delete(f"/api/v1/functions/{function['name']}", params={"force": "true"})
        assert answer.status_code == 200, answer.text

    def idle() -> bool:
        (node,) = ready.http.get("/api/v1/nodes").json()["nodes"]
        return (node["free_cpu"], node["free_memory"]) == (node["cpu"], node["memory"]) and node["pool_idle"] > 0

    wait(idle, "all memory and processors are free")
    wait(lambda: set(workers().values()) == {"(warm)"}, "no worker is left but warm ones")


def test_nothing_survives_a_kill_9_of_up(tmp_path: Path) -> None:
    """Neither daemons nor workers, nor what functions have started and hidden."""
    cluster = Cluster(tmp_path).start()
    assert cluster.process is not None
    try:
        deploy(cluster, "spawns_child")
        deploy(cluster, "forks_daemon")
        assert works(cluster, "spawns-child", {"seconds": 36_002})
        assert works(cluster, "forks-daemon", {})
        family = descendants(cluster.process.pid)
        assert set(sleepers(36_002)) < family
        assert len(family & set(workers("forks-daemon"))) == 2, "the worker and what it detached"
        cluster.process.kill()
        cluster.process.wait(GIVE_UP_S)
        wait(lambda: all(gone(pid) for pid in family), "everything is gone")
    finally:
        cluster.stop()
    with Cluster(tmp_path) as again:  # what was deployed is there, and works
        assert works(again, "spawns-child", {"seconds": 1})

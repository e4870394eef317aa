"""Workers, nodes and their daemons die under calls of the engine: the same answer comes all the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import deploy, view, wait, worker_of
from tests.fixtures.streams import Stream
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import GIVE_UP_S

pytestmark = pytest.mark.chaos
ASK = {"prompt": "class Parser", "max_tokens": 200, "temperature": 0.8, "seed": 7}
OPENAI = {"model": "coder", "prompt": "def ", "max_tokens": 200, "temperature": 0.7, "seed": 3}


@pytest.fixture(scope="module")
def cluster(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform")) as running:
        deploy(running, str(coder / "function.py"), name="coder", keep_alive=300)
        yield running


@pytest.fixture(scope="module")
def text(cluster: Cluster) -> list[str]:
    """The pieces that ASK gives when nothing goes wrong."""
    with Stream(cluster, "coder", ASK) as stream:
        pieces = list(stream.values())
    assert len(pieces) > 100
    return pieces


def read_with(
    cluster: Cluster, faults: dict[int, Callable[[], object]], ask: dict[str, Any] = ASK, name: str = "coder"
) -> tuple[list[str], Stream]:
    """What ``ask`` gives, each fault striking when so many pieces are here."""
    pieces: list[str] = []
    with Stream(cluster, name, ask) as stream:
        for piece in stream.values():
            pieces.append(piece)
            if len(pieces) in faults:
                faults[len(pieces)]()
    return pieces, stream


def kill_worker(cluster: Cluster) -> None:
    """The one that works on it."""
    os.kill(worker_of(cluster, "coder"), signal.SIGKILL)


def test_a_worker_killed_in_mid_stream(cluster: Cluster, text: list[str]) -> None:
    """No piece is lost, repeated or different, nor is its number."""
    pieces, stream = read_with(cluster, {20: lambda: kill_worker(cluster)})
    assert pieces == text
    assert stream.error is None
    assert stream.done
    assert stream.ids == list(range(len(text)))


def test_one_after_the_other(cluster: Cluster, text: list[str]) -> None:
    """Of a call so long that it has not ended while its reader waits for who took it over: an idle worker that dies is
    followed by none."""
    ask = {**ASK, "max_tokens": 1500}
    pieces, stream = read_with(cluster, {at: lambda: kill_worker(cluster) for at in (5, 60, 120)}, ask)
    assert stream.done
    assert len(pieces) > 1000
    assert pieces[: len(text)] == text
    with Stream(cluster, "coder", ask) as undisturbed:
        assert list(undisturbed.values()) == pieces


def test_a_worker_that_stops_is_replaced(cluster: Cluster, text: list[str]) -> None:
    """SIGSTOP: its node kills it after five seconds, and the stream goes on."""
    pieces, stream = read_with(cluster, {30: lambda: os.kill(worker_of(cluster, "coder"), signal.SIGSTOP)})
    assert pieces == text
    assert stream.done


# test_faults.py has loaderd, under a stream that needs no resumption either.
@pytest.mark.parametrize("component", ["invoker", pytest.param("loaderd", marks=pytest.mark.slow)])
def test_a_daemon_killed_in_mid_stream(cluster: Cluster, text: list[str], component: str) -> None:
    old: list[int] = []
    pieces, stream = read_with(cluster, {20: lambda: old.append(cluster.kill(component))})
    assert pieces == text
    assert stream.done
    cluster.wait_restarted(component, old[0])


def test_a_node_that_is_gone_for_good(text: list[str], coder: Path, tmp_path: Path) -> None:
    """All of it dies, and nobody starts it again: its call goes on at the other one."""
    with Cluster(tmp_path, nodes=2) as two:
        assert two.process is not None
        supervisor = two.process.pid
        deploy(two, str(coder / "function.py"), name="coder", keep_alive=300)
        (instance,) = view(two, "coder").instances
        with ExitStack() as stack:

            def gone() -> None:
                stack.enter_context(suspended(supervisor))
                for daemon in ("invoker", "loaderd"):
                    two.kill(f"{daemon}-{instance.node}")

            pieces, stream = read_with(two, {20: gone})
            assert pieces == text
            assert stream.done
            (there,) = {each.node for each in view(two, "coder").instances if each.state == "READY"}
            assert there != instance.node


def test_worker_and_controller_at_once(cluster: Cluster, text: list[str]) -> None:
    """The new controller starts the instance that the stream waits for."""
    old: list[int] = []

    def both() -> None:
        old.append(cluster.kill("controller"))
        os.kill(victim, signal.SIGKILL)

    victim = worker_of(cluster, "coder")
    pieces, stream = read_with(cluster, {40: both})
    assert pieces == text
    assert stream.done
    cluster.wait_restarted("controller", old[0])


def completion(cluster: Cluster, **more: Any) -> dict[str, Any]:
    answer = cluster.http.post("/v1/completions", json={**OPENAI, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(cluster: Cluster, kill_at: int = -1, **more: Any) -> tuple[str, dict[str, Any]]:
    """The text of a completion, and its last chunk with the usage."""
    chunks: list[dict[str, Any]] = []
    body = {**OPENAI, "stream": True, "stream_options": {"include_usage": True}, **more}
    with cluster.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
        for line in lines:
            if line == "[DONE]":
                break
            chunks.append(json.loads(line))
            if len(chunks) == kill_at:
                kill_worker(cluster)
        else:
            pytest.fail(f"no [DONE] after {chunks[-1:]}")
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]), chunks[-1]


def test_openai_routes_go_on_too(cluster: Cluster) -> None:
    """Text, finish and usage are those of a call that nothing happened to."""
    right = completion(cluster)
    text, last = streamed(cluster, kill_at=25)
    assert text == right["choices"][0]["text"]
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][field] == right["usage"][field]


def test_all_calls_of_an_instance_go_on(cluster: Cluster, coder: Path, text: list[str], tmp_path: Path) -> None:
    """Six streams, which cannot end before they may, and one that is not streamed, with a penalty over what it said
    before."""
    deploy(cluster, "gated_coder::fn", name="gated", model=str(coder / "model"), keep_alive=300)
    gate = tmp_path / "gate"
    ask = {**ASK, "gate": str(gate), "at": 100}
    penalised = {"max_tokens": 600, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 2, "model": "gated"}
    right = completion(cluster, **penalised)
    with ThreadPoolExecutor(7) as pool:
        streams = [pool.submit(read_with, cluster, {}, ask, "gated") for _ in range(6)]
        whole = pool.submit(completion, cluster, **penalised)
        wait(lambda: "sllm_calls_open 7.0" in cluster.http.get("/metrics").text, "seven calls run")
        os.kill(worker_of(cluster, "gated"), signal.SIGKILL)
        gate.touch()
        for future in streams:
            pieces, stream = future.result(GIVE_UP_S)
            assert pieces == text
            assert stream.done
        assert whole.result(GIVE_UP_S)["choices"] == right["choices"]


# --- what cannot go on ------------------------------------------------------------------------------
def error_after_a_kill(cluster: Cluster, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """How a stream ends whose worker is killed when ten values are here."""
    with Stream(cluster, name, arguments) as stream:
        values = stream.values()
        for _ in range(10):
            next(values)
        os.kill(worker_of(cluster, name), signal.SIGKILL)
        list(values)
    assert stream.error is not None
    assert not stream.done
    return stream.error


def test_a_call_that_kills_every_worker_is_given_up(cluster: Cluster, coder: Path) -> None:
    """What it yielded just before may die with it: what came is the beginning of the right answer."""
    with Stream(cluster, "coder", {"prompt": "def ", "max_tokens": 64}) as stream:
        right = list(stream.values())
    deploy(cluster, "fatal_to_its_worker", model=str(coder / "model"))
    with Stream(cluster, "fatal-to-its-worker") as stream:
        pieces = list(stream.values())
    assert 0 < len(pieces) <= 20
    assert pieces == right[: len(pieces)]
    assert stream.error is not None
    assert stream.error["code"] == "instance_lost"


def test_a_function_that_yields_other_things_each_time_is_told_so(cluster: Cluster, coder: Path) -> None:
    deploy(cluster, "never_the_same", model=str(coder / "model"))
    assert error_after_a_kill(cluster, "never-the-same", {})["code"] == "not_deterministic"


def test_one_that_opted_out_ends_at_once(cluster: Cluster, coder: Path) -> None:
    deploy(cluster, str(coder / "function.py"), name="opted-out", resumable=False)
    assert error_after_a_kill(cluster, "opted-out", ASK)["code"] == "instance_lost"

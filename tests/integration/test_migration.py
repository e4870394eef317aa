"""Running calls move from one node to another and back: not a token lost, repeated or different."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sllm_runtime.protocol.errors import InternalError, Unavailable
from sllm_runtime.protocol.http import API, InstanceView
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import sllm_json
from tests.fixtures.deployed import deploy, view, wait, workers
from tests.fixtures.streams import Stream
from tests.fixtures.waiting import GIVE_UP_S

AT = 24
"""Pieces after which a call waits for its gate, wherever it runs."""


@pytest.fixture(scope="module")
def cluster(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform"), nodes=2) as running:
        times = {"keep_alive": 300, "idle_timeout": 600, "timeout": 1200}
        deploy(running, "gated_coder::fn", name="coder", model=str(coder / "model"), max_instances=2, **times)
        yield running


@pytest.fixture(scope="module")
def text(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The pieces that a call gives where it stays."""
    gate = tmp_path_factory.mktemp("open") / "gate"
    gate.touch()
    with Stream(cluster, "coder", {"gate": str(gate), "at": AT}) as stream:
        return list(stream.values())


def instances(cluster: Cluster) -> tuple[InstanceView, ...]:
    """The function's; none while nobody can say."""
    try:
        return view(cluster, "coder").instances
    except (Unavailable, InternalError):
        return ()


def ready(cluster: Cluster) -> list[InstanceView]:
    return [instance for instance in instances(cluster) if instance.state == "READY"]


def settled(cluster: Cluster) -> InstanceView:
    """The function's only instance, once nothing of what was before is left. What was before may have left none."""
    found: list[InstanceView] = []
    with Stream(cluster, "coder", {"gate": "", "at": 0, "max_tokens": 1}) as stream:
        assert len(list(stream.values())) == 1

    def alone() -> bool:
        found[:] = instances(cluster)
        return [instance.state for instance in found] == ["READY"]

    wait(alone, lambda: f"one instance, ready; there are {found}")
    return found[0]


def other(node: str) -> str:
    return "n2" if node == "n1" else "n1"


def moved(cluster: Cluster) -> float:
    """Calls that this platform has moved."""
    lines = cluster.http.get("/metrics").text.split("\n")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("sllm_calls_moved_total{"))


def ask(cluster: Cluster, instance: InstanceView) -> dict[str, Any]:
    """Until it is over: 202 means that it still goes on."""
    path = f"{API}/instances/{instance.instance}/migrate"
    while True:
        answer = cluster.http.post(path, json={"to": other(instance.node)}, timeout=GIVE_UP_S)
        if answer.status_code != 202:
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found


def read_while(cluster: Cluster, gate: Path, act: Callable[[], object]) -> list[str]:
    """The pieces of a call; ``act`` when it is at its gate, which is opened then."""
    pieces: list[str] = []
    with Stream(cluster, "coder", {"gate": str(gate), "at": AT}) as stream:
        for piece in stream.values():
            pieces.append(piece)
            if len(pieces) == AT:
                act()
                gate.touch()
        assert stream.error is None
        assert stream.done
        assert stream.ids == list(range(len(pieces)))
    return pieces


def sllm(cluster: Cluster, *words: str) -> dict[str, Any]:
    """What the command line prints."""
    found: dict[str, Any] = sllm_json({**cluster.env, "SLLM_URL": cluster.url, "SLLM_TOKEN": cluster.token}, *words)
    return found


def test_sllm_migrate_moves_a_running_call(cluster: Cluster, text: list[str], tmp_path: Path) -> None:
    source, before = settled(cluster), moved(cluster)
    said: list[dict[str, Any]] = []

    def act() -> None:
        said.append(sllm(cluster, "migrate", source.instance, "--to", other(source.node)))

    assert read_while(cluster, tmp_path / "gate", act) == text
    assert (said[0]["state"], said[0]["node"]) == ("DONE", other(source.node))
    assert said[0]["destination"] == settled(cluster).instance
    assert moved(cluster) == before + 1


def completion(cluster: Cluster, **more: Any) -> dict[str, Any]:
    body = {"model": "coder", "prompt": "def ", "max_tokens": 120, "temperature": 0.7, "seed": 3, **more}
    answer = cluster.http.post("/v1/completions", json=body, timeout=GIVE_UP_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "several": {"n": 3, "max_tokens": 60},
    "stop": {"stop": ["\n\n\n\n", "zzzz"]},
    "logprobs": {"logprobs": 2},
    "long": {"prompt": "def f(x):\n    return x\n" * 100},
}


def test_all_calls_of_an_instance_move_whatever_they_carry(cluster: Cluster, text: list[str], tmp_path: Path) -> None:
    """At once, while they are computed in one batch: text, finish, log probabilities and usage are the same."""
    right = {name: completion(cluster, **more) for name, more in KINDS.items()}
    source = settled(cluster)
    calls: dict[str, Future[dict[str, Any]]] = {}
    with ThreadPoolExecutor(len(KINDS)) as pool:

        def act() -> None:
            for name, more in KINDS.items():
                calls[name] = pool.submit(completion, cluster, **more)
            assert ask(cluster, source)["state"] == "DONE"

        assert read_while(cluster, tmp_path / "gate", act) == text
        for name, call in calls.items():
            found = call.result(GIVE_UP_S)
            assert found["choices"] == right[name]["choices"], name
            for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert found["usage"][field] == right[name]["usage"][field], name


def test_sllm_node_drain_moves_what_runs_there(cluster: Cluster, text: list[str], tmp_path: Path) -> None:
    source = settled(cluster)

    def act() -> None:
        assert sllm(cluster, "node", "drain", source.node)["instances"] == 0

    assert read_while(cluster, tmp_path / "gate", act) == text
    assert settled(cluster).node == other(source.node)
    assert sllm(cluster, "node", "uncordon", source.node)["cordoned"] is False


def test_what_cannot_be_carried_is_refused(cluster: Cluster, coder: Path) -> None:
    deploy(cluster, "gated_coder::fn", name="stays", model=str(coder / "model"), resumable=False, keep_alive=300)
    (instance,) = view(cluster, "stays").instances
    answer = cluster.http.post(f"{API}/instances/{instance.instance}/migrate", json={})
    assert answer.status_code == 400
    assert "resumable=False" in answer.json()["error"]["message"]
    assert cluster.http.post(f"{API}/instances/nothing/migrate", json={}).status_code == 404


# --- who dies on the way ----------------------------------------------------------------------------
def asked(cluster: Cluster, instance: InstanceView) -> threading.Thread:
    """``migrate`` on its way, whatever comes of it."""
    path = f"{API}/instances/{instance.instance}/migrate"
    thread = threading.Thread(target=lambda: cluster.http.post(path, json={"to": other(instance.node)}))
    thread.start()
    return thread


def kill(instance: str) -> None:
    for pid in workers(instance):
        os.kill(pid, signal.SIGKILL)


def kill_source(cluster: Cluster, source: InstanceView) -> None:
    kill(source.instance)


def kill_destination(cluster: Cluster, source: InstanceView) -> None:
    """As soon as it is there, starting or ready."""
    found: list[str] = []

    def there() -> bool:
        found[:] = [i.instance for i in instances(cluster) if i.node != source.node]
        return bool(found) and bool(workers(found[0]))

    wait(there, "a destination")
    kill(found[0])


FAULTS: dict[str, Callable[[Cluster, InstanceView], object]] = {
    "source": kill_source,
    "destination": kill_destination,
    "controller": lambda cluster, _: cluster.kill("controller"),
    "nats": lambda cluster, _: cluster.kill("nats"),
    "source-node": lambda cluster, source: cluster.kill(f"invoker-{source.node}"),
    "destination-node": lambda cluster, source: cluster.kill(f"invoker-{other(source.node)}"),
}


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("when", ["asked", "starting", "moving"])
@pytest.mark.parametrize("fault", FAULTS)
def test_whoever_dies_the_answer_is_the_same(
    cluster: Cluster, text: list[str], tmp_path: Path, fault: str, when: str
) -> None:
    nodes = {"invoker-n1", "invoker-n2"}
    wait(lambda: nodes <= cluster.running().pids.keys(), "the node that the case before has killed is back")
    source = settled(cluster)
    threads: list[threading.Thread] = []

    def under_way() -> bool:
        if not threads[-1].is_alive():  # refused, or given up: that node is back and not heard yet
            threads.append(asked(cluster, source))
        if when == "moving":
            return source.instance not in [i.instance for i in ready(cluster)]
        return when == "asked" or len(instances(cluster)) > 1

    def act() -> None:
        threads.append(asked(cluster, source))
        wait(under_way, f"the move is {when}")
        FAULTS[fault](cluster, source)

    assert read_while(cluster, tmp_path / "gate", act) == text
    for thread in threads:
        thread.join(GIVE_UP_S)
    wait(lambda: cluster.http.get("/readyz").status_code == 200, "the platform is ready again")

"""Running calls move from one node to another and back: not a token lost, repeated or different."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sllm_runtime.protocol.http import API, InstanceView
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import sllm_json
from tests.fixtures.deployed import deploy, view, wait
from tests.fixtures.lora import adapter
from tests.fixtures.moving import ask, deploy_gated, moved, other, read_while, settled, whole
from tests.fixtures.waiting import GIVE_UP_S


@pytest.fixture(scope="module")
def cluster(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform"), nodes=2) as running:
        homes = {"loud": str(adapter(running.home / "loud", 0))}
        deploy_gated(running, coder, adapters=homes, concurrency=1 + len(KINDS))
        yield running


@pytest.fixture(scope="module")
def text(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The pieces that a call gives where it stays."""
    return whole(cluster, tmp_path_factory.mktemp("open") / "gate")


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


def completion(cluster: Cluster, more: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "coder", "prompt": "def ", "max_tokens": 600, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    answer = cluster.http.post("/v1/completions", json={**body, **more}, timeout=2 * GIVE_UP_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "several": {"n": 3},
    "stop": {"stop": ["\n\n\n\n\n\n", "zzzz"]},
    "logprobs": {"logprobs": 2},
    "long": {"prompt": "def f(x):\n    return x\n" * 100},
    "adapter": {"model": "coder:loud"},
    "half characters": {"regex": "[\u4f60\u597d\u00e9]{200}", "ignore_eos": False},
}


def test_all_calls_of_an_instance_move_whatever_they_carry(cluster: Cluster, text: list[str], tmp_path: Path) -> None:
    """At once, while they are computed in one batch: text, finish, log probabilities and usage are the same."""
    calls: dict[str, Future[dict[str, Any]]] = {}
    with ThreadPoolExecutor(len(KINDS)) as pool:

        def begin() -> None:
            calls.update({name: pool.submit(completion, cluster, more) for name, more in KINDS.items()})

        def results() -> dict[str, dict[str, Any]]:
            return {name: call.result(2 * GIVE_UP_S) for name, call in calls.items()}

        for _ in range(2):  # of the second time the instance knows the prompts, as usage says, wherever the call goes
            begin()
            right = results()
        assert right["long"]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert set(right["half characters"]["choices"][0]["text"]) == set("\u4f60\u597d\u00e9"), "of several tokens"
        source, before = settled(cluster), moved(cluster)

        def act() -> None:
            begin()
            wait(lambda: f"sllm_calls_open {1.0 + len(KINDS)}" in cluster.http.get("/metrics").text, "all have begun")
            assert ask(cluster, source)["state"] == "DONE"

        assert read_while(cluster, tmp_path / "gate", act) == text
        assert moved(cluster) == before + 1 + len(KINDS), "all of them were in the middle"
        for name, found in results().items():
            assert found["choices"] == right[name]["choices"], name
            assert found["usage"] == right[name]["usage"], name


def drawn(cluster: Cluster) -> int:
    """Tokens so far of the call that runs; 0: none does yet."""
    calls = cluster.http.get("/v1/calls").json()["calls"]
    return sum(call["tokens"] for call in calls if call["state"] == "RUNNING")


def test_a_stop_string_begins_at_the_source_and_ends_at_the_destination(cluster: Cluster) -> None:
    """None of it is given out: each of them has seen a part of it."""
    source, before = settled(cluster), moved(cluster)
    long = {"max_tokens": 1000, "temperature": 0.9}
    right = completion(cluster, {**long, "logprobs": 1})["choices"][0]
    tokens = right["logprobs"]["tokens"]
    first, last = 40, len(tokens) - 20
    assert right["text"] == "".join(tokens), "no character is of several tokens"
    stop = "".join(tokens[first:last])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(completion, cluster, {**long, "stop": stop})
        wait(lambda: drawn(cluster) > first + 8, "the source has drawn the beginning of it")
        assert ask(cluster, source)["state"] == "DONE"
        found = call.result(GIVE_UP_S)
    assert moved(cluster) == before + 1, "the source has not drawn its end"
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("".join(tokens[:first]), "stop")
    assert found["usage"]["completion_tokens"] == last


def test_a_call_moves_between_two_generations_and_in_each(cluster: Cluster, tmp_path: Path) -> None:
    right = whole(cluster, tmp_path / "open", before=12)
    between = right.index("first")
    for place, at in (("first", between - 3), ("end", between), ("code", between + 1), ("more", between + 9)):
        source, before = settled(cluster), moved(cluster)

        def act(source: InstanceView = source) -> None:
            assert ask(cluster, source)["state"] == "DONE"

        assert read_while(cluster, tmp_path / place, act, at=at, before=12) == right, place
        assert moved(cluster) == before + 1, place


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

"""Instances of several processes on a real platform: they say what one says, and their calls outlive a death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.http import InstanceView
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import sllm
from tests.fixtures.deployed import deploy, live, view, wait, wait_gone, workers
from tests.fixtures.lora import adapter
from tests.fixtures.streams import Stream

pytestmark = pytest.mark.chaos
CODER = Path(__file__).parents[2] / "functions" / "coder"
SEEDED = {"prompt": "class Parser", "max_tokens": 80, "temperature": 0.8, "seed": 7}
GREEDY = {"prompt": "class Parser", "max_tokens": 80}
SMALL: dict[str, Any] = {"cpu": 0.5, "memory": "512MiB", "keep_alive": 300}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform")) as running:
        yield running


def deployed(cluster: Cluster, coder: Path, name: str, **options: Any) -> str:
    deploy(cluster, str(coder / "function.py"), name=name, **{**SMALL, **options})
    return name


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("adapters")
    return {name: str(adapter(home / name, seed)) for seed, name in enumerate(("loud", "wide"))}


@pytest.fixture(scope="module")
def one(cluster: Cluster, coder: Path, adapters: dict[str, str]) -> str:
    return deployed(cluster, coder, "one", dtype="float32", adapters=adapters)


@pytest.fixture(scope="module")
def staged(cluster: Cluster, coder: Path, adapters: dict[str, str]) -> str:
    return deployed(cluster, coder, "staged", dtype="float32", adapters=adapters, parallelism={"pipeline": 2})


@pytest.fixture(scope="module")
def ranked(cluster: Cluster, coder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("ranks") / "model"
    sllm(cluster.env, "model", "convert", str(CODER / "model"), str(place), "--plan", "auto:2")
    return deployed(cluster, coder, "ranked", dtype="float32", parallelism={"tensor": 2}, model=str(place))


def said(cluster: Cluster, name: str, arguments: dict[str, Any]) -> list[str]:
    with Stream(cluster, name, arguments) as stream:
        pieces = list(stream.values())
    assert stream.error is None
    assert stream.done
    return pieces


def members(cluster: Cluster, name: str) -> dict[int, int]:
    """The processes of the function's only instance, by number."""
    found: dict[int, int] = {}

    def there() -> bool:
        instances = live(cluster, name)
        found.clear()
        if len(instances) == 1:
            for pid, title in workers(instances[0]).items():
                found[int(title.removeprefix(instances[0]).removeprefix(".") or 0)] = pid
        return len(found) == 2

    wait(there, f"one instance of {name} with two processes")
    return found


def ready(cluster: Cluster, name: str) -> list[InstanceView]:
    found = [each for each in view(cluster, name).instances if each.state == "READY"]
    assert found
    return found


def classes(cluster: Cluster, name: str) -> set[str]:
    """The numerics of its instances."""
    return {each.fingerprint for each in ready(cluster, name)}


def test_stages_say_what_one_process_says(cluster: Cluster, one: str, staged: str) -> None:
    """Bit by bit: a seeded choice would show another last bit sooner or later, logprobs at once."""
    assert said(cluster, staged, SEEDED) == said(cluster, one, SEEDED)
    body = {"prompt": "def ", "max_tokens": 40, "logprobs": 3, "seed": 5}
    answers = [cluster.http.post("/v1/completions", json={**body, "model": name}).json() for name in (staged, one)]
    assert answers[0]["choices"] == answers[1]["choices"]
    texts = set()
    for name in (":loud", ":wide", ":loud"):  # adapters of the model, brought when they are first named
        answers = [
            cluster.http.post("/v1/completions", json={**body, "model": each + name}).json() for each in (staged, one)
        ]
        assert answers[0]["choices"] == answers[1]["choices"]
        texts.add(answers[0]["choices"][0]["text"])
    assert len(texts) == 2
    scored = cluster.http.post("/v1/completions", json={**body, "model": staged, "echo": True})
    assert (scored.status_code, scored.json()["error"]["param"]) == (400, "logprobs")
    assert sorted(members(cluster, staged)) == [0, 1]
    assert classes(cluster, staged) == classes(cluster, one), "calls may move between them"


def test_ranks_say_what_one_process_says(cluster: Cluster, one: str, ranked: str) -> None:
    """Sums of parts have other last bits, so greedily, in float32, where the likeliest is likelier by far more."""
    assert said(cluster, ranked, GREEDY) == said(cluster, one, GREEDY)
    assert sorted(members(cluster, ranked)) == [0, 1]
    assert not any("layer_ranges" in each.capabilities for each in ready(cluster, ranked))
    assert classes(cluster, ranked).isdisjoint(classes(cluster, one))


@pytest.mark.parametrize(
    ("kind", "number"), [pytest.param("staged", 0, marks=pytest.mark.slow), ("staged", 1), ("ranked", 1)]
)
def test_a_process_killed_in_mid_stream(
    cluster: Cluster, kind: str, number: int, request: pytest.FixtureRequest
) -> None:
    name = request.getfixturevalue(kind)
    expected = said(cluster, name, SEEDED)
    old = members(cluster, name)
    pieces: list[str] = []
    with Stream(cluster, name, SEEDED) as stream:
        for piece in stream.values():
            pieces.append(piece)
            if len(pieces) == 10:
                os.kill(old[number], signal.SIGKILL)
    assert stream.error is None, f"after {len(pieces)} of {len(expected)} pieces"
    assert pieces == expected
    assert stream.done
    wait_gone(set(old.values()))


def test_what_is_not_shared_out_as_asked_is_refused_by_name(cluster: Cluster, coder: Path) -> None:
    with pytest.raises(SllmError, match="convert it with --plan auto:2"):
        deployed(cluster, coder, "unconverted", parallelism={"tensor": 2})

"""What OpenAI's routes ask for goes over the seam of a move: real processes, calls in the middle of their answers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.fixtures.cluster import Cluster
from tests.fixtures.command import sllm
from tests.fixtures.deployed import deploy, view, wait_gone, workers
from tests.fixtures.lora import adapter
from tests.fixtures.moving import ask, moved, ready
from tests.fixtures.waiting import GIVE_UP_S

CODER = Path(__file__).parents[2] / "functions" / "coder"
ASK: dict[str, Any] = {"model": "coder", "prompt": "class Parser:\n", "max_tokens": 1200, "ignore_eos": True, "seed": 7}
LONG = {"prompt": "def f(x):\n    return x + 1\n\n" * 100, "max_tokens": 800, "temperature": 0.8}
CALLS: dict[str, dict[str, Any]] = {
    "adapter": {"model": "coder:loud", "temperature": 0.8},
    "another adapter, greedy": {"model": "coder:wide", "temperature": 0},
    "half characters": {"regex": "[\u4f60\u597d\u00e9]{400}", "ignore_eos": False},
    "a long context": LONG,
}
PROMPTS: dict[str, Any] = {"prompt": ["class Parser:\n", "def f(x):\n", "import os\n", "# a\n"], "temperature": 0.8}
EARLY = slice(8, 24)
"""Where the first of their outputs ends, in tokens."""
BEGUN = 20
"""Pieces of each that are here when the move is asked for."""


@pytest.fixture(scope="module")
def cluster(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform"), nodes=2) as running:
        homes = {name: str(adapter(running.home / name, seed)) for seed, name in enumerate(("loud", "wide"))}
        file, more = str(coder / "function.py"), {"keep_alive": 300, "concurrency": 8, "max_instances": 2}
        deploy(running, file, name="coder", adapters=homes, **more)
        yield running


class Completion:
    """One streamed completion; ``begun`` when so many pieces of it are here."""

    def __init__(self, pieces: int = BEGUN, **more: Any) -> None:
        self._body = {**ASK, "stream": True, "stream_options": {"include_usage": True}, **more}
        self._pieces = pieces
        self.begun = threading.Event()

    def read(self, cluster: Cluster) -> tuple[str, str | None, dict[str, Any]]:
        """Its text, why it ended, and its usage."""
        chunks: list[dict[str, Any]] = []
        with (
            httpx.Client(base_url=cluster.url, headers=cluster.headers, timeout=GIVE_UP_S, verify=False) as http,
            http.stream("POST", "/v1/completions", json=self._body) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    break
                if line.startswith("data: "):
                    chunks.append(json.loads(line.removeprefix("data: ")))
                    if len(chunks) == self._pieces:
                        self.begun.set()
            else:
                pytest.fail(f"no [DONE] after {chunks[-1:]}")
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        usage = {key: count for key, count in chunks[-1]["usage"].items() if key.endswith("_tokens")}
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"], usage


@pytest.mark.slow
def test_all_of_it_is_as_if_nothing_had_moved(cluster: Cluster) -> None:
    """Adapters, characters of several tokens, a stop string after the seam, contexts of some 2,000 tokens."""
    right = {name: Completion(**more).read(cluster) for name, more in CALLS.items()}
    assert set(right["half characters"][0]) == set("\u4f60\u597d\u00e9"), "each is of several tokens"
    assert right["adapter"][0] != Completion(temperature=0.8).read(cluster)[0]
    assert 1800 <= right["a long context"][2]["total_tokens"] <= 2048
    whole = right["adapter"][0]
    stop = whole[-60:-40]
    stopped = {**CALLS["adapter"], "stop": [stop]}
    calls = {**CALLS, "stop": stopped}
    right["stop"] = Completion(**stopped).read(cluster)
    assert right["stop"][:2] == (whole[: whole.index(stop)], "stop")
    assert len(right["stop"][0]) > len(whole) // 2, "it ends late"
    (source,), before = ready(cluster), moved(cluster)
    with ThreadPoolExecutor(len(calls)) as pool:
        running = {name: Completion(**more) for name, more in calls.items()}
        reading = {name: pool.submit(call.read, cluster) for name, call in running.items()}
        for name, call in running.items():
            assert call.begun.wait(GIVE_UP_S), name
        assert ask(cluster, source)["state"] == "DONE"
        found = {name: future.result(GIVE_UP_S) for name, future in reading.items()}
    assert found == right
    assert moved(cluster) == before + len(calls), "all of them were in the middle"


def rounds(cluster: Cluster) -> list[int]:
    """How often the destination of each call that has gone over was fed."""
    (log,) = (cluster.data / "logs").glob("gateway*.log")
    return [int(found) for found in re.findall(r"call goes on at \S+ after (\d+) round", log.read_text())]


def ends_the_first(cluster: Cluster, model: Path) -> list[int]:
    """Ids that end the first output of PROMPTS early, and no other."""
    body = {**ASK, **PROMPTS, "logprobs": 0}
    answer = cluster.http.post("/v1/completions", json=body, timeout=GIVE_UP_S)
    assert answer.status_code == 200, answer.text
    first, *others = [choice["logprobs"]["tokens"] for choice in answer.json()["choices"]]
    elsewhere = {*first[: EARLY.start], *(token for tokens in others for token in tokens)}
    text = next(token for token in first[EARLY] if token not in elsewhere)
    known = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [number for number in range(known.get_vocab_size()) if known.decode([number]) == text]


@pytest.mark.slow
def test_outputs_go_over_though_one_of_them_has_ended_at_an_end_token(cluster: Cluster, coder: Path) -> None:
    """How it ended is to be drawn, and the others are told in turn with it: nobody waits for it, so the destination
    keeps up and is fed, as any."""
    ends = {**PROMPTS, "stop_ids": ends_the_first(cluster, coder / "model")}
    right = Completion(**ends).read(cluster)
    tokens, many = right[2]["completion_tokens"], len(PROMPTS["prompt"])
    assert 0 < tokens - (many - 1) * ASK["max_tokens"] < EARLY.stop, "one has ended, the others have not"
    (source,), before, fed = ready(cluster), moved(cluster), len(rounds(cluster))
    with ThreadPoolExecutor(1) as pool:
        running = Completion(many * EARLY.stop, **ends)
        reading = pool.submit(running.read, cluster)
        assert running.begun.wait(GIVE_UP_S)
        assert ask(cluster, source)["state"] == "DONE"
        assert reading.result(GIVE_UP_S) == right
    assert moved(cluster) == before + 1
    assert min(rounds(cluster)[fed:]) >= 2, "it was let draw before it kept up"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pipeline", "tensor"])
def test_an_instance_of_several_processes_moves(cluster: Cluster, coder: Path, way: str, tmp_path: Path) -> None:
    """All of its calls at once, to as many processes on the other node; none is left on its own."""
    model = coder / "model"
    if way == "tensor":
        model = tmp_path / "model"
        sllm(cluster.env, "model", "convert", str(CODER / "model"), str(model), "--plan", "auto:2")
    more: dict[str, Any] = {"cpu": 0.5, "keep_alive": 300, "concurrency": 4, "max_instances": 2, "dtype": "float32"}
    deploy(cluster, str(coder / "function.py"), name=way, model=str(model), parallelism={way: 2}, **more)
    asked: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8}, "long": LONG}
    right = {name: Completion(**each, model=way).read(cluster) for name, each in asked.items()}
    (source,) = view(cluster, way).instances
    before, there = moved(cluster), workers(source.instance)
    assert len(there) == 2
    with ThreadPoolExecutor(len(asked)) as pool:
        running = {name: Completion(**each, model=way) for name, each in asked.items()}
        reading = {name: pool.submit(call.read, cluster) for name, call in running.items()}
        for name, call in running.items():
            assert call.begun.wait(GIVE_UP_S), name
        done = ask(cluster, source)
        assert done["state"] == "DONE"
        assert {name: future.result(GIVE_UP_S) for name, future in reading.items()} == right
    assert moved(cluster) == before + len(asked), "all of them were in the middle"
    assert len(workers(done["destination"])) == 2
    wait_gone(set(there))

"""Calls that are kept go on through the restart of everything: real processes, the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sllm.sse import Parser
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import deploy, wait
from tests.fixtures.streams import Stream

pytestmark = pytest.mark.chaos
CODER = Path(__file__).parents[2] / "functions" / "coder"
ASK = {"prompt": "class Parser", "max_tokens": 200, "temperature": 0.8, "seed": 7}
ASYNC = {"Prefer": "respond-async"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform")) as running:
        deploy(running, str(CODER / "function.py"), name="coder", keep_alive=300)
        yield running


@pytest.fixture(scope="module")
def text(cluster: Cluster) -> list[str]:
    """The pieces that ASK gives when nothing goes wrong."""
    with Stream(cluster, "coder", ASK) as stream:
        return list(stream.values())


def begin(cluster: Cluster) -> str:
    answer = cluster.http.post("/fn/coder", json=ASK, headers=ASYNC)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def status(cluster: Cluster, call: str) -> dict[str, Any]:
    answer = cluster.http.get(f"/v1/calls/{call}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def first_event(cluster: Cluster, call: str) -> None:
    """Read until something of its answer is in the journal."""
    with cluster.http.stream("GET", f"/v1/calls/{call}/events") as answer:
        assert any(line.startswith("id: ") for line in answer.iter_lines())


def ended(cluster: Cluster, call: str) -> dict[str, Any]:
    wait(lambda: status(cluster, call)["finished"] is not None, lambda: f"it ends: {status(cluster, call)}")
    return status(cluster, call)


def test_its_gateway_is_killed(cluster: Cluster, text: list[str]) -> None:
    """It goes on from its tokens in the next life of that gateway, and is read from any place on."""
    call = begin(cluster)
    first_event(cluster, call)
    old = cluster.kill("gateway")
    cluster.wait_restarted("gateway", old)
    done = ended(cluster, call)
    assert (done["state"], done["error"]) == ("SUCCEEDED", None)
    assert done["result"] == text
    events = cluster.http.get(f"/v1/calls/{call}/events", headers={"Last-Event-ID": "9"}).text
    read = [event for event in Parser().feed(events.encode()) if event.comment is None]
    assert [json.loads(event.data) for event in read if not event.done] == text[10:]
    assert read[-1].done


@pytest.mark.slow
def test_everything_is_restarted(cluster: Cluster, text: list[str]) -> None:
    call = begin(cluster)
    first_event(cluster, call)
    token, port = cluster.token, int(cluster.url.rpartition(":")[2])
    cluster.stop()
    again = Cluster(cluster.home.parent, env={"SLLM_TOKEN": token}, port=port)
    with again:
        done = ended(again, call)
        assert (done["state"], done["error"]) == ("SUCCEEDED", None)
        assert done["result"] == text

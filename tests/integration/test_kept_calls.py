"""Calls outlive their gateway: kept ones through the restart of everything, streams at another gateway. Real processes,
the real model."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sllm.client import Client
from sllm.sse import Parser
from sllm_runtime.protocol.http import API, ExplainView
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import deploy, wait, wait_gone
from tests.fixtures.kept import begin, first_events, read_on
from tests.fixtures.moving import AT, whole
from tests.fixtures.streams import Stream
from tests.fixtures.suspended import suspended

pytestmark = pytest.mark.chaos
ASK = {"prompt": "class Parser", "max_tokens": 200, "temperature": 0.8, "seed": 7}
SEEN = AT - 4
"""Values that the caller of a stream has read when its gateway is gone."""


@pytest.fixture(scope="module")
def cluster(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform"), gateways=2) as running:
        deploy(running, "gated_coder::fn", name="coder", model=str(coder / "model"), keep_alive=300)
        yield running


@pytest.fixture(scope="module")
def text(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The pieces that ASK gives when nothing goes wrong."""
    return whole(cluster, tmp_path_factory.mktemp("open") / "gate", **ASK)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Where the calls of a test wait, AT pieces on, until it is there."""
    return tmp_path / "gate"


def gated(gate: Path) -> dict[str, Any]:
    """ASK, which cannot be over before ``gate`` is there."""
    return {**ASK, "gate": str(gate), "at": AT}


def status(cluster: Cluster, call: str) -> dict[str, Any]:
    answer = cluster.http.get(f"/v1/calls/{call}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ended(cluster: Cluster, call: str) -> dict[str, Any]:
    wait(lambda: status(cluster, call)["finished"] is not None, lambda: f"it ends: {status(cluster, call)}")
    return status(cluster, call)


def first_values(stream: Stream) -> list[Any]:
    values = stream.values()
    return [next(values) for _ in range(SEEN)]


def test_one_that_has_ended_is_explained_at_every_gateway(cluster: Cluster, text: list[str], gate: Path) -> None:
    """Where its instance was started, what each node would have cost then, and what it took in the end."""
    gate.touch()
    with Stream(cluster, "coder", gated(gate)) as stream:
        assert list(stream.values()) == text
    for url in cluster.document["urls"]:
        answer = cluster.http.get(f"{url}{API}/explain/{stream.call}")
        assert answer.status_code == 200, answer.text
        told = ExplainView.model_validate_json(answer.text)
        assert (told.call, told.state, told.past) == (stream.call, "SUCCEEDED", True)
        (start,) = told.starts
        assert start.instance == told.instance
        assert start.took is not None
        assert [(each.node, each.seconds, each.why) for each in told.candidates] == [("n1", start.seconds, "")]
        assert "first_token=" in told.timeline


def test_its_gateway_is_killed(cluster: Cluster, text: list[str], gate: Path) -> None:
    """It goes on from its tokens in the next life of that gateway, and is read from any place on."""
    call = begin(cluster, "coder", gated(gate))
    first_events(cluster, call, 1)
    old = cluster.kill("gateway")
    cluster.wait_restarted("gateway", old)
    gate.touch()
    done = ended(cluster, call)
    assert (done["state"], done["error"]) == ("SUCCEEDED", None)
    assert done["result"] == text
    events = cluster.http.get(f"/v1/calls/{call}/events", headers={"Last-Event-ID": "9"}).text
    read = [event for event in Parser().feed(events.encode()) if event.comment is None]
    assert [json.loads(event.data) for event in read if not event.done] == text[10:]
    assert read[-1].done


@pytest.mark.slow
def test_a_stream_outlives_its_gateway(cluster: Cluster, text: list[str], gate: Path) -> None:
    with Stream(cluster, "coder", gated(gate)) as stream:
        seen = first_values(stream)
        old = cluster.kill("gateway")
        seen += list(stream.values())
        gate.touch()
        assert stream.broken, (stream.error, stream.done)
    seen += read_on(cluster, stream.call, len(seen) - 1)
    assert seen == text
    assert read_on(cluster, stream.call, -1) == text
    cluster.wait_restarted("gateway", old)


@pytest.mark.slow
def test_a_client_reads_on_by_itself(
    cluster: Cluster, text: list[str], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its profile names both gateways."""
    monkeypatch.setenv("SLLM_HOME", str(cluster.home))
    with Client() as client, closing(client.stream("coder", gated(gate))) as values:
        seen = [next(values) for _ in range(SEEN)]
        old = cluster.kill("gateway")
        gate.touch()
        assert seen + list(values) == text
    cluster.wait_restarted("gateway", old)


def test_events_are_followed_past_the_death_of_their_gateway(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is one of them: nothing that happened meanwhile is missed, and nothing comes twice."""
    monkeypatch.setenv("SLLM_HOME", str(cluster.home))
    with Client() as client, closing(client.follow(f"{API}/events", {"follow": "true", "limit": "1"})) as events:
        told = (event for event in events if event.comment is None)
        seen = [next(told)]
        old = cluster.kill("gateway")
        seen.append(next(event for event in told if "gateway-g1 was started again" in event.data))
    numbers = [int(event.id or 0) for event in seen]
    assert 0 < numbers[0] < numbers[1]
    cluster.wait_restarted("gateway", old)
    kept = cluster.http.get(f"{API}/events", headers={"Last-Event-ID": str(numbers[0])}).text
    assert f"id: {numbers[1]}\n" in kept


@pytest.mark.slow
def test_a_client_does_not_notice_that_its_gateway_is_stopped(
    cluster: Cluster, text: list[str], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream is longer than what the gateway waits for; another one goes on with it at once."""
    monkeypatch.setenv("SLLM_HOME", str(cluster.home))
    with Client() as client, closing(client.stream("coder", gated(gate))) as values:
        seen = [next(values) for _ in range(SEEN)]
        old = cluster.kill("gateway", signal.SIGTERM)
        cluster.wait_restarted("gateway", old)
        gate.touch()
        assert seen + list(values) == text


def test_a_stream_outlives_a_gateway_that_stands_still(cluster: Cluster, text: list[str], gate: Path) -> None:
    """When it runs again it says that it has the stream no more, and nothing else than the other one."""
    with Stream(cluster, "coder", gated(gate)) as stream:
        seen = first_values(stream)
        with suspended(cluster.pid("gateway-g1")):
            gate.touch()
            rest = read_on(cluster, stream.call, len(seen) - 1)
            assert seen + rest == text
        late = seen + list(stream.values())
        assert late == text[: len(late)]
        assert stream.done == (late == text)
        assert stream.done or (stream.error is not None and stream.error["code"] == "call_moved"), stream.error
    assert read_on(cluster, stream.call, 9) == text[10:]


@pytest.mark.slow
def test_a_kept_call_outlives_a_gateway_that_stands_still(cluster: Cluster, text: list[str], gate: Path) -> None:
    call = begin(cluster, "coder", gated(gate))
    first_events(cluster, call, 1)
    with suspended(cluster.pid("gateway-g1")):
        gate.touch()
        assert read_on(cluster, call, -1) == text
    assert read_on(cluster, call, 9) == text[10:]


@pytest.mark.slow
def test_everything_is_restarted(cluster: Cluster, text: list[str], gate: Path) -> None:
    call = begin(cluster, "coder", gated(gate))
    first_events(cluster, call, 1)
    token, port = cluster.token, int(cluster.url.rpartition(":")[2])
    cluster.stop()
    gate.touch()
    with Cluster(cluster.home.parent, env={"SLLM_TOKEN": token}, port=port) as again:
        done = ended(again, call)
        assert (done["state"], done["error"]) == ("SUCCEEDED", None)
        assert done["result"] == text


def test_everything_is_killed(coder: Path, tmp_path: Path) -> None:
    """``sllm up``, and with it all that it has started, as where a machine loses its power: nobody could write another
    word. What was acknowledged is there again."""
    gate = tmp_path / "gate"
    with Cluster(tmp_path) as cluster:
        deploy(cluster, "gated_coder::fn", name="coder", model=str(coder / "model"), keep_alive=300)
        call = begin(cluster, "coder", gated(gate))
        first_events(cluster, call, SEEN)
        assert cluster.process is not None
        there = cluster.running().pids
        calls = (call, begin(cluster, "coder", gated(gate)))  # of the second one nothing is known but its 202
        cluster.process.kill()
        wait_gone(set(there.values()))
        gate.touch()
        with Cluster(tmp_path, env={"SLLM_TOKEN": cluster.token}) as again:
            for each in calls:
                done = ended(again, each)
                assert (done["state"], done["error"]) == ("SUCCEEDED", None)
                assert done["result"] == whole(again, gate, **ASK)

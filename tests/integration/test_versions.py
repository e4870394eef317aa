"""Versions against the real platform: who has the route, when it moves, what is left of a failure."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sllm import Client
from sllm_runtime.protocol.errors import Cancelled, Conflict, FunctionNotFound, StartFailed
from sllm_runtime.protocol.http import API, DeployResult
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import here, sllm, sllm_json
from tests.fixtures.deployed import client_of, deploy, events, live, view, wait
from tests.fixtures.waiting import GIVE_UP_S


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("versions")) as started:
        yield started


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with client_of(cluster) as made:
        yield made


def put(cluster: Cluster, name: str, number: int, **env: str) -> DeployResult:
    """Deploy a version of function ``name`` that answers ``number``."""
    return deploy(cluster, "versioned", name=name, env={"NUMBER": str(number), **env}, keep_alive=1, concurrency=4)


def says(cluster: Cluster, name: str, path: str = "") -> str:
    """Which version answers a call now."""
    answer = cluster.http.post(f"/fn/{name}{path}")
    assert answer.status_code == 200, answer.text
    first, second = answer.json()
    assert first == second
    return str(first)


def states(cluster: Cluster, name: str) -> dict[int, str]:
    return {version.version: version.state for version in view(cluster, name).versions}


class Running:
    """A call that has begun and goes on until ``finish``."""

    def __init__(self, client: Client, name: str, gate: Path) -> None:
        self._gate = gate
        self._values = client.stream(name, {"gate": str(gate)})
        self.first = next(self._values)

    def finish(self) -> list[Any]:
        """Its other values."""
        self._gate.touch()
        return list(self._values)


def test_a_new_version_takes_the_route_when_an_instance_of_it_has_started(cluster: Cluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    assert put(cluster, "taken", 1).version == 1
    with ThreadPoolExecutor() as threads:
        deploying = threads.submit(put, cluster, "taken", 2, START_GATE=str(gate))
        wait(lambda: [i for i in view(cluster, "taken").instances if i.version == 2], "the new version starts")
        assert states(cluster, "taken") == {1: "ACTIVE", 2: "PREPARING"}
        assert says(cluster, "taken") == "1"
        assert cluster.http.post("/fn/taken/v2").status_code == 404, "it cannot be called before"
        assert not deploying.done()
        gate.touch()
        assert deploying.result().version == 2
    assert says(cluster, "taken") == "2"
    assert states(cluster, "taken") == {1: "RETIRED", 2: "ACTIVE"}


def test_running_calls_end_on_their_version(cluster: Cluster, client: Client, tmp_path: Path) -> None:
    put(cluster, "running", 1)
    call = Running(client, "running", tmp_path / "gate")
    assert call.first == "1"
    put(cluster, "running", 2)
    assert says(cluster, "running") == "2"
    assert call.finish() == ["1"]
    wait(lambda: not [i for i in view(cluster, "running").instances if i.version == 1], "the old one has ended")


def test_a_route_that_moved_has_moved_for_the_very_next_call(cluster: Cluster, client: Client) -> None:
    for number in (1, 2, 3):
        put(cluster, "moved", number)
        assert says(cluster, "moved") == str(number)
    for number in (2, 1):
        client.request("POST", f"{API}/functions/moved/rollback", json={})
        assert says(cluster, "moved") == str(number)
    with pytest.raises(Conflict, match="no version to go back to"):
        client.request("POST", f"{API}/functions/moved/rollback", json={})
    client.request("POST", f"{API}/functions/moved/rollback", json={"version": 3})
    assert says(cluster, "moved") == "3"


def test_no_call_is_lost_while_the_route_moves(cluster: Cluster, client: Client) -> None:
    put(cluster, "hammered", 1)
    put(cluster, "hammered", 2)
    moved = threading.Event()

    def hammer() -> list[str]:
        answers = []
        while not moved.is_set():
            answers.append(says(cluster, "hammered"))
        return answers

    with ThreadPoolExecutor() as threads:
        callers = [threads.submit(hammer) for _ in range(3)]
        try:
            for number in (1, 2) * 15:
                client.request("POST", f"{API}/functions/hammered/rollback", json={"version": number})
        finally:
            moved.set()
        assert {answer for caller in callers for answer in caller.result()} <= {"1", "2"}


def test_a_version_can_be_called_by_its_number(cluster: Cluster) -> None:
    put(cluster, "numbered", 1)
    put(cluster, "numbered", 2)
    assert [says(cluster, "numbered", path) for path in ("/v1", "/v2", "")] == ["1", "2", "2"]
    for path in ("/v3", "/v0", "/vx", "/2"):
        answer = cluster.http.post(f"/fn/numbered{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "version_not_found"), path


def test_the_same_content_makes_no_new_version(cluster: Cluster) -> None:
    first = put(cluster, "same", 1)
    again = put(cluster, "same", 1)
    assert (first.unchanged, again.unchanged, again.version) == (False, True, 1)
    put(cluster, "same", 2)
    back = put(cluster, "same", 1)
    assert (back.unchanged, back.version) == (True, 1), "deploying what was there before gives it the route"
    assert says(cluster, "same") == "1"
    assert states(cluster, "same") == {1: "ACTIVE", 2: "RETIRED"}


def test_a_first_version_that_fails_leaves_nothing(cluster: Cluster, client: Client) -> None:
    with pytest.raises(StartFailed, match="no such luck") as raised:
        put(cluster, "never", 1, BROKEN="no such luck")
    assert raised.value.stage == "setup"
    with pytest.raises(FunctionNotFound):
        client.request("GET", f"{API}/functions/never")
    assert cluster.http.post("/fn/never").status_code == 404
    assert "never" not in [function["name"] for function in client.request("GET", f"{API}/functions")["functions"]]
    assert len(events(cluster, "never", "instance.starting")) == 1
    assert put(cluster, "never", 2).version == 1, "and is not in the way of the next"


def test_a_later_version_that_fails_leaves_the_route_and_is_told_of(cluster: Cluster) -> None:
    put(cluster, "later", 1)
    with pytest.raises(StartFailed, match="no such luck"):
        put(cluster, "later", 2, BROKEN="no such luck")
    assert says(cluster, "later") == "1"
    active, failed = view(cluster, "later").versions
    assert (active.state, failed.state) == ("ACTIVE", "FAILED")
    assert failed.error is not None
    assert "no such luck" in failed.error.message
    assert failed.error.stage == "setup"
    assert put(cluster, "later", 3).version == 3
    assert says(cluster, "later") == "3"


def test_delete_lets_running_calls_finish(cluster: Cluster, client: Client, tmp_path: Path) -> None:
    put(cluster, "drained", 1)
    call = Running(client, "drained", tmp_path / "gate")
    with ThreadPoolExecutor() as threads:
        deleting = threads.submit(sllm, cluster.env, "fn", "delete", "drained")
        wait(lambda: cluster.http.post("/fn/drained").status_code == 404, "it takes no new call")
        assert not deleting.done()
        assert call.finish() == ["1"]
        assert deleting.result().returncode == 0
    with pytest.raises(FunctionNotFound):
        view(cluster, "drained")
    assert put(cluster, "drained", 2).version == 1, "a function of the same name begins anew"


def queued(cluster: Cluster, name: str) -> bool:
    """Whether a call of it waits for a slot."""
    return f'sllm_queue_depth{{function="{name}"}} 1.0' in cluster.http.get("/metrics").text


def test_delete_ends_calls_that_wait_at_once(cluster: Cluster, client: Client, tmp_path: Path) -> None:
    """With a typed error, while the one that runs goes on to its end."""
    deploy(cluster, "versioned", name="queued", env={"NUMBER": "1"}, keep_alive=1)
    call = Running(client, "queued", tmp_path / "gate")
    with ThreadPoolExecutor() as threads, client_of(cluster) as another:
        waiting = threads.submit(another.call, "queued", {})
        wait(lambda: queued(cluster, "queued"), "the second call waits for the slot of the first")
        deleting = threads.submit(sllm, cluster.env, "fn", "delete", "queued")
        error = waiting.exception(GIVE_UP_S)
        assert isinstance(error, FunctionNotFound)
        assert not deleting.done()
        assert call.finish() == ["1"]
        assert deleting.result(GIVE_UP_S).returncode == 0


def test_delete_by_force_cancels_them(cluster: Cluster, client: Client, tmp_path: Path) -> None:
    put(cluster, "forced", 1)
    call = Running(client, "forced", tmp_path / "gate")
    (instance,) = live(cluster, "forced")
    here(cluster.env, "fn", "delete", "--force", "forced")
    with pytest.raises(Cancelled):
        call.finish()
    assert cluster.http.post("/fn/forced").status_code == 404
    wait(lambda: [e for e in events(cluster, "forced", "instance.stopped") if e["instance"] == instance], "ended")


def test_the_command_line_tells_the_same(cluster: Cluster) -> None:
    put(cluster, "told", 1)
    put(cluster, "told", 2)
    assert [v["version"] for v in sllm_json(cluster.env, "fn", "history", "told") if v["active"]] == [2]
    assert sllm_json(cluster.env, "fn", "rollback", "told")["active"] == 1
    described = sllm_json(cluster.env, "fn", "describe", "told")
    assert (described["name"], described["active"], described["url"]) == ("told", 1, "/fn/told")
    assert "told" in [function["name"] for function in sllm_json(cluster.env, "fn", "list")["functions"]]
    assert here(cluster.env, "fn", "invoke", "told").stdout == "11\n"
    assert sllm_json(cluster.env, "fn", "delete", "told")["deleted"] is True
    assert "function_not_found" in here(cluster.env, "fn", "describe", "told", "--json", expect=3).stderr

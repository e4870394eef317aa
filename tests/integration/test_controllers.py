"""Two controllers: one leads, the other takes over when it is stopped or killed, and an old one changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from sllm_runtime.control.deletion import CLOCKS_S
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.local import Layout
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.streams import STATE_STREAM
from sllm_runtime.platform.watch import last_messages
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.records import Term
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import deploy, events, live, view, wait, wait_cold, worker_of
from tests.fixtures.leading import term
from tests.fixtures.streams import Stream
from tests.fixtures.waiting import GIVE_UP_S

CONTROLLERS = {"controller", "controller-2"}
BELIEVING = Path(__file__).parents[1] / "fixtures" / "believing"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform"), controllers=2) as running:
        deploy(running, "slow_stream", keep_alive=300)
        deploy(running, "kinds::awaited", name="cold", keep_alive=0)
        deploy(running, "kinds::awaited", name="goes")
        yield running


def test_one_leads_and_an_orderly_end_is_followed(cluster: Cluster) -> None:
    first = term(cluster)
    assert first.controller in CONTROLLERS
    old = cluster.pid(first.controller)
    os.kill(old, signal.SIGTERM)
    wait(lambda: term(cluster).term > first.term, "another one is elected")
    cluster.wait_restarted(first.controller, old)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_standby_takes_over_under_a_stream_and_the_old_one_changes_nothing(
    cluster: Cluster, number: signal.Signals
) -> None:
    """The stream does not notice; a cold function is started by the new one. What was stopped ends when it goes on:
    its own restart is the proof, nothing else has ended it."""
    wait_cold(cluster, "cold")
    before = term(cluster)
    (instance,) = live(cluster, "slow-stream")
    old = cluster.pid(before.controller)
    with Stream(cluster, "slow-stream", {"count": 150, "pause": 0.02}) as stream:
        values = stream.values()
        assert next(values) == 0
        os.kill(old, number)
        try:
            assert cluster.http.post("/fn/cold", json={"text": "a"}).json() == "A"
            after = term(cluster)
            assert after.term > before.term
            explained = cluster.http.get(f"/api/v1/explain/{stream.call}").json()
            assert (explained["past"], explained["starts"][0]["instance"]) == (True, instance), (
                "of the controller before"
            )
            assert explained["starts"][0]["took"] is not None
            assert number is signal.SIGKILL or after.controller in CONTROLLERS - {before.controller}
        finally:
            if number is signal.SIGSTOP:
                os.kill(old, signal.SIGCONT)
        assert list(values) == list(range(1, 150))
        assert stream.done
    cluster.wait_restarted(before.controller, old)
    assert live(cluster, "slow-stream") == [instance]
    assert cluster.http.post("/fn/cold", json={"text": "b"}).json() == "B"


def taken_over(
    cluster: Cluster, before: Term, was: Mapping[str, list[str]]
) -> tuple[dict[str, set[str]], dict[str, int]]:
    """Another controller than ``before``'s leads, the workers of these functions are killed, and what it has started in
    the place of what ``was`` works: the instances by function, and their workers. One, ``least``, has to be there."""
    wait(lambda: term(cluster).term > before.term, "another one is elected")
    for name in was:
        os.kill(worker_of(cluster, name), signal.SIGKILL)
    wait(lambda: ready(cluster, "least") - {*was["least"]}, "the new one starts what has to be there")
    assert cluster.http.post("/fn/slow-stream", json={"count": 1}).json() == [0]
    return {name: ready(cluster, name) for name in was}, {name: worker_of(cluster, name) for name in was}


def test_a_leader_that_wakes_with_much_to_do_does_none_of_it(cluster: Cluster) -> None:
    """To it one function lacks the instance that it has to have, and what the new one started for both is nobody's: it
    would start one and end two."""
    names = ("least", "slow-stream")
    deploy(cluster, "kinds::awaited", name="least", min_instances=1)
    before = term(cluster)
    old = cluster.pid(before.controller)
    was = {name: live(cluster, name) for name in names}
    os.kill(old, signal.SIGSTOP)
    try:
        now, there = taken_over(cluster, before, was)
        started = {name: len(events(cluster, name, "instance.starting")) for name in names}
    finally:
        os.kill(old, signal.SIGCONT)
    cluster.wait_restarted(before.controller, old)
    assert term(cluster).controller != before.controller
    assert cluster.http.post("/fn/least", json={"text": "a"}).json() == "A"
    assert cluster.http.post("/fn/slow-stream", json={"count": 1}).json() == [0]
    for name in names:
        assert {*live(cluster, name)} == now[name] == ready(cluster, name), name
        assert worker_of(cluster, name) == there[name], name
        assert len(events(cluster, name, "instance.starting")) == started[name], name


def test_a_leader_that_wakes_tells_nothing_of_what_happened_meanwhile(cluster: Cluster) -> None:
    """The one that leads has told it, at its time: each thing happened once."""
    deploy(cluster, "kinds::awaited", name="dies", min_instances=1)
    before = term(cluster)
    old = cluster.pid(before.controller)
    (was,) = live(cluster, "dies")
    os.kill(old, signal.SIGSTOP)
    try:
        wait(lambda: term(cluster).term > before.term, "another one is elected")
        os.kill(worker_of(cluster, "dies"), signal.SIGKILL)
        wait(lambda: ready(cluster, "dies") - {was}, "the new one starts what has to be there")
        told = of_instances(cluster, "dies")
        assert told.count(("instance.lost", was)) == 1
    finally:
        os.kill(old, signal.SIGCONT)
    cluster.wait_restarted(before.controller, old)
    assert cluster.http.post("/fn/dies", json={"text": "a"}).json() == "A"
    assert of_instances(cluster, "dies") == told


def of_instances(cluster: Cluster, name: str) -> list[tuple[str, str]]:
    query = {"function": name, "kind": "instance"}
    text = cluster.http.get(f"{API}/events", params=query).text
    told = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    return [(each["kind"], each["instance"]) for each in told]


def ready(cluster: Cluster, name: str) -> set[str]:
    return {instance.instance for instance in view(cluster, name).instances if instance.state == "READY"}


def test_whatever_is_asked_while_the_leader_changes_is_waited_for_and_done(cluster: Cluster) -> None:
    """Each of them failed at once: nobody served it."""
    made = view(cluster, "goes").versions[0].created
    wait(lambda: time.time() > made + CLOCKS_S, "what was there when it is asked for is no matter of two clocks")
    asked: tuple[tuple[str, str, dict[str, object] | None], ...] = (
        ("POST", "/nodes/n1/cordon", None),
        ("POST", "/functions/cold/rollback", {"version": 1}),
        ("PUT", "/secrets/token", {"value": "dG9rZW4="}),
        ("DELETE", "/functions/goes", None),
        ("GET", "/explain/cold", None),
        ("GET", "/nodes", None),
    )

    def sllm(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "sllm", *words]
        return subprocess.run(argv, env=cluster.env, capture_output=True, text=True, check=False, timeout=GIVE_UP_S)

    def ask(method: str, path: str, body: dict[str, object] | None) -> httpx.Response:
        return cluster.http.request(method, f"{API}{path}", json=body)

    before = term(cluster)
    os.kill(cluster.pid(before.controller), signal.SIGKILL)
    with ThreadPoolExecutor(len(asked) + 2) as threads:
        told = threads.submit(sllm, "node", "list")
        silent = threads.submit(sllm, "node", "list", "--json")
        answers = [asking.result() for asking in [threads.submit(ask, *each) for each in asked]]
    assert [answer.status_code for answer in answers] == [200] * len(asked), [answer.text for answer in answers]
    assert term(cluster).term > before.term
    assert told.result().returncode == 0
    assert told.result().stderr in ("", "waiting for a controller that leads ...\n"), (
        "it may have begun too late for it"
    )
    assert (silent.result().returncode, silent.result().stderr) == (0, "")
    assert cluster.http.get(f"{API}/functions/goes").status_code == 404
    assert cluster.http.post(f"{API}/nodes/n1/uncordon").json()["cordoned"] is False


def kept(cluster: Cluster, *prefixes: str) -> dict[str, tuple[int, bytes]]:
    """What the store has below these keys: the number of the write, and what it wrote."""

    async def read() -> dict[str, tuple[int, bytes]]:
        identity = str(Layout(cluster.data).identity_file("g1"))
        own = {"SLLM_NATS_URL": str(cluster.document["nats_url"]), "SLLM_IDENTITY_FILE": identity}
        bus = await Bus.connect(Settings.load(own), "g1", name="test")
        try:
            found = await last_messages(bus, STATE_STREAM, "$KV.sllm_state.>")
        finally:
            await bus.close()
        records = {key.removeprefix("$KV.sllm_state."): (each.sequence, each.data) for key, each in found.items()}
        return {key: record for key, record in records.items() if key.startswith(prefixes)}

    return asyncio.run(read())


def test_fences_alone_stop_a_leader_that_wakes_and_believes_that_it_leads(tmp_path: Path) -> None:
    """As above, but that nothing else holds it back (``fixtures/believing``): it writes, and commands nodes. The store
    refuses each write, and the nodes each command."""
    names = ("least", "slow-stream")
    with Cluster(tmp_path, controllers=2, env={"PYTHONPATH": str(BELIEVING)}) as cluster:
        deploy(cluster, "slow_stream", keep_alive=300)
        deploy(cluster, "kinds::awaited", name="least", min_instances=1)
        before = term(cluster)
        old = cluster.pid(before.controller)
        was = {name: live(cluster, name) for name in names}
        os.kill(old, signal.SIGSTOP)
        try:
            now, there = taken_over(cluster, before, was)
            records = ("instances.", "routes.", "functions.", "versions.", "term")
            started = {f"instances.{each}" for name in names for each in now[name]}
            wait(lambda: {*kept(cluster, "instances.")} == started, "what it has started is recorded, and no more")
            stored = kept(cluster, *records)
        finally:
            os.kill(old, signal.SIGCONT)
        cluster.wait_restarted(before.controller, old)
        assert term(cluster).controller != before.controller
        assert cluster.http.post("/fn/least", json={"text": "a"}).json() == "A"
        assert kept(cluster, *records) == stored
        for name in names:
            assert {*live(cluster, name)} == now[name] == ready(cluster, name), name
            assert worker_of(cluster, name) == there[name], name
        log = (cluster.data / "logs" / f"{before.controller}.log").read_text()
        assert f"obeys term {term(cluster).term}; this command is of term {before.term}" in log, "it has tried"

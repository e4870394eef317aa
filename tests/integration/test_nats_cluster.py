"""Three NATS servers: the one that leads the state's stream is killed, and a gateway whose log lies on them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from nats.js.manager import JetStreamManager

from benchmarks.chaos_client import Reader, Told
from benchmarks.heard import Heard
from benchmarks.nats_cluster import NatsCluster
from sllm.client import Client
from sllm_gateway.stored import Stored
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.streams import ensure_streams
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.lives import Gone, Log
from sllm_runtime.protocol.subjects import LIVES_STREAM, life_log
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import deploy, wait, wait_cold
from tests.fixtures.streams import Stream
from tests.fixtures.suspended import suspended

CODER = Path(__file__).parents[2] / "functions" / "coder"
ASK = {"prompt": "class Parser", "max_tokens": 200, "temperature": 0.8, "seed": 7}
pytestmark = pytest.mark.chaos


def test_a_stream_and_a_cold_start_outlive_the_leader_of_the_state(tmp_path: Path) -> None:
    with NatsCluster(tmp_path / "nats") as nats, Cluster(tmp_path, env=nats.env, controllers=2) as cluster:
        deploy(cluster, "slow_stream", keep_alive=300)
        deploy(cluster, "kinds::awaited", name="cold", keep_alive=0)
        wait_cold(cluster, "cold")
        victim, gate = nats.leader(), tmp_path / "gate"
        with Stream(cluster, "slow-stream", {"count": 100, "pause": 0.02, "gate": str(gate), "at": 90}) as stream:
            values = stream.values()
            assert next(values) == 0
            nats.kill(victim)
            assert cluster.http.post("/fn/cold", json={"text": "a"}).json() == "A"
            wait(lambda: nats.leader() != victim, "another server leads")
            assert cluster.http.post("/fn/cold", json={"text": "b"}).json() == "B"
            gate.touch()
            assert list(values) == list(range(1, 100))
            assert stream.done


@pytest.mark.slow
def test_the_leader_of_the_state_is_killed(tmp_path: Path) -> None:
    """A stream does not notice; a cold start and a deployment wait, and go on; a kept call keeps its answer."""
    with NatsCluster(tmp_path / "nats") as nats, Cluster(tmp_path, env=nats.env, controllers=2) as cluster:
        deploy(cluster, "slow_stream", keep_alive=300)
        deploy(cluster, "kinds::awaited", name="cold", keep_alive=0)
        wait_cold(cluster, "cold")
        kept = cluster.http.post("/fn/slow-stream", json={"count": 5}, headers={"Idempotency-Key": "k"})
        assert kept.json() == list(range(5))
        victim = nats.leader()
        with Stream(cluster, "slow-stream", {"count": 500, "pause": 0.02}) as stream:
            values = stream.values()
            assert next(values) == 0
            nats.kill(victim)
            assert cluster.http.post("/fn/cold", json={"text": "a"}).json() == "A"
            assert list(values) == list(range(1, 500))
            assert stream.done
        assert deploy(cluster, "kinds::awaited", name="later", keep_alive=300).version == 1
        again = cluster.http.post("/fn/slow-stream", json={"count": 5}, headers={"Idempotency-Key": "k"})
        assert again.json() == list(range(5))
        assert again.headers["sllm-call-id"] == kept.headers["sllm-call-id"]
        assert nats.leader() != victim
        nats.start(victim)
        assert cluster.http.post("/fn/later", json={"text": "b"}).json() == "B"


@pytest.mark.slow
async def test_a_cluster_is_waited_for_until_it_has_a_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unanswered = asyncio.Event()
    asked = JetStreamManager.account_info

    async def told(self: JetStreamManager) -> Any:
        try:
            return await asked(self)
        except Exception:
            unanswered.set()
            raise

    monkeypatch.setattr(JetStreamManager, "account_info", told)
    with NatsCluster(tmp_path / "nats") as nats:
        first, *others = nats.pids()
        for name in others:
            nats.kill(name)
        settings = Settings.load({"SLLM_NATS_URL": nats.url})
        connecting = asyncio.create_task(Bus.connect(settings, "up", name="test"))
        async with asyncio.timeout(60):
            await unanswered.wait()
        assert set(nats.pids()) == {first}
        await asyncio.to_thread(nats.start_missing)
        await (await connecting).close()


@pytest.mark.slow
def test_a_stream_outlives_its_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fences hold where three servers agree on each write."""
    with NatsCluster(tmp_path / "nats") as nats, Cluster(tmp_path, env=nats.env, gateways=2) as cluster:
        deploy(cluster, str(CODER / "function.py"), name="coder", keep_alive=300)
        monkeypatch.setenv("SLLM_HOME", str(cluster.home))
        with Client() as client:
            text = list(client.stream("coder", ASK))
            with closing(client.stream("coder", ASK)) as values:
                seen = [next(values) for _ in range(20)]
                old = cluster.kill("gateway")
                assert seen + list(values) == text
        cluster.wait_restarted("gateway", old)


@pytest.mark.slow
async def test_what_is_written_is_asked_of_who_leads(tmp_path: Path) -> None:
    """Any other server that has the stream may lag behind: it would say that an acknowledged message is not there."""
    subject, written = life_log("life", 0), Log((Gone("call-1"),))

    async def connect(url: str) -> Bus:
        return await Bus.connect(Settings.load({"SLLM_NATS_URL": url}), "up", name="test")

    with NatsCluster(tmp_path / "nats") as nats:
        bus = await connect(nats.url)
        await ensure_streams(bus, 3)
        await Stored(bus).write(subject, written)  # who leads by then was elected among all that have the stream
        cluster = (await bus.jetstream.stream_info(LIVES_STREAM)).cluster
        await bus.close()
        assert cluster is not None
        leader = cluster.leader or ""
        other = await connect(next(url for name, url in nats.urls.items() if name != leader))
        os.kill(nats.pids()[leader], signal.SIGSTOP)
        ticks = itertools.count(step=10.0)
        with pytest.raises(Unavailable, match="cannot be read"):  # a follower would have said it at once
            await Stored(other, lambda: next(ticks)).last(LIVES_STREAM, subject)
        found = await Stored(other).last(LIVES_STREAM, subject)
        assert found is not None
        assert found[1] == codec.pack(written)
        await other.close()


@pytest.mark.slow
def test_a_stream_that_began_without_a_leader_outlives_its_gateway(tmp_path: Path, coder: Path) -> None:
    """Its log could not be stored before its gateway was killed: the other gateway was told of it all the same."""
    with NatsCluster(tmp_path / "nats") as nats:
        victim = "c"  # nobody is connected to it, so that only JetStream stands still
        env = {**nats.env, "SLLM_NATS_URL": nats.url.rpartition(",")[0]}
        with Cluster(tmp_path, env=env, gateways=2) as cluster:
            first, other = cluster.running().urls
            deploy(cluster, str(coder / "function.py"), name="coder", keep_alive=300)
            with Stream(cluster, "coder", ASK, url=first) as stream:
                right = list(stream.values())
                assert stream.done
            nats.lead(LIVES_STREAM, victim)
            with suspended(nats.pids()[victim]):
                with Stream(cluster, "coder", ASK, url=first) as stream:
                    values, heard = stream.values(), Heard(0)
                    told = Told(heard, kept=False, call=stream.call)
                    while told.young:
                        heard.values.append(next(values))
                        heard.times.append(time.monotonic())
                    cluster.kill("gateway")
                heard.ids += stream.ids
                Reader([other], cluster.token, "coder", ASK, told, first=0).read()
            assert told.heard.error == "", told
            assert told.heard.values == right

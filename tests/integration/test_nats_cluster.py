"""Three NATS servers, one of which is killed: the one that leads the state's stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.nats_cluster import NatsCluster
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import deploy, wait_cold
from tests.fixtures.streams import Stream

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


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

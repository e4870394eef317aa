"""A platform without a node, whose controller has nodes made as calls need them: real processes, from none to none."""

from contextlib import closing
from pathlib import Path

import pytest

from sllm_runtime.platform.process import start_time
from sllm_runtime.platform.spawned import Spawned, spawned
from sllm_runtime.protocol.http import API
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import client_of, deploy, wait
from tests.fixtures.streams import Stream

POOL = {
    "SLLM_NODE_PROVIDER": "processes",
    "SLLM_NODES_MOST": "1",
    "SLLM_NODES_IDLE": "1",
    "SLLM_NODES_COOLDOWN": "1",
    "SLLM_NODES_EVERY": "0.2",
    "SLLM_NODES_MEMORY": "2GiB",
}


def the_node(cluster: Cluster) -> Spawned:
    (node,) = spawned(cluster.data / "pool").values()
    return node


@pytest.mark.slow
def test_nodes_come_for_calls_and_go_when_there_are_none(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=0, env=POOL) as cluster:
        assert spawned(cluster.data / "pool") == {}
        deploy(cluster, "slow_stream", name="paced", keep_alive=0, memory="64MiB")
        first = the_node(cluster)
        with client_of(cluster) as client, closing(client.stream("paced", {"count": 100, "pause": 0.02})) as values:
            assert next(values) == 0
            old = cluster.kill("controller")
            cluster.wait_restarted("controller", old)
            assert list(values) == list(range(1, 100)), "the node outlives the controller that made it"
        wait(lambda: spawned(cluster.data / "pool") == {}, "the node goes when it has nothing to do")
        assert start_time(first.pid) is None
        wait(lambda: cluster.http.get(f"{API}/nodes").json()["nodes"] == [], "it is forgotten")
        with Stream(cluster, "paced", {"count": 3, "pause": 0.001}) as stream:
            assert list(stream.values()) == [0, 1, 2]
        assert the_node(cluster).node != first.node
        told = cluster.http.get(f"{API}/events").text
        for kind in ("pool.grows", "node.leaving", "node.given_back", "node.removed"):
            assert f'"kind":"{kind}"' in told

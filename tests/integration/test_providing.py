"""A platform without a node, whose controller has nodes made as calls need them: real processes, from none to none."""

import os
import signal
from pathlib import Path

import pytest

from sllm_runtime.platform.process import start_time
from sllm_runtime.platform.spawned import Spawned, spawned
from sllm_runtime.protocol.http import API
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import deploy, wait
from tests.fixtures.moving import AT, moved
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
    """The one that is not about to go."""
    (node,) = [each for each in spawned(cluster.data / "pool").values() if each.ending is None]
    return node


@pytest.mark.slow
def test_nodes_come_for_calls_and_go_when_there_are_none(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=0, env=POOL) as cluster:
        assert spawned(cluster.data / "pool") == {}
        deploy(cluster, "slow_stream", name="paced", keep_alive=0, memory="64MiB")
        with Stream(cluster, "paced", {"count": 100, "pause": 0.02}) as stream:
            values = stream.values()
            assert next(values) == 0
            first = the_node(cluster)
            old = cluster.kill("controller")
            cluster.wait_restarted("controller", old)
            assert list(values) == list(range(1, 100)), "the node outlives the controller that made it"
        wait(lambda: spawned(cluster.data / "pool") == {}, "the node goes when it has nothing to do")
        assert start_time(first.pid) is None
        wait(lambda: cluster.http.get(f"{API}/nodes").json()["nodes"] == [], "it is forgotten")
        with Stream(cluster, "paced", {"count": 100, "pause": 0.02}) as stream:
            values = stream.values()
            assert next(values) == 0
            second = the_node(cluster)
            assert second.node != first.node
            assert list(values) == list(range(1, 100))
        told = cluster.http.get(f"{API}/events").text
        for kind in ("pool.grows", "node.leaving", "node.given_back", "node.removed"):
            assert f'"kind":"{kind}"' in told
    assert start_time(second.pid) is None, "what is left ends with the platform"


@pytest.mark.slow
def test_a_node_ends_with_a_platform_that_is_killed(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=0, env=POOL) as cluster:
        deploy(cluster, "slow_stream", name="paced", keep_alive=300, memory="64MiB")
        node = the_node(cluster)
        assert cluster.process is not None
        cluster.process.kill()
        wait(lambda: start_time(node.pid) is None, "it has ended")


@pytest.mark.slow
def test_calls_of_a_node_that_is_taken_away_go_on_at_one_that_is_made_for_them(coder: Path, tmp_path: Path) -> None:
    """As at a spot instance's notice, which stops the node's service: it says so, and drains."""
    with Cluster(tmp_path, nodes=0, env={**POOL, "SLLM_NODES_MOST": "2", "SLLM_DRAIN": "300"}) as cluster:
        times = {"keep_alive": 300, "idle_timeout": 600, "timeout": 1200}
        deploy(cluster, "gated_coder::fn", name="coder", model=str(coder / "model"), max_instances=2, **times)
        gate = tmp_path / "gate"
        gate.touch()
        with Stream(cluster, "coder", {"gate": str(gate), "at": AT}) as stream:
            right = list(stream.values())
        gate.unlink()
        first, pieces = the_node(cluster), []
        with Stream(cluster, "coder", {"gate": str(gate), "at": AT}) as stream:
            for piece in stream.values():
                pieces.append(piece)
                if len(pieces) == AT:
                    os.kill(first.pid, signal.SIGTERM)
                    wait(lambda: moved(cluster) == 1, "the call has moved to another node")
                    wait(lambda: start_time(first.pid) is None, "its node has ended: nothing runs there any more")
                    gate.touch()
            assert stream.error is None
            assert stream.done
        assert pieces == right
        assert the_node(cluster).node != first.node

"""Several nodes on one machine: each is a world of its own, and each gets what it needs by itself."""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sllm_runtime.protocol.errors import Unsatisfiable
from sllm_runtime.protocol.http import API
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import here, sllm_json
from tests.fixtures.deployed import client_of, deploy, descendants, view, wait, wait_cold
from tests.fixtures.suspended import suspended

CODER = Path(__file__).parents[2] / "functions" / "coder" / "function.py"
NODES = ("n1", "n2")
ASK = {"prompt": "def ", "max_tokens": 16}
HAVE = {"SLLM_LABELS": "zone=here", "SLLM_GPUS": "L4:24GiB,H100:80GiB"}
"""Of each node. Nothing here computes on one."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("nodes"), nodes=2, env=HAVE) as started:
        wait(lambda: len(nodes(started)) == 2, "both nodes have reported")
        yield started


def nodes(cluster: Cluster) -> dict[str, dict[str, Any]]:
    found = cluster.http.get(f"{API}/nodes").json()["nodes"]
    return {node["node"]: node for node in found if node["alive"]}


def spread(cluster: Cluster) -> list[str]:
    """Where ``coder`` has instances, one for each call at a time, two thirds of a node's memory each."""
    memory = nodes(cluster)["n1"]["memory"] * 2 // 3
    deploy(cluster, str(CODER), name="coder", concurrency=1, max_instances=2, min_instances=2, memory=memory)
    wait(lambda: len(ready(cluster)) == 2, "an instance on each node")
    return ready(cluster)


def ready(cluster: Cluster) -> list[str]:
    return sorted(i.node for i in view(cluster, "coder").instances if i.state == "READY")


def test_a_function_runs_where_its_labels_are_and_nowhere_else(cluster: Cluster) -> None:
    deploy(cluster, "kinds::awaited", name="there", labels={"zone": "here"})
    assert cluster.http.post("/fn/there", json={"text": "a"}).json() == "A"
    with pytest.raises(Unsatisfiable, match=r"label zone=elsewhere \(has here\)"):
        deploy(cluster, "kinds::awaited", name="nowhere", labels={"zone": "elsewhere"})
    here(cluster.env, "fn", "delete", "there", "--force")


def test_a_gpu_is_of_the_kind_that_is_preferred_while_there_is_one(cluster: Cluster, tmp_path: Path) -> None:
    deploy(cluster, "gated::gated", name="on-gpu", gpu=["H100", "L4"], max_instances=4, keep_alive=0)
    gate = tmp_path / "gate"

    def taken() -> list[str]:
        gpus = [gpu for node in nodes(cluster).values() for gpu in node["gpus"]]
        return sorted(gpu["kind"] for gpu in gpus if gpu["used_by"])

    def takes(kinds: list[str]) -> Future[Any]:
        call = callers.submit(client.call, "on-gpu", {"gate": str(gate)})
        wait(lambda: taken() == kinds, lambda: f"{taken()} are taken")
        return call

    with ThreadPoolExecutor(3) as callers, client_of(cluster) as client:
        calls = [takes(kinds) for kinds in (["H100"], ["H100", "H100"], ["H100", "H100", "L4"])]
        gate.touch()
        assert [call.result()[-1] for call in calls] == [{"most": 1}] * 3
    wait_cold(cluster, "on-gpu")
    assert taken() == []
    here(cluster.env, "fn", "delete", "on-gpu", "--force")


def test_the_second_node_gets_the_model_by_itself(cluster: Cluster) -> None:
    assert spread(cluster) == list(NODES)

    def models() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = sllm_json(cluster.env, "model", "list")["models"]
        return found

    wait(lambda: sorted(models()[0]["nodes"]) == list(NODES), "both nodes have reported the model")
    (model,) = models()
    name = model["digest"].removeprefix("sha256:")
    copies = [cluster.data / "nodes" / node / "loaderd" / "models" / name / "partition_0.bin" for node in NODES]
    assert copies[0].read_bytes() == copies[1].read_bytes()
    assert copies[0].stat().st_ino != copies[1].stat().st_ino
    with ThreadPoolExecutor() as threads, client_of(cluster) as client:
        calls = [threads.submit(lambda: list(client.stream("coder", ASK))) for _ in range(4)]
        texts = ["".join(call.result()) for call in calls]
    assert len(set(texts)) == 1, "the same tokens from either"


def test_nodes_share_no_directory_socket_or_memory(cluster: Cluster) -> None:
    spread(cluster)
    held = {node: holdings(cluster, node) for node in NODES}
    for node, things in held.items():
        assert len([thing for thing in things if thing.startswith("memory ")]) > 2, f"{node} holds weights in memory"
        assert len([thing for thing in things if thing.startswith("path ")]) > 2
        assert len([thing for thing in things if thing.startswith("socket ")]) > 2
    assert held["n1"] & held["n2"] == set()


def holdings(cluster: Cluster, node: str) -> set[str]:
    """Memory files, sockets and writable or private paths that the processes of ``node`` hold."""
    roots = [cluster.pid(f"{daemon}-{node}") for daemon in ("invoker", "loaderd")]
    pids = {*roots, *(pid for root in roots for pid in descendants(root))}
    assert len(pids) >= 4, "invoker, loaderd, fork server, worker"
    found: set[str] = set()
    for pid in pids:
        found |= {f"memory {inode}" for inode in memory_files(pid)}
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except FileNotFoundError:
                continue
            if target.startswith("socket:"):
                found.add(f"socket {target}")
            elif target.startswith(str(cluster.data)):
                found.add(f"path {target}")
        if os.readlink(f"/proc/{pid}/cwd") != str(cluster.data):
            found.add(f"path {os.readlink(f'/proc/{pid}/cwd')}")
    found |= {f"path {path}" for path in (cluster.data / "nodes" / node).rglob("*")}
    return found


def memory_files(pid: int) -> set[str]:
    """Inodes of shared memory that the process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return set(re.findall(r"^\S+ \S+ \S+ (\S+ \d+) +(?:/memfd:|/dev/shm/)", maps, re.MULTILINE))


def test_each_node_says_its_share_of_the_machine(cluster: Cluster) -> None:
    found = nodes(cluster)
    assert set(found) == set(NODES)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert sum(node["memory"] for node in found.values()) <= machine
    assert [line.split()[0] for line in here(cluster.env, "node", "list").stdout.splitlines()[1:]] == list(NODES)


def test_a_node_that_has_gone_is_forgotten_and_joins_anew(cluster: Cluster) -> None:
    refused = here(cluster.env, "node", "forget", "n2", expect=2)
    assert "node n2 lives: `sllm node drain n2`" in refused.stderr
    here(cluster.env, "node", "cordon", "n2")
    with suspended(cluster.pid("invoker-n2")):
        wait(lambda: "n2" not in nodes(cluster), "its silence is noticed")
        wait(lambda: "n2" not in {instance.node for instance in view(cluster, "coder").instances}, "nothing is there")
        assert here(cluster.env, "node", "forget", "n2").stdout == "n2 is forgotten\n"
        assert [node["node"] for node in sllm_json(cluster.env, "node", "list")["nodes"]] == ["n1"]
        assert "there is no node n2" in here(cluster.env, "node", "forget", "n2", expect=3).stderr
    wait(lambda: "n2" in nodes(cluster), "it is heard again")
    assert not nodes(cluster)["n2"]["cordoned"], "it has joined as a new one"
    told = [event["kind"] for event in sllm_events(cluster, "node") if event["node"] == "n2"]
    assert told[told.index("node.removed") :] == ["node.removed", "node.joined", "node.alive"]


def sllm_events(cluster: Cluster, kind: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in here(cluster.env, "events", "--kind", kind, "--json").stdout.splitlines()]

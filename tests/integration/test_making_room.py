"""The scheduler itself makes room by a running call, since another function starts sooner where it runs: moves it, or
ends its instance, as the policy is. And a model's copy is brought to where it was never started."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import cold_gigabyte, synthetic
from benchmarks.slow_store import Store
from sllm_loaderd.convert import convert_directory
from sllm_runtime.protocol.http import API
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import sllm_json
from tests.fixtures.deployed import deploy, events, view, wait, wait_cold
from tests.fixtures.moving import AT, counted, moved, read_while, whole
from tests.fixtures.streams import Stream

MIB = 2**20
SLOW, FAST = 8.0 * MIB, 1000.0 * MIB
B_BYTES = 64 * MIB
C_BYTES = 24 * MIB
ONE_EACH = {"SLLM_CPU": "1", "SLLM_CPU_OVERCOMMIT": "1", "SLLM_SSD_BYTES": "0", "SLLM_SETTLED": "0"}
"""Room for one instance, no copies on disks, and whoever is ready may be moved."""


@pytest.fixture(scope="module")
def models(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a``, the demo model, and ``b``, ``c`` and ``d``, some numbers each, with what is right in ``b.digest`` …"""
    place = tmp_path_factory.mktemp("models")
    shutil.copytree(coder / "model", place / "a")
    for seed, (name, nbytes) in enumerate({"b": B_BYTES, "c": C_BYTES, "d": C_BYTES}.items(), start=1):
        made = synthetic.write(place / f"{name}.numbers", nbytes, cold_gigabyte.STEP, seed)
        convert_directory(made.directory, place / name)
        (place / f"{name}.digest").write_text(str(made.sampled))
    return place


@pytest.fixture
def store(models: Path) -> Iterator[Store]:
    with Store(models, SLOW) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def wish(cluster: Cluster, node: str, what: str) -> None:
    assert cluster.http.post(f"{API}/nodes/{node}/{what}").status_code == 200


def digests(directory: Path) -> str:
    """The function that says a model's digest, alone in its directory: what lies beside a function goes with it."""
    directory.mkdir()
    return str(shutil.copy(cold_gigabyte.FUNCTION, directory / "started.py"))


def starts(cluster: Cluster, function: str) -> list[tuple[str, str | None]]:
    """Nodes where it became ready, and where the weights were."""
    return [(event["node"], event["fields"].get("tier")) for event in events(cluster, function, "instance.ready")]


@pytest.mark.parametrize("policy", ["startup-time", "preemption"])
def test_a_running_call_makes_room_where_the_weights_of_another_function_are(
    models: Path, store: Store, tmp_path: Path, policy: str
) -> None:
    """ServerlessLLM, figure 3: n2 has B's weights in memory and runs A, n1 has A's and is idle. B would be read from a
    slow store there, so A's call goes on at n1 and B starts on n2. By ``preemption`` A's instance is ended for that,
    and its call goes on from its tokens."""
    moves = policy == "startup-time"
    url = f"http://127.0.0.1:{store.server_port}"
    function = digests(tmp_path / "code")
    with Cluster(tmp_path, nodes=2, env={**ONE_EACH, "SLLM_POLICY": policy}) as cluster:
        wish(cluster, "n2", "cordon")
        deploy(cluster, "gated_coder::fn", name="coder", model=f"{url}/a", keep_alive=300, max_instances=2)
        wish(cluster, "n1", "drain")
        wait_cold(cluster, "coder")
        store.rate = FAST
        wish(cluster, "n2", "uncordon")
        deploy(cluster, function, name="digest", model=f"{url}/b", keep_alive=0)
        wait_cold(cluster, "digest")
        heard: list[str] = []
        calls: list[str] = []

        def call_b() -> None:
            wish(cluster, "n1", "uncordon")
            with Stream(cluster, "digest") as stream:
                calls.append(stream.call)
                heard.extend(stream.values())

        pieces = read_while(cluster, tmp_path / "gate", call_b)
        assert heard == [(models / "b.digest").read_text()]
        assert (moved(cluster), counted(cluster, "resumed")) == ((1, 0) if moves else (0, 1))
        told = cluster.http.get(f"{API}/explain/{calls[0]}").json()
        how = "running calls had been moved" if moves else "instances had been ended"
        by = "moving coder-1-" if moves else "stopping 1 at work (coder-1-"
        assert f", after {how} for it: makes room on n2 by {by}" in told["decision"]
        assert starts(cluster, "digest") == [("n2", "remote"), ("n2", "dram")]
        done = [
            (event["node"], float(event["fields"]["expected_s"]) < B_BYTES / SLOW)
            for event in events(cluster, "coder", "migration.done")
        ]
        assert done == ([("n1", True)] if moves else [])
        assert [instance.node for instance in view(cluster, "coder").instances if instance.state == "READY"] == ["n1"]
        assert pieces == whole(cluster, tmp_path / "open")
        assert len(pieces) > AT


@pytest.mark.parametrize(("settled_s", "moves"), [("30", 1), pytest.param("0", 2, marks=pytest.mark.slow)])
def test_who_has_moved_is_left_alone_for_a_while(
    models: Path, store: Store, tmp_path: Path, settled_s: str, moves: int
) -> None:
    """Two functions would each start soonest where the same call runs: for the first it moves to the other node, for
    the second, whose weights are there, it would move back at once. That one starts where there is room, although its
    weights come from a slow store; 30 s is what nobody has to set."""
    url = f"http://127.0.0.1:{store.server_port}"
    function = digests(tmp_path / "code")
    with Cluster(tmp_path, nodes=2, env={**ONE_EACH, "SLLM_SETTLED": settled_s}) as cluster:
        store.rate = FAST
        wish(cluster, "n2", "cordon")
        deploy(cluster, "gated_coder::fn", name="coder", model=f"{url}/a", keep_alive=0, max_instances=2)
        wait_cold(cluster, "coder")
        store.rate = SLOW
        deploy(cluster, function, name="second", model=f"{url}/d", keep_alive=0)
        wait_cold(cluster, "second")
        wish(cluster, "n1", "cordon")
        wish(cluster, "n2", "uncordon")
        deploy(cluster, function, name="first", model=f"{url}/c", keep_alive=0)
        wait_cold(cluster, "first")

        def both_are_called() -> None:
            wish(cluster, "n1", "uncordon")
            for name, model, count in (("first", "c", 1), ("second", "d", moves)):
                with Stream(cluster, name) as stream:
                    assert list(stream.values()) == [(models / f"{model}.digest").read_text()]
                assert moved(cluster) == count
                wait_cold(cluster, name)

        pieces = read_while(cluster, tmp_path / "gate", both_are_called)
        assert starts(cluster, "first") == [("n2", "remote"), ("n2", "dram")]
        assert starts(cluster, "second") == [("n1", "remote"), ("n1", "dram") if moves == 2 else ("n2", "remote")]
        assert counted(cluster, "resumed") == 0
        assert pieces == whole(cluster, tmp_path / "open")


def test_what_is_started_has_a_copy_on_the_other_nodes_disk_too(models: Path, store: Store, tmp_path: Path) -> None:
    """The next start there reads no store."""
    store.rate = FAST
    with Cluster(tmp_path, nodes=2) as cluster:
        wish(cluster, "n2", "cordon")
        model = f"http://127.0.0.1:{store.server_port}/a"
        deploy(cluster, "gated_coder::fn", name="coder", model=model, keep_alive=0)
        pieces = whole(cluster, tmp_path / "open")
        wait_cold(cluster, "coder")
        (digest,) = {version.model for version in view(cluster, "coder").versions}

        def tiers(node: str) -> list[str]:
            found: list[str] = cluster.http.get(f"{API}/nodes/{node}").json()["tiers"].get(digest, [])
            return found

        def copies() -> list[str]:
            return [node for node in ("n1", "n2") if "ssd" in tiers(node)]

        wait(lambda: copies() == ["n1"], lambda: f"its start has left a copy; {copies()} have one")
        wish(cluster, "n2", "uncordon")
        (placed,) = [each for each in sllm_json(cluster.env, "model", "place")["models"] if each["model"] == digest]
        assert placed["wanted"] == ["n1", "n2"]
        wait(lambda: copies() == ["n1", "n2"], lambda: f"both have a copy; {copies()} have one")
        store.rate = SLOW
        wish(cluster, "n1", "cordon")
        assert whole(cluster, tmp_path / "open") == pieces
        *_, last = events(cluster, "coder", "instance.ready")
        assert (last["node"], last["fields"]["tier"]) == ("n2", "ssd")

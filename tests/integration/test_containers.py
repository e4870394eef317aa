"""Functions in containers: the main job, attempts to get out, and what is left of those whose invoker is killed."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sllm_invoker.containers import probe
from sllm_invoker.containers.arguments import NODE, PLACE, SANDBOX
from sllm_invoker.containers.engine import Engine
from sllm_invoker.images.base import Base
from sllm_invoker.images.store import Store
from sllm_runtime.protocol.errors import InstanceLost
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import client_of, deploy, live, wait, wait_gone, workers

pytestmark = [pytest.mark.container, pytest.mark.slow, pytest.mark.timeout(1500)]
# Where no node of this machine has made it yet, the base image is made first.

TMP_MIB = 32
PIDS = 64
LIMITS = {
    "SLLM_SANDBOX": "auto",
    "SLLM_REQUIRE_ISOLATION": "true",
    "SLLM_POOL_SIZE": "1",
    "SLLM_CONTAINER_TMP": f"{TMP_MIB}MiB",
    "SLLM_CONTAINER_PIDS": str(PIDS),
}
ECHO = Path(__file__).parents[2] / "functions" / "echo" / "function.py"
SMALL = {"memory": "128MiB", "cpu": 0.1}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return asyncio.run(probe.find())


@pytest.fixture(scope="module")
def image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    return asyncio.run(Base(Store(engine), tmp_path_factory.mktemp("image"), dict(os.environ)).ensure())


@pytest.fixture(scope="module")
def cluster(image: str, coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform"), env={**LIMITS, "SLLM_IMAGE": image}) as running:
        deploy(running, str(ECHO), name="neighbour", keep_alive=3600, **SMALL)
        deploy(running, str(coder / "function.py"), name="coder", keep_alive=3600)
        yield running


@pytest.fixture
def neighbour(cluster: Cluster) -> Iterator[None]:
    """Another function's instance, which is the same and answers after the test as before."""
    call(cluster, "neighbour", text="here")
    before = live(cluster, "neighbour")
    yield
    assert call(cluster, "neighbour", text="well") == {"text": "well", "length": 4}
    assert live(cluster, "neighbour") == before != []


def call(cluster: Cluster, name: str, **arguments: object) -> object:
    with client_of(cluster) as client:
        return client.call(name, arguments)


def listed(cluster: Cluster, engine: Engine) -> set[str]:
    """Names of the containers that the cluster's node has now."""
    place = cluster.data.absolute() / "nodes" / "n1" / "invoker"
    filters = [f"--filter=label={NODE}=n1", f"--filter=label={PLACE}={place}"]
    words = [*engine.words, "ps", "--all", *filters, "--format", f'{{{{index .Labels "{SANDBOX}"}}}}']
    return set(subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout.split())


ASK = {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0}


def test_tokens_stream_out_of_a_container_from_weights_nobody_can_write(cluster: Cluster, coder: Path) -> None:
    with client_of(cluster) as client:
        pieces = list(client.stream("coder", ASK))
    assert len(pieces) > 1
    deploy(cluster, "writes_weights", model=str(coder / "model"))
    tried = call(cluster, "writes-weights")
    assert isinstance(tried, dict)
    assert tried, "its weights lie in memory files"
    assert all(said[0] for said in tried.values()), tried  # what it could write to is a copy of its own
    with client_of(cluster) as client:
        assert list(client.stream("coder", ASK)) == pieces


def test_stages_of_one_model_meet_in_two_containers(cluster: Cluster, coder: Path) -> None:
    with client_of(cluster) as client:
        pieces = list(client.stream("coder", ASK))
    deploy(cluster, str(coder / "function.py"), name="staged", parallelism={"pipeline": 2})
    with client_of(cluster) as client:
        assert list(client.stream("staged", ASK)) == pieces
        client.request("DELETE", "/api/v1/functions/staged")


def test_nothing_can_be_reached_over_the_network(cluster: Cluster, neighbour: None) -> None:
    nats = urlsplit(cluster.running().nats_url).port
    deploy(cluster, "reaches_network")
    tried = call(cluster, "reaches-network", ports=[urlsplit(cluster.url).port, nats])
    assert isinstance(tried, dict)
    assert len(tried) >= 3
    assert "connected" not in tried.values(), tried


def test_a_fork_bomb_goes_off_in_its_own_container(cluster: Cluster, neighbour: None) -> None:
    deploy(cluster, "fork_bomb")
    made = call(cluster, "fork-bomb")
    assert isinstance(made, int)
    assert 0 < made < PIDS


def test_who_eats_memory_is_told_so_with_the_limit(cluster: Cluster, neighbour: None) -> None:
    deploy(cluster, "eats_memory")
    with pytest.raises(InstanceLost, match=r"ran out of memory \(limit 64\.0 MiB\)"):
        call(cluster, "eats-memory")


def test_what_can_be_written_to_has_a_limit(cluster: Cluster, neighbour: None) -> None:
    deploy(cluster, "fills_tmp")
    written = call(cluster, "fills-tmp", most_mib=4 * TMP_MIB)
    assert isinstance(written, dict)
    assert 0 < written.pop("/tmp") <= TMP_MIB
    assert 0 < written.pop("/tmp/instance/code") <= TMP_MIB
    assert set(written.values()) == {-1}


def test_who_ignores_signals_ends_all_the_same(cluster: Cluster, engine: Engine, neighbour: None) -> None:
    deploy(cluster, "ignores_sigterm")
    (instance,) = live(cluster, "ignores-sigterm")
    with client_of(cluster) as client:
        values = client.stream("ignores-sigterm", {})
        next(values)
        pids = set(workers(instance))
        assert len(pids) == 2  # and its child, which has its name
        client.request("DELETE", "/api/v1/functions/ignores-sigterm")
        values.close()
    wait_gone(pids)


def test_who_leaves_a_daemon_behind_takes_it_along(cluster: Cluster, neighbour: None) -> None:
    deploy(cluster, "forks_daemon", **SMALL)
    (instance,) = live(cluster, "forks-daemon")
    assert call(cluster, "forks-daemon") != 0
    pids = set(workers(instance))
    assert len(pids) == 2
    cluster.http.delete("/api/v1/functions/forks-daemon").raise_for_status()
    wait_gone(pids)


def test_the_host_is_not_to_be_seen(cluster: Cluster) -> None:
    deploy(cluster, "reads_host")
    here = [str(cluster.home), str(cluster.data), str(Path(__file__)), "/root", "/etc/shadow", "/run/containers"]
    seen = call(cluster, "reads-host", paths=here)
    assert isinstance(seen, dict)
    assert {path: seen[path] for path in here} == {path: ["FileNotFoundError"] for path in here}
    assert seen["/proc/1/environ"] == seen["/proc/1/fd"] == seen["/proc/1/root"] == ["PermissionError"]
    assert len(seen["pids"]) == 2  # process 1 and this one
    assert not [name for name in seen["environment"] if name.startswith("SLLM")]
    assert sorted(seen["user"][1:]) == ["CapBnd:0000000000000000", "CapEff:0000000000000000", "NoNewPrivs:1"]
    assert seen["user"][0] != "0"


def test_a_killed_invoker_leaves_nothing_behind(cluster: Cluster, engine: Engine) -> None:
    before = listed(cluster, engine)
    (instance,) = live(cluster, "neighbour")
    pids = set(workers(instance))
    assert before
    assert len(pids) == 1
    cluster.wait_restarted("invoker", cluster.kill("invoker"))
    wait_gone(pids)
    wait(lambda: not before & listed(cluster, engine), "the containers of its former life are gone")
    assert call(cluster, "neighbour", text="again") == {"text": "again", "length": 5}

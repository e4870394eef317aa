"""``sllm up --node``: a machine that joins a cluster of three NATS servers over TLS, with credentials of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nats_cluster import NatsCluster
from sllm_runtime.platform.process import start_time
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.subjects import node_rights
from tests.fixtures.certificates import make_certificates
from tests.fixtures.cluster import QUICK, Cluster
from tests.fixtures.credentials import Operator
from tests.fixtures.deployed import client_of, deploy, wait
from tests.fixtures.terraform import render, why_no_terraform
from tests.fixtures.waiting import GIVE_UP_S

NODE = "i-0123456789abcdef0"


@contextmanager
def joined(directory: Path, env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """The command as a service manager runs it, and what it says when it is ready."""
    argv = [sys.executable, "-m", "sllm_runtime.platform", "up", "--node", "--json", "--with-parent"]
    log = directory / "node.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*argv, "--data", str(directory / "node")],
            env={"PATH": os.environ["PATH"], "TMPDIR": str(directory), **QUICK, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        line = Cluster.first_line(process)
        assert line, log.read_text()
        document = json.loads(line)
        yield process, document
    finally:
        process.terminate()
        process.wait(GIVE_UP_S)
        if process.stdout is not None:
            process.stdout.close()
    assert all(start_time(pid) is None for pid in document["pids"].values()), document


def machine(directory: Path, tls: Path, url: str, credentials: Path) -> dict[str, str]:
    """The environment of a machine of the pool: its file as terraform renders it, where terraform is there, what the
    machine adds for itself at its boot, and this test's own access to NATS, which demands certificates of clients."""
    home = str(directory / "node-home")
    named = {"home": home, "nats_url": url, "nats_ca": str(tls / "ca.pem"), "nats_creds": str(credentials)}
    found = rendered(directory / "terraform", named) if why_no_terraform() is None else by_hand(named)
    own = {"SLLM_NODE": NODE, "SLLM_LABELS": "pool=chat", "SLLM_NATS_CERT": str(tls / "client.pem")}
    return found | own | {"SLLM_NATS_KEY": str(tls / "client.key")}


def rendered(home: Path, named: dict[str, str]) -> dict[str, str]:
    """By terraform: what the template makes of them."""
    settings = {"SLLM_CUDA_DEVICES": "", "SLLM_POOL_BYTES": "268435456"}
    template = "modules/gpu_pool/templates/node.env.tftpl"
    text = render(home, template, **named, node_drain_s=90, settings=settings)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def by_hand(named: dict[str, str]) -> dict[str, str]:
    return {f"SLLM_{name.upper()}": value for name, value in named.items()}


@pytest.mark.terraform
def test_a_machines_file_says_what_is_written_by_hand_where_there_is_no_terraform(tmp_path: Path) -> None:
    named = {"home": "/h", "nats_url": "tls://n:4222", "nats_ca": "/h/ca.pem", "nats_creds": "/h/node.creds"}
    assert by_hand(named).items() <= rendered(tmp_path, named).items()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[str, str], Path]]:
    """A platform without a node, and the environment of a machine that is to be one."""
    directory = tmp_path_factory.mktemp("joining")
    tls = make_certificates(directory)
    files = {"cert_file": "server.pem", "key_file": "server.key", "ca_file": "ca.pem"}
    operator = Operator()
    with NatsCluster(
        directory / "nats", {**{key: str(tls / name) for key, name in files.items()}, "verify": True}, operator.config
    ) as nats:
        access = {"CA": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}
        shared = {**nats.env, **{f"SLLM_NATS_{key}": str(tls / name) for key, name in access.items()}}
        all_rights = operator.credentials(directory / "platform.creds", "platform")
        own = operator.credentials(directory / "node.creds", NODE, node_rights(NODE))
        node = machine(directory, tls, nats.url, own)
        with Cluster(directory, nodes=0, env={**shared, "SLLM_NATS_CREDS": str(all_rights)}) as started:
            yield started, node, directory


@pytest.mark.slow
def test_a_call_through_a_node_that_joined_and_its_end(cluster: tuple[Cluster, dict[str, str], Path]) -> None:
    """Each stage of its boot is told; SIGTERM lets the call that runs end, and nothing new starts there."""
    platform, env, directory = cluster
    with joined(directory, env) as (process, document):
        assert document["node"] == NODE
        deploy(platform, "slow_stream", name="paced")
        with client_of(platform) as client:
            assert list(client.stream("paced", {"count": 5, "pause": 0.001})) == list(range(5))
            with closing(client.stream("paced", {"count": 300, "pause": 0.01})) as values:
                assert next(values) == 0
                process.send_signal(signal.SIGTERM)

                def draining() -> bool:
                    return all(node["draining"] for node in platform.http.get(f"{API}/nodes").json()["nodes"])

                wait(draining, "the node says that it takes no more")
                assert list(values) == list(range(1, 300))
        assert process.wait(GIVE_UP_S) == 0
    told = (directory / "node.log").read_text()
    for stage in ("boot machine: ", "boot nats: ", "boot daemons: ", "READY "):
        assert stage in told, told

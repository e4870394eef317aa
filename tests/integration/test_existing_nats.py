"""A whole platform on a NATS server that is there already, over TLS with client certificates."""

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sllm_runtime.platform.nats_server import find_binary, free_port
from sllm_runtime.protocol.limits import MIB
from tests.fixtures.certificates import make_certificates
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import client_of, deploy, wait

FILES = {"CA": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}


@contextmanager
def server(directory: Path, tls: Path) -> Iterator[str]:
    """A server as somebody else runs it: no users of ours, client certificates demanded. Its URL."""
    port = free_port()
    config = {
        "listen": f"127.0.0.1:{port}",
        "max_payload": MIB,
        "jetstream": {"store_dir": str(directory / "store")},
        "tls": {
            "cert_file": str(tls / "server.pem"),
            "key_file": str(tls / "server.key"),
            "ca_file": str(tls / "ca.pem"),
            "verify": True,
        },
    }
    (directory / "nats.conf").write_text(json.dumps(config))
    with (directory / "nats.log").open("wb") as log:
        child = subprocess.Popen([find_binary(), "-c", str(directory / "nats.conf")], stdout=log, stderr=log)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait(listens, lambda: f"it listens; its log: {(directory / 'nats.log').read_text()}")
        yield f"tls://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait(30)


def test_the_main_job_on_a_server_that_is_there_over_tls(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path)
    access = {f"SLLM_NATS_{key}": str(tls / name) for key, name in FILES.items()}
    with server(tmp_path, tls) as url, Cluster(tmp_path, env={"SLLM_NATS_URL": url, **access}) as cluster:
        assert set(cluster.running().pids) == {"controller", "gateway-g1", "invoker-n1", "loaderd-n1"}
        assert not list((cluster.data / "nats").glob("*.conf")), "no server of our own"
        deploy(cluster, "slow_stream", name="paced")
        with client_of(cluster) as client:
            assert list(client.stream("paced", {"count": 20, "pause": 0.001})) == list(range(20))
        cluster.kill("loaderd")
        wait(
            lambda: "loaderd-n1 was started again: it ended with signal 9" in cluster.http.get("/api/v1/events").text,
            "the restart is an event on that server too",
        )

"""A whole platform on a NATS server that is there already, over TLS with client certificates."""

from pathlib import Path

from tests.fixtures.certificates import make_certificates
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import client_of, deploy, wait
from tests.fixtures.existing_nats import server

FILES = {"CA": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}


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

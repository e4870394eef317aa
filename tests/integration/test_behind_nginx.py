"""Two gateways behind nginx, as docs/gateway.md says."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from sllm import Client
from sllm.profiles import Profile
from tests.fixtures.certificates import make_certificates
from tests.fixtures.cluster import Cluster
from tests.fixtures.needs import need
from tests.fixtures.waiting import GIVE_UP_S

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- nginx -->\n```nginx\n(.*?)```", re.S)
SLLM = Path(sys.executable).with_name("sllm")
COUNTER = ROOT / "functions" / "counter" / "function.py"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def nginx(directory: Path, ports: list[int]) -> Iterator[str]:
    need("nginx")
    directory.mkdir()
    made, port = make_certificates(directory), free_port()
    block = BLOCK.search((ROOT / "docs" / "gateway.md").read_text())
    assert block is not None
    site = block[1].replace("listen 443", f"listen 127.0.0.1:{port}")
    for stated, ours in zip((8600, 8601), ports, strict=True):
        site = site.replace(f":{stated}", f":{ours}")
    site = site.replace("/etc/ssl/sllm.pem", f"{made}/server.pem").replace("/etc/ssl/sllm.key", f"{made}/server.key")
    paths = "".join(
        f"{each}_temp_path {directory}/{each};" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.getuid() == 0 else ""
    (directory / "nginx.conf").write_text(
        f"{user} daemon off; pid {directory}/pid; error_log {directory}/log; events {{ worker_connections 256; }}"
        f"http {{ {paths} access_log off; {site} }}"
    )
    words = ["nginx", "-p", str(directory), "-e", f"{directory}/log", "-c", f"{directory}/nginx.conf"]
    process = subprocess.Popen(words)
    try:
        yield f"https://localhost:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(GIVE_UP_S)


def test_sdk_clients_see_next_to_nothing_of_a_rolling_restart_behind_nginx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path, gateways=2) as cluster:
        ports = [int(url.rpartition(":")[2]) for url in cluster.document["urls"]]
        with nginx(tmp_path / "nginx", ports) as url:
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nginx" / "ca.pem"))
            profile = Profile(url, cluster.token)
            env = {**os.environ, "SLLM_URL": url, "SLLM_TOKEN": cluster.token, "SLLM_HOME": str(tmp_path / "client")}
            over, seen = threading.Event(), list[object]()

            def ask() -> None:
                with Client(profile=profile) as mine:
                    while not over.is_set():
                        try:
                            seen.append(mine.call("counter", {"to": 3}) == list(mine.stream("counter", {"to": 3})))
                        except Exception as error:
                            seen.append(error)

            with Client(profile=profile) as client:
                deployed = subprocess.run([SLLM, "fn", "deploy", COUNTER], env=env, capture_output=True, text=True)
                assert deployed.returncode == 0, deployed.stderr
                assert client._http.get(f"{url}/metrics").status_code == 403
                callers = [threading.Thread(target=ask) for _ in range(3)]
                for caller in callers:
                    caller.start()
                for name in ("gateway-g1", "gateway-g2"):
                    was = cluster.pid(name)
                    os.kill(was, signal.SIGTERM)  # the second within nginx's ``fail_timeout`` of 10 s
                    cluster.wait_restarted(name, was)
                told = len(seen)
                until = time.monotonic() + GIVE_UP_S
                while len(seen) < told + 10 and time.monotonic() < until:
                    time.sleep(0.02)
                over.set()
                for caller in callers:
                    caller.join(GIVE_UP_S)
    failed = [str(each) for each in seen if each is not True]
    # A call that nginx sends in the moment in which a gateway closes that connection: it may have been done.
    assert all("HTTP 502" in each and "it may have been done" in each for each in failed), failed
    assert len(failed) <= 3 < len(seen) / 10


def test_a_machine_that_is_gone_costs_each_second_request_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nothing, not even that nobody listens (no power, no network). With ``max_fails=0`` it is tried again
    and again, by every second request, for as long as it stands in the list."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with socket.create_server(("127.0.0.1", 0), backlog=0) as gone, ExitStack() as stack:
        for _ in range(4):  # it takes none of them: from then on what asks for a connection is dropped
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(gone.getsockname())
        with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as lives:
            threading.Thread(target=lives.serve_forever, daemon=True).start()
            with nginx(tmp_path / "nginx", [gone.getsockname()[1], lives.server_address[1]]) as url:
                monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nginx" / "ca.pem"))
                transport = httpx.HTTPTransport(verify=ssl.create_default_context(), retries=20)
                with httpx.Client(timeout=60, transport=transport) as client:
                    assert client.get(f"{url}/livez").status_code == 200
                    began = time.monotonic()
                    assert {client.get(f"{url}/livez").status_code for _ in range(6)} == {200}
                    took = time.monotonic() - began
                lives.shutdown()
    assert took < 10.0  # three of them wait, a second each; 5 s each before

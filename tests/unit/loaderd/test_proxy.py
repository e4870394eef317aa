"""Nodes that reach nothing but by the proxy that their environment names."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sllm_loaderd.sources import Entry, proxies
from sllm_loaderd.sources.attempts import RemoteLimits
from sllm_loaderd.sources.peer import peer_source
from sllm_loaderd.sources.remote import Remote
from sllm_loaderd.sources.remote_object import RemoteObject
from sllm_runtime.protocol.errors import SllmError, Unavailable
from tests.fixtures.certificates import make_certificates, openssl
from tests.fixtures.range_server import range_server
from tests.fixtures.waiting import GIVE_UP_S

SIZE = 300_000
LIMITS = RemoteLimits(GIVE_UP_S, GIVE_UP_S, attempts=2, first_delay_s=0.001, longest_delay_s=0.01)
HOST = "models.invalid"
"""Known to the proxy alone."""


class Proxy(ThreadingHTTPServer):
    """Whatever host is asked for, it is ``to``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.to = ("127.0.0.1", 0)
        self.asked: list[tuple[str, str, str | None]] = []
        self.refuses = 0

    @property
    def url(self) -> str:
        return f"http://somebody:hunter%402@127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_CONNECT(self) -> None:
        self._noted()
        if self.server.refuses:
            self.send_error(self.server.refuses)
            return
        with socket.create_connection(self.server.to) as there:
            self.send_response(200)
            self.end_headers()
            self._relay(there)

    def do_GET(self) -> None:
        self._noted()
        if self.server.refuses:
            self.send_error(self.server.refuses)
            return
        with socket.create_connection(self.server.to) as there:
            target = urlsplit(self.path).path
            head = [f"{self.command} {target} HTTP/1.1", *(f"{k}: {v}" for k, v in self.headers.items())]
            there.sendall("\r\n".join([*head, "Connection: close", "", ""]).encode())
            while data := there.recv(65536):
                self.wfile.write(data)
        self.close_connection = True

    do_HEAD = do_GET

    def _noted(self) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Proxy-Authorization")))

    def _relay(self, there: socket.socket) -> None:
        def back() -> None:
            with contextlib.suppress(OSError):
                while data := there.recv(65536):
                    self.connection.sendall(data)

        thread = threading.Thread(target=back)
        thread.start()
        with contextlib.suppress(OSError):
            while data := self.connection.recv(65536):
                there.sendall(data)
            there.shutdown(socket.SHUT_RDWR)
        thread.join()
        self.close_connection = True

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with Proxy() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        monkeypatch.setenv("HTTPS_PROXY", running.url)
        monkeypatch.setenv("HTTP_PROXY", running.url)
        yield running
        running.shutdown()
        thread.join()


def read(url: str) -> bytes:
    remote, buffer = Remote("http test", limits=LIMITS), bytearray(SIZE)
    try:
        RemoteObject(remote, url, Entry("weights.bin", SIZE)).read(memoryview(buffer), 0)
    finally:
        remote.close()
    return bytes(buffer)


def test_https_is_read_through_it(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_certificates(tmp_path)
    (made / "ext").write_text(f"subjectAltName=DNS:{HOST}\nauthorityKeyIdentifier=keyid\n")
    sign = ["x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    openssl(made, *sign, "-extfile", "ext", "-out", "server.pem")
    (made / "both.pem").write_text((made / "server.key").read_text() + (made / "server.pem").read_text())
    monkeypatch.setenv("SSL_CERT_FILE", str(made / "ca.pem"))
    data = random.Random(1).randbytes(SIZE)
    (tmp_path / "weights.bin").write_bytes(data)
    with range_server(tmp_path, made / "both.pem") as server:
        proxy.to = ("127.0.0.1", server.server_address[1])
        assert read(f"https://{HOST}/weights.bin") == data
    assert proxy.asked == [("CONNECT", f"{HOST}:443", "Basic c29tZWJvZHk6aHVudGVyQDI=")]


def test_http_is_asked_of_it(proxy: Proxy, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(SIZE)
    (tmp_path / "weights.bin").write_bytes(data)
    with range_server(tmp_path) as server:
        proxy.to = ("127.0.0.1", server.server_address[1])
        assert read(f"http://{HOST}/weights.bin") == data
    assert proxy.asked[0] == ("GET", f"http://{HOST}/weights.bin", "Basic c29tZWJvZHk6aHVudGVyQDI=")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_what_it_refuses_is_told_without_its_password(scheme: str, proxy: Proxy) -> None:
    proxy.refuses = 407
    with pytest.raises(Unavailable, match=r"the proxy 127\.0\.0\.1:\d+ .* 407") as told:
        read(f"{scheme}://{HOST}/weights.bin")
    assert "hunter" not in str(told.value)


def test_what_is_no_proxy_of_http_is_refused(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks5://somebody:hunter2@127.0.0.1:9")
    with pytest.raises(SllmError, match="proxy") as told:
        read(f"https://{HOST}/weights.bin")
    assert "hunter" not in str(told.value)


@pytest.mark.parametrize("name", ["NO_PROXY", ""])
def test_what_is_not_asked_through_it(name: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What NO_PROXY names, and this machine."""
    data = random.Random(1).randbytes(SIZE)
    (tmp_path / "weights.bin").write_bytes(data)
    if name:
        monkeypatch.setenv(name, f".{HOST}")
        with pytest.raises(Unavailable, match="no connection"):
            read(f"https://{HOST}/weights.bin")
    else:
        with range_server(tmp_path) as server:
            assert read(f"{server.url}/weights.bin") == data
    assert proxy.asked == []


def test_other_nodes_are_asked_directly(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would be another address than the one that is signed."""
    source = peer_source(f"{HOST}:80/sha256:{'0' * 64}", "token")
    source._remote.limits = LIMITS
    with pytest.raises(SllmError):
        source.entries()
    source.close()
    assert proxy.asked == []


def test_a_proxy_for_all_that_is_none_of_http_keeps_nobody_from_what_is_reached_without(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 does not look at ALL_PROXY: until the release before, bytes of S3 and of http came, and lists of S3 do."""
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.delenv("HTTP_PROXY")
    monkeypatch.setenv("ALL_PROXY", "socks5h://127.0.0.1:9")
    monkeypatch.setattr(proxies, "_here", lambda host: False)
    data = random.Random(1).randbytes(SIZE)
    (tmp_path / "weights.bin").write_bytes(data)
    with range_server(tmp_path) as server:
        assert read(f"{server.url}/weights.bin") == data

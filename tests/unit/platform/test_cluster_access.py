"""An existing NATS cluster instead of the embedded server: TLS, client certificates, no JetStream, nobody there."""

import asyncio
import contextlib
import json
import os
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
import nkeys
import pytest

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.direct import DirectClient
from sllm_runtime.platform.nats_server import EmbeddedNats, find_binary, free_port, new_identity
from sllm_runtime.platform.process import Child
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import InvalidRequest, SllmError, Unauthorized, Unavailable
from tests.fixtures.certificates import make_certificates
from tests.fixtures.credentials import Operator, new_key
from tests.fixtures.waiting import until


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@contextlib.asynccontextmanager
async def serving(certificates: Path, directory: Path) -> AsyncIterator[EmbeddedNats]:
    """A server by these certificates, which wants one of its clients."""
    tls = {"cert_file": "server.pem", "key_file": "server.key", "ca_file": "ca.pem"}
    server = EmbeddedNats(
        directory=directory / "nats",
        identities=(new_identity("controller", "ctl"),),
        tls={**{key: str(certificates / name) for key, name in tls.items()}, "verify": True},
    )
    server.prepare()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def tls_server(certificates: Path, tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    async with serving(certificates, tmp_path) as server:
        yield server


def settings(server: EmbeddedNats, certificates: Path, **names: str) -> Settings:
    files = {f"SLLM_NATS_{key.upper()}": str(certificates / name) for key, name in names.items()}
    return Settings.load({"SLLM_NATS_URL": server.url, "SLLM_IDENTITY_FILE": str(server.identity_file("ctl")), **files})


async def test_tls_with_a_client_certificate(tls_server: EmbeddedNats, certificates: Path) -> None:
    assert tls_server.url.startswith("tls://")
    good = settings(tls_server, certificates, ca="ca.pem", cert="client.pem", key="client.key")
    bus = await Bus.connect(good, "ctl", name="test")
    store = await StateStore.open(bus, create=True)
    assert await store.elect("ctl") == 1
    assert bus.server_certificate == ssl.PEM_cert_to_DER_cert((certificates / "server.pem").read_text())
    await bus.close()
    assert bus.server_certificate is None


@pytest.mark.parametrize(
    "names",
    [
        {"ca": "stranger.pem", "cert": "client.pem", "key": "client.key"},
        {"cert": "client.pem", "key": "client.key"},
        {"ca": "ca.pem"},
        {"ca": "ca.pem", "cert": "stranger.pem", "key": "stranger.key"},
    ],
    ids=["unknown server", "no ca", "no client certificate", "unknown client"],
)
async def test_tls_that_does_not_fit_is_one_clear_error(
    tls_server: EmbeddedNats, certificates: Path, names: dict[str, str]
) -> None:
    with pytest.raises((Unauthorized, Unavailable), match=tls_server.url):
        await Bus.connect(settings(tls_server, certificates, **names), "ctl", name="test")


async def test_a_certificate_file_that_is_none(tls_server: EmbeddedNats, certificates: Path) -> None:
    with pytest.raises(InvalidRequest, match="SLLM_NATS_CA"):
        await Bus.connect(settings(tls_server, certificates, ca="ext"), "ctl", name="test")


@pytest.mark.parametrize("ours", [True, False], ids=["signed by the account", "signed by another"])
async def test_a_credentials_file(tmp_path: Path, ours: bool) -> None:
    operator = Operator()
    stranger = None if ours else new_key(nkeys.PREFIX_BYTE_ACCOUNT)
    creds = operator.credentials(tmp_path / "user.creds", "controller", signer=stranger)
    port, config, log = free_port(), tmp_path / "nats.conf", tmp_path / "nats.log"
    document = {
        "listen": f"127.0.0.1:{port}",
        **operator.config,
        "jetstream": {"store_dir": str(tmp_path / "store")},
    }
    config.write_text(json.dumps(document))
    child = Child(name="nats", argv=[str(find_binary()), "-c", str(config)], env={}, output=log)
    await child.start()
    try:
        given = {"SLLM_NATS_URL": f"nats://127.0.0.1:{port}", "SLLM_NATS_CREDS": str(creds)}
        if not ours:
            with pytest.raises(Unauthorized, match="SLLM_NATS_CREDS"):
                await Bus.connect(Settings.load(given), "ctl", name="test")
            return
        bus = await Bus.connect(Settings.load(given), "ctl", name="test")
        store = await StateStore.open(bus, create=True)
        assert await store.elect("ctl") == 1
        await bus.close()
    finally:
        await child.stop(5)


async def _refusal(directory: Path, *, jetstream: bool, kind: str = "controller") -> SllmError:
    server = EmbeddedNats(directory=directory, identities=(new_identity(kind, "ctl"),), jetstream=jetstream)
    server.prepare()
    await server.start()
    try:
        given = {"SLLM_NATS_URL": server.url, "SLLM_IDENTITY_FILE": str(server.identity_file("ctl"))}
        with pytest.raises(SllmError) as caught:
            await Bus.connect(Settings.load(given), "ctl", name="test")
    finally:
        await server.stop()
    return caught.value


async def test_no_jetstream_is_one_clear_error(tmp_path: Path) -> None:
    error = await _refusal(tmp_path / "nats", jetstream=False)
    assert isinstance(error, Unavailable)
    assert "has no JetStream for ctl" in error.message
    assert "-js" in error.message


async def test_nobody_there_is_one_clear_error() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match=f"no NATS server at {url} .*check SLLM_NATS_URL"):
        await Bus.connect(Settings.load({"SLLM_NATS_URL": url, "SLLM_NATS_TIMEOUT": "0.5"}), "n1", name="test")


async def test_an_empty_place_among_urls_is_none() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match="no NATS server at"):
        await Bus.connect(Settings.load({"SLLM_NATS_URL": f" {url} ,", "SLLM_NATS_TIMEOUT": "0.5"}), "n1", name="test")


@pytest.mark.parametrize("url", ["nats://127.0.0.1:99999", "nats://127.0.0.1:4222,nats://", "a:b"])
async def test_what_names_no_server_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidRequest, match="SLLM_NATS_URL"):
        await Bus.connect(Settings.load({"SLLM_NATS_URL": url, "SLLM_NATS_TIMEOUT": "0.5"}), "n1", name="test")


async def test_no_url_says_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match="sllm up"):
        await Bus.connect(Settings.load({}), "n1", name="test")


async def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    server = EmbeddedNats(directory=tmp_path / "nats", identities=(new_identity("node", "n1"),))
    server.prepare()
    os.truncate(server.config_file, 50)
    with pytest.raises(Unavailable, match="Parse error on line 3"):
        await server.start()
    await server.stop()


def renew(certificates: Path) -> None:
    """Another authority, and by it new certificates of server and client, in place of the files of before."""
    for old in certificates.iterdir():
        old.unlink()
    make_certificates(certificates)


async def test_certificates_renewed_in_place_are_read_at_the_next_connection(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    tls = make_certificates(tmp_path / "tls")
    async with serving(tls, tmp_path) as server:
        own = settings(server, tls, ca="ca.pem", cert="client.pem", key="client.key")
        bus = await Bus.connect(own, "ctl", name="t")
        try:
            await server.stop()
            renew(tls)
            await server.start()
            await until(lambda: bus.connected, what="it is connected by the files that are there now")
        finally:
            await bus.close()


async def test_credentials_that_are_none_for_a_while_do_not_end_the_reconnecting(tmp_path: Path) -> None:
    operator = Operator()
    creds = operator.credentials(tmp_path / "user.creds", "controller")
    good = creds.read_text()
    port, config, log = free_port(), tmp_path / "nats.conf", tmp_path / "nats.log"
    config.write_text(
        json.dumps(
            {"listen": f"127.0.0.1:{port}", **operator.config, "jetstream": {"store_dir": str(tmp_path / "store")}}
        )
    )

    async def started() -> Child:
        child = Child(name="nats", argv=[str(find_binary()), "-c", str(config)], env={}, output=log)
        await child.start()
        return child

    child = await started()
    given = {"SLLM_NATS_URL": f"nats://127.0.0.1:{port}", "SLLM_NATS_CREDS": str(creds)}
    bus = await Bus.connect(Settings.load(given), "ctl", name="test")
    try:
        await child.stop(5)
        creds.write_text("")
        child = await started()
        await asyncio.sleep(2)
        assert not bus.connected
        creds.write_text(good)
        await until(lambda: bus.connected, 15, what="it is connected by the credentials that are there now")
    finally:
        await bus.close()
        await child.stop(5)


async def test_who_is_refused_when_the_server_comes_back_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tls").mkdir()
    (tmp_path / "own").mkdir()
    tls = make_certificates(tmp_path / "tls")
    for name in ("client.pem", "client.key", "ca.pem"):
        (tmp_path / "own" / name).write_bytes((tls / name).read_bytes())
    async with serving(tls, tmp_path) as server:
        own = settings(server, tmp_path / "own", ca="ca.pem", cert="client.pem", key="client.key")
        bus = await Bus.connect(own, "ctl", name="t")
        try:
            await server.stop()
            renew(tls)
            (tmp_path / "own" / "ca.pem").write_bytes((tls / "ca.pem").read_bytes())
            await server.start()
            await until(lambda: "SLLM_NATS_CERT" in caplog.text, what="it says so")
        finally:
            await bus.close()


class _Stuck(BaseException):
    """Which nothing on the way takes for an error."""


def test_credentials_of_a_seed_alone_fail_a_try_and_do_not_hold_the_loop(tmp_path: Path) -> None:
    """nats-py looks for the JWT line by line, and past the end of the file for ever: whoever has connected hangs."""
    creds = Operator().credentials(tmp_path / "user.creds", "controller")
    text = creds.read_text()
    creds.write_text(text[text.index("-----BEGIN USER NKEY SEED") :])
    client = DirectClient()
    client.options.update({"verbose": False, "pedantic": False, "name": None, "no_echo": None, "token": None})
    client._server_info = {"nonce": "nonce"}
    client._auth_configured, client._user_credentials = True, str(creds)
    client._setup_nkeys_connect()

    def stuck(*_: object) -> None:
        raise _Stuck

    before = signal.signal(signal.SIGALRM, stuck)
    signal.setitimer(signal.ITIMER_REAL, 5)
    try:
        with pytest.raises(nats.errors.Error, match="credentials"):
            client._connect_command()
        creds.write_text(text)
        assert b'"jwt"' in client._connect_command()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def test_who_is_refused_at_first_is_not_told_that_it_is_asked_again_for_ever(
    tls_server: EmbeddedNats, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not: that is an error, and the end of who asked."""
    wrong = settings(tls_server, certificates, ca="stranger.pem", cert="client.pem", key="client.key")
    with pytest.raises(SllmError):
        await Bus.connect(wrong, "ctl", name="test")
    assert "asked again for ever" not in caplog.text

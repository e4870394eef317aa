"""Keys of a cluster, against a real server that knows nothing but its accounts."""

import base64
import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import nats
import pytest

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.cluster_keys import (
    Cluster,
    credentials,
    main,
    new_cluster,
    read_key,
    renew,
    renewed,
    write,
)
from sllm_runtime.platform.nats_server import find_binary, free_port
from sllm_runtime.platform.process import Child
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import InvalidRequest, SllmError, Unauthorized
from sllm_runtime.protocol.subjects import Rights
from tests.fixtures.waiting import GIVE_UP_S

CLUSTER = new_cluster(1)


class Server:
    """A server with the accounts of ``CLUSTER``."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()

    def settings(self, kind: str, name: str, cluster: Cluster = CLUSTER) -> Settings:
        creds = self.directory / f"{name}.creds"
        creds.write_text(credentials(cluster.keys[kind], name, 1))
        url = f"nats://127.0.0.1:{self.port}"
        return Settings.load({"SLLM_NATS_URL": url, "SLLM_NATS_CREDS": str(creds), "SLLM_NATS_TIMEOUT": str(GIVE_UP_S)})

    @contextlib.asynccontextmanager
    async def running(self, cluster: Cluster = CLUSTER) -> AsyncIterator[None]:
        """With the same store as before."""
        config, store = self.directory / "nats.conf", {"jetstream": {"store_dir": str(self.directory / "store")}}
        config.write_text(json.dumps({"listen": f"127.0.0.1:{self.port}", **store, **cluster.accounts}))
        argv = [str(find_binary()), "-c", str(config)]
        child = Child(name="nats", argv=argv, env={}, output=self.directory / "nats.log")
        await child.start()
        try:
            yield
        finally:
            await child.stop(5)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    found = Server(tmp_path)
    async with found.running():
        yield found


async def test_each_kind_has_its_rights_under_its_own_name(server: Server) -> None:
    controller = await Bus.connect(server.settings("controller", "c1"), "c1", name="test", kind="controller")
    assert await (await StateStore.open(controller, create=True)).elect("c1") == 1
    await controller.close()
    gateway = await Bus.connect(server.settings("gateway", "g1"), "g1", name="test", kind="gateway")
    assert gateway.new_inbox().startswith("_INBOX_.gateway.g1.")
    await gateway.close()

    text = await refused(
        server.settings("node", "n1"),
        "n1",
        publish=(subjects.status("n1"), subjects.status("n2"), "$KV.sllm_state.term"),
        subscribe=(subjects.node_command("n1", "start"), subjects.node_command("n2", "start")),
    )
    assert len(text) == 3, text
    for subject in (subjects.status("n2"), subjects.node_command("n2", "start"), "$kv.sllm_state.term"):
        assert subject in " ".join(text).lower()


async def refused(settings: Settings, name: str, *, publish: Sequence[str], subscribe: Sequence[str]) -> list[str]:
    """What the server says of them."""
    said: list[str] = []

    async def told(error: Exception) -> None:
        if not isinstance(error, OSError):  # it may not listen yet
            said.append(str(error))

    connection = await nats.connect(
        str(settings.nats_url),
        user_credentials=str(settings.nats_creds),
        error_cb=told,
        connect_timeout=int(GIVE_UP_S),
    )
    for subject in publish:
        await connection.publish(subject, b"x")
    for subject in subscribe:
        await connection.subscribe(subject)
    for _ in range(2):  # it writes its ping before what it has buffered; what is refused is told before the answer
        await connection.flush(int(GIVE_UP_S))
    await connection.close()
    return said


@pytest.mark.parametrize("other", ["controller", "gateway"])
@pytest.mark.parametrize("name", ["c1", ".{other}.c1", "", ".*.c1"])
async def test_no_name_makes_a_node_hear_what_another_kind_is_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch, other: str, name: str
) -> None:
    """Whoever has the nodes' key signs names as it likes, also such as we make none."""
    name = name.format(other=other)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(subjects, "token", lambda text: text)
        settings = server.settings("node", name)
    its = subjects.inbox(other, "c1")
    wanted = (f"{its}.>", f"{its}.*", f"{its}.x", "_INBOX_.>", "_INBOX_.*.c1.>", "_INBOX_.*.*.*", f"_INBOX_.{other}.>")
    said = await refused(settings, name, publish=(), subscribe=wanted)
    assert len(said) == len(wanted), said


@pytest.mark.parametrize("kind", ["controller", "gateway"])
async def test_a_component_of_the_release_before_hears_its_answers(server: Server, kind: str) -> None:
    """Its inbox has its name alone, as a node's; the servers have this release's rights before it."""
    settings = server.settings(kind, "c1")
    assert await refused(settings, "c1", publish=(), subscribe=("_INBOX_c1.>", f"{subjects.inbox(kind, 'c1')}.>")) == []


async def test_the_key_of_another_cluster_is_refused(server: Server) -> None:
    with pytest.raises(SllmError, match="SLLM_NATS_CREDS"):
        await Bus.connect(server.settings("node", "n1", new_cluster(1)), "n1", name="test", jetstream=False)


async def test_a_later_release_has_its_rights_in_the_same_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the credentials and the state of before."""

    def of_before(name: str) -> Rights:
        return Rights(publish=("$JS.API.INFO",), subscribe=(f"_INBOX_{name}.>",))

    with monkeypatch.context() as before:
        before.setattr(subjects, "RIGHTS", {**subjects.RIGHTS, "gateway": of_before})
        old = new_cluster(1)
    write(old, tmp_path / "secrets")
    server = Server(tmp_path)
    controller, gateway = server.settings("controller", "c1", old), server.settings("gateway", "g1", old)

    async def elected() -> int:
        bus = await Bus.connect(controller, "c1", name="test")
        store = await StateStore.open(bus, create=True)
        term = await store.elect("c1")
        await store.close()
        await bus.close()
        return term

    async with server.running(old):
        assert await elected() == 1
        assert len(await refused(gateway, "g1", publish=(), subscribe=(subjects.LEADER,))) == 1
    assert main(["renew", str(tmp_path / "secrets")]) == 0
    accounts = json.loads((tmp_path / "secrets/nats/accounts").read_text())
    async with server.running(dataclasses.replace(old, accounts=accounts)):
        assert await elected() == 2
        assert await refused(gateway, "g1", publish=(), subscribe=(subjects.LEADER,)) == []
        assert len(await refused(gateway, "g1", publish=(), subscribe=(subjects.node_command("n1", "start"),))) == 1


async def test_a_key_is_replaced_while_both_are_good_and_then_the_old_one_is_none(tmp_path: Path) -> None:
    """In the same account; other kinds' keys stay."""
    secrets = tmp_path / "secrets"
    write(CLUSTER, secrets)
    server = Server(tmp_path)

    def accounts() -> Cluster:
        return dataclasses.replace(CLUSTER, accounts=json.loads((secrets / "nats/accounts").read_text()))

    async def joins(cluster: Cluster, kind: str = "node") -> bool:
        try:
            bus = await Bus.connect(server.settings(kind, "n1", cluster), "n1", name="test", jetstream=False)
        except Unauthorized:
            return False
        await bus.close()
        return True

    assert main(["rotate", str(secrets), "node"]) == 0
    key = read_key((secrets / "node/key").read_text())
    after = dataclasses.replace(CLUSTER, keys={**CLUSTER.keys, "node": key})
    assert main(["renew", str(secrets)]) == 0
    async with server.running(accounts()):
        assert [await joins(cluster) for cluster in (CLUSTER, after)] == [True, True]
    assert main(["rotate", str(secrets), "node"]) == 1, "one after the other"
    assert main(["retire", str(secrets), "node"]) == 0
    async with server.running(accounts()):
        assert [await joins(cluster) for cluster in (CLUSTER, after)] == [False, True]
        assert await joins(CLUSTER, "gateway")


def test_what_cannot_be_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(CLUSTER, tmp_path)
    write(new_cluster(1), tmp_path / "another")
    (tmp_path / "node/key").write_text((tmp_path / "another/node/key").read_text())
    (tmp_path / "controller/key").unlink()
    for verb, kind, why in (
        ("rotate", "operator", "no kind of component"),
        ("rotate", "node", "not the only key"),
        ("retire", "node", "the account does not know node/key"),
        ("retire", "gateway", ""),
        ("rotate", "controller", "cannot be read"),
    ):
        assert main([verb, str(tmp_path), kind]) == int(bool(why))
        assert why in capsys.readouterr().err


def test_what_the_parameter_store_would_not_take_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine with a gateway has a controller's key too: who replaces both at once is told, with all as it was."""
    write(CLUSTER, tmp_path)
    for kind in ("controller", "gateway", "node"):
        before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
        if main(["rotate", str(tmp_path), kind]) != 0:
            assert "`retire` another kind's key of before first" in capsys.readouterr().err
            assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert (tmp_path / "nats/accounts").stat().st_size <= 8192, kind


def test_what_cannot_be_renewed(tmp_path: Path) -> None:
    accounts = {**CLUSTER.accounts}
    assert renewed(accounts, CLUSTER.operator, 1)["resolver_preload"].keys() == accounts["resolver_preload"].keys()
    for those, seed, why in (
        (accounts, new_cluster(1).operator, "another operator's"),
        (accounts, "SO-no-seed", "files that `new` wrote"),
        (accounts, CLUSTER.keys["node"].seed, "another operator's"),
        ({**accounts, "operator": "rubbish"}, CLUSTER.operator, "files that `new` wrote"),
        ({**accounts, "resolver_preload": {}}, CLUSTER.operator, "files that `new` wrote"),
        ({}, CLUSTER.operator, "files that `new` wrote"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            renewed(those, seed, 1)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        renew(tmp_path, 1)


def test_what_lies_in_the_store(tmp_path: Path) -> None:
    write(CLUSTER, tmp_path)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    keys = {"controller/key", "gateway/key", "node/key", "controller/secrets-key"}
    assert files == keys | {"nats/accounts", "operator/seed", "node/peer-token", "gateway/token"}
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o600 for name in files)
    assert "SA" not in {word[:2] for word in (tmp_path / "nats/accounts").read_text().split('"')}, "no seed"


def test_the_command_that_a_machine_runs(tmp_path: Path) -> None:
    write(CLUSTER, tmp_path)
    command = [sys.executable, "-m", "sllm_runtime.platform.cluster_keys", "join"]
    key = (tmp_path / "node/key").read_text()
    done = subprocess.run([*command, "i-0abc"], input=key, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("-----BEGIN NATS USER JWT-----\n")
    wrong = subprocess.run([*command, "i-0abc"], input="{}", capture_output=True, text=True, timeout=120, check=False)
    assert wrong.returncode == 1
    assert "no component's key" in wrong.stderr


@pytest.mark.parametrize("name", ["", "a.b", "*", "x y"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be part of a subject"):
        credentials(CLUSTER.keys["node"], name, 1)


def test_a_key_says_nothing_of_its_seed() -> None:
    key = CLUSTER.keys["node"]
    assert key.seed not in repr(key)
    with pytest.raises(InvalidRequest):
        read_key("not JSON")


@pytest.mark.parametrize("kind", ["controller", "gateway", "node"])
def test_the_rights_are_those_of_the_protocol(kind: str) -> None:
    tokens = CLUSTER.accounts["resolver_preload"].values()
    bodies = [json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "==")) for token in tokens]
    (account,) = [body["nats"] for body in bodies if "signing_keys" in body["nats"]]
    (scope,) = [scope["template"] for scope in account["signing_keys"] if scope["role"] == kind]
    rights = subjects.RIGHTS[kind]("n1")
    for direction, wanted in (("pub", rights.publish), ("sub", rights.subscribe)):
        assert [subject.replace("{{name()}}", "n1") for subject in scope[direction]["allow"]] == list(wanted)
    assert scope["sub"]["deny"] == list(rights.unheard)

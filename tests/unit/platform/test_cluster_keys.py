"""Keys of a cluster, against a real server that knows nothing but its accounts."""

import base64
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.cluster_keys import Cluster, credentials, new_cluster, read_key, write
from sllm_runtime.platform.nats_server import find_binary, free_port
from sllm_runtime.platform.process import Child
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import InvalidRequest, SllmError
from tests.fixtures.waiting import GIVE_UP_S, until

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


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    found = Server(tmp_path)
    store = {"jetstream": {"store_dir": str(tmp_path / "store")}}
    (tmp_path / "nats.conf").write_text(json.dumps({"listen": f"127.0.0.1:{found.port}", **store, **CLUSTER.accounts}))
    argv = [str(find_binary()), "-c", str(tmp_path / "nats.conf")]
    child = Child(name="nats", argv=argv, env={}, output=tmp_path / "nats.log")
    await child.start()
    yield found
    await child.stop(5)


async def test_each_kind_has_its_rights_under_its_own_name(server: Server) -> None:
    controller = await Bus.connect(server.settings("controller", "c1"), "c1", name="test")
    assert await (await StateStore.open(controller, create=True)).elect("c1") == 1
    await controller.close()

    refused: list[str] = []

    async def told(error: Exception) -> None:
        refused.append(str(error))

    node = await nats.connect(
        f"nats://127.0.0.1:{server.port}",
        user_credentials=str(server.settings("node", "n1").nats_creds),
        inbox_prefix=subjects.inbox("n1"),
        error_cb=told,
        connect_timeout=int(GIVE_UP_S),
    )
    for subject in (subjects.status("n1"), subjects.status("n2"), "$KV.sllm_state.term"):
        await node.publish(subject, b"x")
    for subject in (subjects.node_command("n1", "start"), subjects.node_command("n2", "start")):
        await node.subscribe(subject)
    # In the order of what was sent: after the last one there comes no more.
    await until(lambda: len(refused) >= 3, what=lambda: f"three are refused: {refused}")
    await node.close()
    text = " ".join(refused).lower()
    assert len(refused) == 3, refused
    assert subjects.status("n2") in text
    assert subjects.node_command("n2", "start") in text
    assert "$kv.sllm_state.term" in text


async def test_the_key_of_another_cluster_is_refused(server: Server) -> None:
    with pytest.raises(SllmError, match="SLLM_NATS_CREDS"):
        await Bus.connect(server.settings("node", "n1", new_cluster(1)), "n1", name="test", jetstream=False)


def test_what_lies_in_the_store(tmp_path: Path) -> None:
    write(CLUSTER, tmp_path)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    keys = {"controller/key", "gateway/key", "node/key", "controller/secrets-key"}
    assert files == keys | {"nats/accounts", "node/peer-token", "gateway/token"}
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

"""What a function cannot reach: the real fork server in its namespace, the real worker, functions that try."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sllm_invoker.fork_server import ZYGOTE
from sllm_runtime.protocol.manifest import Handler, HandlerKind, Manifest
from sllm_runtime.protocol.node import StartInstance
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.invoker import NodeUnderTest, node_under_test, store_bundle
from tests.fixtures.nats import Nats, nats  # noqa: F401 - a fixture is used by being here
from tests.fixtures.waiting import GIVE_UP_S

SOURCE = """
import ctypes, errno, os, socket, threading

def look(paths):
    found = {}
    for path in paths:
        try:
            found[path] = sorted(os.listdir(path)) if os.path.isdir(path) else open(path).read()
        except OSError as error:
            found[path] = errno.errorcode[error.errno]
    return found

def connect(addresses):
    found = []
    for host, port in addresses:
        with socket.socket() as sock:
            sock.settimeout(5)
            number = sock.connect_ex((host, port))
            found.append(errno.errorcode.get(number, number))
    return found

def undo(paths):
    libc = ctypes.CDLL(None, use_errno=True)
    found = []
    for path in paths:
        found.append(libc.umount2(path.encode(), 2) and errno.errorcode[ctypes.get_errno()])
    # In namespaces of its own a process has all rights again; what was mounted before is locked together there.
    pid = os.fork()
    if pid == 0:
        libc.unshare(0x10000000 | 0x00020000)
        os._exit(any(libc.umount2(path.encode(), 2) == 0 for path in paths))
    found.append(os.waitpid(pid, 0)[1])
    return found

def privileges():
    def read():
        with open("/proc/thread-self/status") as file:
            return {line.split(":")[0]: line.split()[1] for line in file if line.startswith(("Cap", "NoNewPrivs"))}
    threads = []
    thread = threading.Thread(target=lambda: threads.append(read()))
    thread.start()
    thread.join()
    return [read(), *threads]

def environment():
    return dict(os.environ)

async def dies_with_parent():  # on the loop, hence in the main thread, which alone has it
    signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal), 0, 0, 0)
    return signal.value

def loopback():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        other, _ = server.accept()
        with other:
            client.sendall(b"hello")
            return other.recv(5).decode()
"""


@pytest.fixture
async def node(nats: Nats, tmp_path: Path) -> AsyncIterator[NodeUnderTest]:  # noqa: F811
    secrets = tmp_path / "platform"
    secrets.mkdir()
    (secrets / "token").write_text("secret")
    (tmp_path / "token").write_text("secret")
    private = [tmp_path / "nats", secrets, tmp_path / "token"]
    async with node_under_test(
        nats, tmp_path, fork_server=ZYGOTE, pool_size=1, private=private, home=tmp_path / "home"
    ) as under:
        yield under


class Deployed:
    """The bundle's functions, each started once for a call."""

    def __init__(self, node: NodeUnderTest, digest: str, nbytes: int) -> None:
        self.node, self.digest, self.nbytes = node, digest, nbytes

    async def call(self, entry: str, *, network: bool = False, kind: HandlerKind = "function", **arguments: Any) -> Any:
        made = Manifest(
            name="tries",
            handler=Handler(entry=f"user:{entry}", kind=kind, streams=False),
            memory=512 * 2**20,
            network=network,
        )
        name = f"i-{entry}-{time.monotonic_ns()}"
        order = StartInstance(
            term=1, instance=name, function="tries", version=1, manifest=made,
            bundle=self.digest, bundle_bytes=self.nbytes,
        )  # fmt: skip
        await self.node.command("start", order)
        await self.node.reaches(name, InstanceState.READY)
        _, call = await self.node.gateway.open(name, json.dumps(arguments).encode())
        end = await self.node.gateway.ended(call)
        assert end.error is None, end.error
        await self.node.stop(name)
        await self.node.reaches(name, InstanceState.STOPPED)
        (value,) = call.values
        return msgspec.json.decode(value)


@pytest.fixture
async def deployed(node: NodeUnderTest) -> Deployed:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("user.py", SOURCE)
    packed = buffer.getvalue()
    return Deployed(node, await store_bundle(node.controller, packed), len(packed))


def has_something(name: str) -> bool:
    path = Path(name)
    return bool(list(path.iterdir()) if path.is_dir() else path.read_text())


@pytest.mark.namespaces
async def test_what_a_function_cannot_reach(deployed: Deployed, nats: Nats, tmp_path: Path) -> None:  # noqa: F811
    """One node for all of it: making a fork server takes seconds."""
    identity = str(nats.server.identity_file("n1"))
    paths = [identity, str(nats.server.config_file), str(tmp_path / "platform"), str(tmp_path / "token")]
    assert all(map(has_something, paths)), "there is something to hide"
    node_data = tmp_path / "node"
    found = await deployed.call("look", paths=[*paths, str(node_data), str(node_data / "work"), os.devnull])
    assert found[identity] == found[str(nats.server.config_file)] == "ENOENT"
    assert found[str(tmp_path / "platform")] == []
    assert found[str(tmp_path / "token")] == ""
    assert found[str(node_data)] == ["tmp", "work"], "its own directories and nothing else of its node"
    assert len(found[str(node_data / "work")]) == 1

    *unmounted, in_its_own = await deployed.call("undo", paths=[str(tmp_path / "nats"), str(node_data)])
    assert unmounted == ["EPERM", "EPERM"]
    assert in_its_own == 0

    of_threads = await deployed.call("privileges")
    assert len(of_threads) == 2
    for status in of_threads:
        assert status.pop("NoNewPrivs") == "1"
        assert {int(value, 16) for value in status.values()} == {0}
    environment = await deployed.call("environment")
    assert not {key for key in environment if key.startswith("SLLM_")} - {"SLLM_NODE", "SLLM_PARENT_PID"}
    assert await deployed.call("dies_with_parent", kind="async_function") == signal.SIGKILL


@pytest.mark.network_namespaces
async def test_the_network_is_for_functions_that_ask_for_it(deployed: Deployed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        accepting = threading.Thread(target=lambda: server.accept()[0].close(), daemon=True)
        accepting.start()
        addresses = [["192.0.2.1", 9], ["8.8.8.8", 53], ["127.0.0.1", port]]
        without = await deployed.call("connect", addresses=addresses)
        assert without == ["ENETUNREACH", "ENETUNREACH", "ECONNREFUSED"]
        assert await deployed.call("connect", network=True, addresses=[["127.0.0.1", port]]) == [0]
        accepting.join(GIVE_UP_S)
    assert await deployed.call("loopback") == "hello", "what its own processes say to each other stays possible"


FORBIDDEN = """
import ctypes, errno, json, os
from sllm_runtime.worker import zygote
leave = zygote._isolate()
libc = ctypes.CDLL(None, use_errno=True)
pid = os.fork()
if pid == 0:
    os._exit(libc.unshare(0x10000000) and ctypes.get_errno())
print(json.dumps([leave.name, errno.errorcode.get(os.waitpid(pid, 0)[1] >> 8), libc.unshare(0x40000000)]))
"""


@pytest.mark.network_namespaces
def test_no_function_makes_namespaces_of_its_own_where_the_fork_server_has_one() -> None:
    """They would be the user's, of whom there are so many: without one for its network no function starts."""
    words = ("unshare", "--user", "--map-user=12345", "--keep-caps", "--pid", "--fork", "--kill-child", "--mount-proc")
    told = subprocess.run([*words, sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, timeout=GIVE_UP_S)
    assert told.stderr == ""
    assert json.loads(told.stdout) == ["FOR_GOOD", "ENOSPC", 0], "a worker still leaves the network"
    assert Path("/proc/sys/user/max_user_namespaces").read_text() != "0\n", "the machine's own are as they were"

"""``python -m sllm_invoker`` as the supervisor runs it: its beginning, its end, and its sudden death."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.node import NodeStatus, Ok, StartInstance
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.invoker import BUNDLE, SCRIPTED, GatewayPeer, order, store_bundle
from tests.fixtures.nats import CONTROLLER, GATEWAY, NODE, Nats, nats  # noqa: F401 - a fixture is used by being here
from tests.fixtures.waiting import GIVE_UP_S, dead, until


@dataclass
class Daemon:
    """A running invoker."""

    process: asyncio.subprocess.Process
    controller: Bus
    gateway: GatewayPeer
    statuses: list[NodeStatus]
    log: Path

    async def start(self, script: str) -> str:
        wanted: StartInstance = order(script)
        await self.controller.call(subjects.node_command(NODE, "start"), wanted, Ok)
        await until(
            lambda: any(
                instance.instance == wanted.instance and instance.state is InstanceState.READY
                for instance in self.statuses[-1].instances
            ),
            20.0,
            "it is ready",
        )
        return wanted.instance

    def family(self) -> list[psutil.Process]:
        """All its descendants."""
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
async def daemon(nats: Nats, tmp_path: Path) -> AsyncIterator[Daemon]:  # noqa: F811
    controller = await nats.streams()
    await store_bundle(controller, BUNDLE)
    gateway = GatewayPeer(await nats.bus(GATEWAY))
    await gateway.start()
    statuses: list[NodeStatus] = []
    await controller.subscribe(subjects.STATUS_ALL, NodeStatus, lambda status, _: statuses.append(status))
    await controller.flush()
    ready, theirs = os.pipe()
    settings = {
        "SLLM_NODE": NODE,
        "SLLM_DATA_DIR": str(tmp_path / "node"),
        "SLLM_LOADERD_SOCKET": str(tmp_path / "none"),
        "SLLM_FORK_SERVER": json.dumps(SCRIPTED),
        "SLLM_GPUS": "L4:24GiB",
        "SLLM_LABELS": "zone=a",
        "SLLM_READY_FD": str(theirs),
    }
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sllm_invoker", env={**os.environ, **nats.env(NODE), **settings},
            pass_fds=[theirs], stderr=log,
        )  # fmt: skip
    os.close(theirs)
    try:
        with os.fdopen(ready, "rb") as pipe:
            assert await asyncio.to_thread(pipe.readline) == b"READY\n", (tmp_path / "log").read_text()
        await until(lambda: statuses, what="it reported")
        yield Daemon(process, controller, gateway, statuses, tmp_path / "log")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await gateway.close()


async def test_it_says_what_it_has_and_is_named_for_ps(daemon: Daemon) -> None:
    await until(lambda: daemon.statuses[-1].python, what="its fork server is ready")
    status = daemon.statuses[-1]
    assert (status.node, status.labels, status.drivers) == (NODE, {"zone": "a"}, ("process",))
    assert [(gpu.kind, gpu.memory, gpu.used_by) for gpu in status.gpus] == [("L4", 24 * 2**30, None)]
    assert status.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert psutil.Process(daemon.process.pid).cmdline()[0].startswith(f"sllm-invoker {NODE}")
    await until(lambda: daemon.statuses[-1].pool_idle == 2, what="its pool is filled")
    assert daemon.statuses[-1].sandbox_s > 0, "what a start takes that finds the pool empty"


async def test_sigterm_ends_everything_in_order_and_callers_are_told(daemon: Daemon) -> None:
    instance = await daemon.start("wait")
    _, call = await daemon.gateway.open(instance)
    family = daemon.family()
    daemon.process.send_signal(signal.SIGTERM)
    end = await daemon.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "instance_lost"
    assert "shutting down" in end.error.message
    async with asyncio.timeout(GIVE_UP_S):
        assert await daemon.process.wait() == 0, daemon.log.read_text()
    await dead(family)
    await until(lambda: daemon.statuses[-1].draining, what="it has said that it drains")
    await until(lambda: {status.state for status in daemon.statuses[-1].instances} == {InstanceState.STOPPED})


@pytest.mark.namespaces
async def test_nothing_survives_its_sudden_death(daemon: Daemon) -> None:
    """Without a namespace `sllm up` ends what is left."""
    await daemon.start("daemon fork")
    await until(lambda: "sleep" in [process.name() for process in daemon.family()], what="a detached grandchild")
    family = daemon.family()
    daemon.process.kill()
    await dead(family)


async def test_a_fork_server_that_is_killed_takes_its_workers_and_comes_back(daemon: Daemon) -> None:
    instance = await daemon.start("wait")
    _, call = await daemon.gateway.open(instance)
    family = daemon.family()
    psutil.Process(daemon.process.pid).children()[0].kill()
    end = await daemon.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "instance_lost"
    await dead(family)
    await daemon.start("wait")


@pytest.mark.parametrize("wrong", [{"SLLM_POOL_SIZE": "many"}, {"SLLM_PRELOAD": "everything"}])
def test_a_wrong_setting_is_named(wrong: dict[str, str]) -> None:
    needed = {"SLLM_NODE": "n1", "SLLM_DATA_DIR": "/nowhere", "SLLM_LOADERD_SOCKET": "/nowhere"}
    env = {"PATH": os.environ["PATH"], **needed, **wrong}
    done = subprocess.run([sys.executable, "-m", "sllm_invoker"], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith(f"sllm-invoker: {next(iter(wrong))}")


def test_the_daemon_imports_nothing_heavy() -> None:
    code = "import sllm_invoker.__main__, sys; print({'torch', 'transformers', 'numpy', 'boto3'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "set()"

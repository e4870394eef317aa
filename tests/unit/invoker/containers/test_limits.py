"""How a sandbox that waits gets its function's limits: by its control group, else by the engine."""

import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sllm_invoker.containers.arguments import User
from sllm_invoker.containers.control_group import Controller, Group
from sllm_invoker.containers.engine import Engine, EngineFailed
from sllm_invoker.containers.monitor import Monitor
from sllm_invoker.containers.rendezvous import Rendezvous
from sllm_invoker.containers.sandbox import ContainerSandbox, Parts
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.wire import AsyncWire
from tests.fixtures.waiting import until

GIB = 2**30
UPDATE = "update --memory 3221225472 --memory-swap 3221225472 --cpus 2 sb-1\n"
Make = Callable[[Group | None], ContainerSandbox]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """It writes down what it is told, and refuses to limit while ``refuse`` is there."""
    program = tmp_path / "engine"
    program.write_text(f"""#!/bin/sh
echo "$@" >> {tmp_path}/said
if [ "$1" = update ] && [ -e {tmp_path}/refuse ]; then echo no such group >&2; exit 125; fi
""")
    program.chmod(0o755)
    (tmp_path / "said").touch()
    return Engine("docker", str(program))


@pytest.fixture
async def make(engine: Engine, tmp_path: Path) -> AsyncIterator[Make]:
    """A sandbox whose process 1 is a `cat`: it ends when its connection does."""
    me = User(uid=os.geteuid(), gid=os.getegid())
    tasks, made, children = Tasks("test"), [], []

    def sandbox(group: Group | None) -> ContainerSandbox:
        ours, theirs = socket.socketpair()
        ours_too, (out, out_end), (err, err_end) = socket.socketpair(), os.pipe(), os.pipe()
        with theirs, ours_too[1]:
            children.append(subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL))
        for fd in (out_end, err_end):
            os.close(fd)
        pid, rendezvous = children[-1].pid, Rendezvous(tmp_path, "sb-1", me)
        wires = AsyncWire(ours, max_fds=0), AsyncWire(ours_too[0], max_fds=0)
        parts = Parts(rendezvous, *wires, out, err, os.pidfd_open(pid), pid, Monitor(rendezvous.monitor), group)
        made.append(ContainerSandbox("sb-1", engine, parts, GIB, tasks, lambda _name, _removed: None))
        return made[-1]

    yield sandbox
    for each in made:
        await each.close()
    await tasks.close()
    for child in children:
        child.wait()


@pytest.fixture
def group(tmp_path: Path) -> Group:
    directory = tmp_path / "group"
    directory.mkdir()
    for name in ("memory.max", "memory.swap.max", "cpu.max"):
        (directory / name).write_text("")
    own = Controller(directory, unified=True)
    return Group(own, own, systemd=False)


async def test_its_own_group_is_written_to(make: Make, group: Group, tmp_path: Path) -> None:
    await make(group).confine(2 * GIB, 0.1)
    assert (group.memory.directory / "memory.max").read_text() == str(3 * GIB), "the function's and its own"
    assert (group.cpu.directory / "cpu.max").read_text() == "100000 100000", "a core is the least"
    assert (tmp_path / "said").read_text() == ""


async def test_its_own_group_says_whether_it_has_used_up_its_memory(make: Make, group: Group) -> None:
    sandbox, directory = make(group), group.memory.directory
    assert not sandbox.short_of_memory(), "nothing is known"
    for name, value in (("max", GIB), ("current", GIB), ("stat", "active_file 0\ninactive_file 0\n")):
        (directory / f"memory.{name}").write_text(str(value))
    for refused, short in ((0, False), (9, True)):
        (directory / "memory.events").write_text(f"max {refused}\noom 0\n")
        assert sandbox.short_of_memory() is short


async def test_systemd_is_told_afterwards(make: Make, group: Group, tmp_path: Path) -> None:
    """Reloaded, it writes what it knows over what stands there."""
    await make(Group(group.memory, group.cpu, systemd=True)).confine(2 * GIB, 2.0)
    assert (group.memory.directory / "memory.max").read_text() == str(3 * GIB)
    await until(lambda: (tmp_path / "said").read_text() == UPDATE, what="the engine is told")


async def test_where_the_group_cannot_be_written_to_the_engine_is_asked(
    make: Make, group: Group, tmp_path: Path
) -> None:
    (group.cpu.directory / "cpu.max").unlink()
    await make(group).confine(2 * GIB, 2.0)
    assert (tmp_path / "said").read_text() == UPDATE


async def test_a_group_that_is_not_known_is_the_engines(make: Make, tmp_path: Path) -> None:
    sandbox = make(None)
    assert not sandbox.short_of_memory()
    await sandbox.confine(2 * GIB, 2.0)
    assert (tmp_path / "said").read_text() == UPDATE
    (tmp_path / "refuse").touch()
    with pytest.raises(EngineFailed, match="no such group"):
        await sandbox.confine(2 * GIB, 2.0)

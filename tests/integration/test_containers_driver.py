"""The container driver with a real engine: warm sandboxes that end in every way, and containers that become none."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sllm_invoker.containers import control_group
from sllm_invoker.containers.arguments import Owner
from sllm_invoker.containers.choice import COMMAND
from sllm_invoker.containers.driver import ContainerDriver, Sizes
from sllm_invoker.containers.engine import Engine
from sllm_invoker.pools import WarmPools
from sllm_invoker.sandbox import PLAIN, Sandbox, Wish
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import Unavailable
from tests.fixtures.waiting import GIVE_UP_S, until

pytestmark = [pytest.mark.container, pytest.mark.slow, pytest.mark.timeout(1500)]

SIZES = Sizes(memory=1 << 30, cpu=2.0, pids=64, tmp=32 << 20)
Make = Callable[..., Coroutine[Any, Any, ContainerDriver]]


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(node="n1", place=str(tmp_path), boot="b1")


@pytest.fixture
async def make(engine: Engine, image: str, owner: Owner, tmp_path: Path) -> AsyncIterator[Make]:
    """A driver that has begun, of another image or command where one is given. Nothing of its containers is left."""
    made = []

    async def driver(of: str = image, command: tuple[str, ...] = COMMAND, by: Engine = engine) -> ContainerDriver:
        async def named() -> str:
            return of

        made.append(ContainerDriver(by, named, command, owner, tmp_path / "sandboxes", SIZES))
        await made[-1].start()
        return made[-1]

    try:
        yield driver
    finally:
        for each in made:
            await each.close()
    assert await of(engine, owner) == []
    assert not any((tmp_path / "sandboxes").iterdir())


async def of(engine: Engine, owner: Owner) -> list[str]:
    """Containers that the owner has, running or not."""
    return [name for name, place in (await engine.places()).items() if place == owner.place]


def interfaces(pid: int) -> list[str]:
    """Network interfaces that a process sees; the loopback is one."""
    return Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]


def has_device(pid: int, number: int) -> tuple[bool, bool]:
    """Whether the container of process ``pid`` has the device, and the variable, of ``named_device``."""
    process = Path("/proc", str(pid))
    environment = (process / "environ").read_bytes().split(b"\0")
    there = (process / "root/dev" / f"sllm-test{number}").is_char_device()
    return there, b"SLLM_TEST_DEVICE=%d" % number in environment


async def ended(sandbox: Sandbox) -> tuple[int | None, int, bool]:
    async with asyncio.timeout(GIVE_UP_S):
        end = await sandbox.exited
    await sandbox.close()
    assert sandbox.pid == 0
    return end.code, end.signal, end.asked


async def test_how_each_ends_is_known(make: Make, engine: Engine, owner: Owner) -> None:
    driver = await make()
    names = [f"sllm-test-{number}-{os.getpid()}" for number in range(4)]
    killed, stopped, left, lost = await asyncio.gather(*map(driver.create, names))
    assert driver.python == killed.python != ""
    assert len(await of(engine, owner)) == 4
    killed.kill()
    assert await ended(killed) == (0, signal.SIGKILL, True)
    os.kill(stopped.pid, signal.SIGTERM)  # as `podman stop` does: process 1 hands it on
    assert await ended(stopped) == (0, signal.SIGTERM, False)
    left.wire.close()  # its invoker is gone
    assert await ended(left) == (0, 0, False)
    os.kill(lost.pid, signal.SIGKILL)  # process 1 can say nothing more; the engine does
    assert await ended(lost) == (0, signal.SIGKILL, False)


async def test_a_sandbox_outlives_its_monitor(make: Make, engine: Engine, owner: Owner, tmp_path: Path) -> None:
    """What an engine leaves beside a container may be killed: podman's conmon, whose child process 1 is."""
    driver = await make()
    name = f"sllm-test-{os.getpid()}"
    sandbox = await driver.create(name)
    monitor = tmp_path / "sandboxes" / name / "monitor"
    if not monitor.exists():
        pytest.skip(f"{engine.kind} has no monitor for each container")
    os.kill(int(monitor.read_text()), signal.SIGKILL)
    sandbox.kill()
    assert await ended(sandbox) == (0, signal.SIGKILL, True)


async def test_limits_are_those_of_the_function_at_once(make: Make, engine: Engine) -> None:
    """As the kernel has them, in the group that bears the container's id."""
    driver = await make()
    name = f"sllm-test-{os.getpid()}"
    sandbox = await driver.create(name)
    container = (await engine.command("inspect", "--format", "{{.Id}}", name)).strip()
    group = control_group.find(container, sandbox.pid)
    for more in (2**28, 2**30, 2**26):  # up and down
        await sandbox.confine(more, 1.5)
        limit = group.memory.directory / ("memory.max" if group.memory.unified else "memory.limit_in_bytes")
        assert int(limit.read_text()) == SIZES.memory + more
        quota = group.cpu.directory / ("cpu.max" if group.cpu.unified else "cpu.cfs_quota_us")
        assert quota.read_text().split()[0] == "150000"
    await sandbox.close()


async def test_who_wants_the_network_gets_a_sandbox_of_its_own(make: Make) -> None:
    driver = await make()
    wish = Wish(network=True)
    assert not driver.serves(wish)
    sandbox = await driver.create(f"sllm-test-{os.getpid()}", wish)
    assert len(interfaces(sandbox.pid)) > 1
    await sandbox.close()


LISTENS = f"""
import socket
with socket.create_server(("127.0.0.1", 4711)) as server:
    server.settimeout({GIVE_UP_S})
    connection, _ = server.accept()
    connection.settimeout({GIVE_UP_S})
    with connection, connection.makefile("rb") as file:
        print(file.read().decode())
"""
SPEAKS = f"""
import socket, time
until = time.monotonic() + {GIVE_UP_S}
while True:
    try:
        connection = socket.create_connection(("127.0.0.1", 4711), timeout={GIVE_UP_S})
        break
    except ConnectionRefusedError:  # the other is not there yet
        if time.monotonic() > until: raise
        time.sleep(0.05)
with connection: connection.sendall(b"said over loopback")
"""
BEYOND = """
import errno, socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
    print(errno.errorcode.get(udp.connect_ex(("192.0.2.1", 9)), "reached"))
"""


async def test_members_of_a_cluster_have_a_loopback_together_and_nothing_else(
    make: Make, engine: Engine, owner: Owner
) -> None:
    driver = await make()
    names = [f"sllm-test-{number}-{os.getpid()}" for number in range(3)]
    first = await driver.create(names[0])
    wish = Wish(cluster=names[0])
    assert not driver.serves(wish)
    second, alone = [await driver.create(name, each) for name, each in zip(names[1:], (wish, PLAIN), strict=True)]
    spaces = [os.stat(f"/proc/{each.pid}/ns/net").st_ino for each in (first, second, alone)]
    assert spaces[0] == spaces[1] != spaces[2]
    assert spaces[0] != os.stat("/proc/self/ns/net").st_ino
    heard, _ = await asyncio.gather(
        engine.command("exec", names[0], "python", "-c", LISTENS, within_s=2 * GIVE_UP_S),
        engine.command("exec", names[1], "python", "-c", SPEAKS, within_s=2 * GIVE_UP_S),
    )
    assert heard.strip() == "said over loopback"
    for name in names:
        assert (await engine.command("exec", name, "python", "-c", BEYOND)).strip() == "ENETUNREACH"
    await alone.close()
    await first.close()  # though another one has its network
    assert (await ended(second))[1] in (0, signal.SIGKILL)
    assert await of(engine, owner) == []


@pytest.fixture
def named_device() -> Iterator[int]:
    """The number of a GPU that no machine has, and that engines find by its name: a device that is /dev/zero by another
    name, and a variable."""
    number, place = 4000 + os.getpid() % 1000, Path("/var/run/cdi")
    nodes = [{"path": f"/dev/sllm-test{number}", "type": "c", "major": 1, "minor": 5, "permissions": "rw"}]
    edits = {"deviceNodes": nodes, "env": [f"SLLM_TEST_DEVICE={number}"]}
    named = {
        "cdiVersion": "0.3.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": f"{number}", "containerEdits": edits}],
    }
    made = not place.exists()
    try:
        place.mkdir(exist_ok=True)
        (place / f"sllm-test-{number}.json").write_text(json.dumps(named))
    except OSError as error:
        pytest.skip(f"names of devices can be given by root alone: {error}")
    yield number
    (place / f"sllm-test-{number}.json").unlink()
    if made:
        place.rmdir()


async def test_who_was_given_a_gpu_has_it_by_its_name(make: Make, engine: Engine, named_device: int) -> None:
    if engine.kind != "podman":
        pytest.skip(f"{engine.kind} asks NVIDIA's own runtime for GPUs, and finds no other device by name")
    driver = await make()
    wish = Wish(gpus=(named_device,))
    assert not driver.serves(wish)
    sandbox, plain = [
        await driver.create(f"sllm-test-{number}-{os.getpid()}", each) for number, each in enumerate((wish, PLAIN))
    ]
    seen = [has_device(each.pid, named_device) for each in (sandbox, plain)]
    assert seen == [(True, True), (False, False)]
    for each in (sandbox, plain):
        await each.close()


async def test_a_gpu_that_no_file_names_is_the_engines_own_error(make: Make, engine: Engine) -> None:
    driver = await make()
    with pytest.raises(Unavailable, match=r"run` failed"):
        await driver.create(f"sllm-test-{os.getpid()}", Wish(gpus=(9999,)))


async def test_an_image_that_is_not_there_is_the_engines_own_error(make: Make) -> None:
    driver = await make("localhost/sllm-no-such-image:1")
    with pytest.raises(Unavailable, match=r"run` failed .*sllm-no-such-image"):
        await driver.create(f"sllm-test-{os.getpid()}")


@pytest.mark.parametrize(
    ("program", "says"),
    [("pass", "ended at once"), ("raise SystemExit('nothing here is ours')", "nothing here is ours")],
)
async def test_a_container_that_does_not_come_is_missed(make: Make, program: str, says: str) -> None:
    driver = await make(command=("python", "-c", program))
    with pytest.raises(Unavailable, match=says):
        await driver.create(f"sllm-test-{os.getpid()}")


async def test_a_worker_that_cannot_import_is_quoted(make: Make) -> None:
    broken = "import sys; sys.modules['torch'] = None; from sllm_runtime.worker.container import main; sys.exit(main())"
    driver = await make(command=("python", "-c", broken))
    with pytest.raises(Unavailable, match=r"ended early: exit code 70; it said: .*torch"):
        await driver.create(f"sllm-test-{os.getpid()}")


async def test_what_python_another_image_has_is_not_the_drivers(make: Make, image: str) -> None:
    driver = await make()
    sandbox = await driver.create(f"sllm-test-{os.getpid()}", Wish(image=image))
    assert sandbox.python != ""
    assert driver.python == ""
    await sandbox.close()


async def test_an_image_of_its_own_waits_for_the_next_start(make: Make, image: str) -> None:
    """Of the base image under a wish of its own: the driver's other containers are not given for it."""
    driver, tasks = await make(), Tasks("test")
    pools = WarmPools(driver, 1, kinds=1, refill_delay_s=0.0)
    tasks.start(pools.run(), "pools")
    try:
        wish = Wish(image=image)
        first = await pools.acquire(wish)
        await until(lambda: pools.others == {wish: 1} and pools.idle == 1, what="one of each kind waits")
        second = await pools.acquire(wish)
        assert second.name != first.name
        await asyncio.gather(first.close(), second.close())
    finally:
        await pools.close()
        await tasks.close()


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.15, 0.4])
async def test_an_engine_that_is_killed_while_it_starts_a_container_leaves_none(
    make: Make, engine: Engine, owner: Owner, tmp_path: Path, after_s: float
) -> None:
    """Wherever it is killed: before it has made anything, in the middle, or when the container runs."""
    if engine.kind != "podman":
        pytest.skip(f"{engine.kind}'s daemon goes on with what a killed command has asked for")
    killing = tmp_path / "killing"
    killing.write_text(
        f'#!/bin/sh\ncase " $* " in *\' run \'*sllm-test-*) ;; *) exec {engine.program} "$@" ;; esac\n'
        f'{engine.program} "$@" & sleep {after_s}; kill -9 $!; wait $!\n'
    )
    killing.chmod(0o755)
    driver = await make(by=replace(engine, program=str(killing)))
    name = f"sllm-test-{os.getpid()}"
    with contextlib.suppress(Unavailable):  # it may have been done in time
        sandbox = await driver.create(name)
        await sandbox.close()
    assert name not in await of(engine, owner)
    again = await (await make()).create(name)  # nothing of the name is left either
    await again.close()


async def test_what_an_earlier_life_has_left_is_removed(
    make: Make, engine: Engine, image: str, owner: Owner, tmp_path: Path
) -> None:
    """Of this node, and of one whose data is gone."""

    async def named() -> str:
        return image

    elsewhere = replace(owner, place=str(tmp_path / "gone"))
    gone = ContainerDriver(engine, named, COMMAND, elsewhere, tmp_path / "others", SIZES)
    (tmp_path / "gone").mkdir()
    first = await make()
    names = [f"sllm-test-{number}-{os.getpid()}" for number in range(2)]
    made = await asyncio.gather(first.create(names[0]), gone.create(names[1]))
    (tmp_path / "gone").rmdir()
    await make()
    assert not (await engine.places()).keys() & set(names)
    for sandbox in made:
        code, number, asked = await ended(sandbox)
        assert not asked
        assert (code, number) in [(0, signal.SIGKILL), (None, 0)]  # asked before the engine had removed it, or after
    await gone.close()

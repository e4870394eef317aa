"""Sandboxes as real processes: warm, killed, dead by themselves, and nothing of theirs left behind."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sllm_invoker import process_driver
from sllm_invoker.process_driver import ProcessDriver
from sllm_runtime.platform import process
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.worker import Assign, Exited, FromWorker, Ready, ToWorker
from tests.fixtures.invoker import manifest
from tests.fixtures.waiting import GIVE_UP_S, until

ZYGOTE = (sys.executable, str(Path(__file__).parents[2] / "fixtures" / "scripted_zygote.py"))


@pytest.fixture(params=[pytest.param("namespace", marks=pytest.mark.namespaces), "subreaper"])
async def driver(request: pytest.FixtureRequest) -> AsyncIterator[ProcessDriver]:
    made = ProcessDriver(dict(os.environ), argv=ZYGOTE, isolate=request.param == "namespace")
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def test_a_sandbox_is_warm_when_it_is_handed_over(driver: ProcessDriver) -> None:
    sandbox = await driver.create("a")
    assert sandbox.python == sys.version.split()[0]
    os.kill(sandbox.pid, 0)
    assert not sandbox.exited.done()
    end = await sandbox.close()
    assert (end.signal, end.asked) == (signal.SIGKILL, True)
    assert sandbox.pid == 0


async def test_a_worker_that_is_killed_is_noticed_at_once_with_its_signal(driver: ProcessDriver) -> None:
    sandbox = await driver.create("a")
    os.kill(sandbox.pid, signal.SIGTERM)
    async with asyncio.timeout(GIVE_UP_S):
        end = await sandbox.exited
    assert (end.signal, end.code, end.asked) == (signal.SIGTERM, 0, False)
    assert str(end) == "signal 15 (SIGTERM)"
    await sandbox.close()


async def test_a_worker_that_not_even_sigkill_ends_is_given_up(
    driver: ProcessDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that hangs in the kernel looks from outside: SIGKILL is sent, and it does not end."""
    sandbox = await driver.create("a")
    pid = sandbox.pid
    with monkeypatch.context() as patched:
        patched.setattr(process_driver, "KILLED_S", 0.1)
        patched.setattr(os, "killpg", lambda pid, number: None)
        patched.setattr(signal, "pidfd_send_signal", lambda pidfd, number: None)
        async with asyncio.timeout(GIVE_UP_S):
            end = await sandbox.close()
    assert (end.code, end.signal, end.asked) == (None, 0, True)
    assert f"worker a (pid {pid}) has not ended 0.1 s after SIGKILL" in caplog.text


async def test_the_fork_server_is_started_again_and_its_workers_died_with_it(driver: ProcessDriver) -> None:
    sandbox = await driver.create("a")
    first = driver.fork_server_pid
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(GIVE_UP_S):
        end = await sandbox.exited
    assert end.code is None or end.signal == signal.SIGKILL
    await sandbox.close()
    async with asyncio.timeout(GIVE_UP_S):
        second = await driver.create("b")
    assert driver.fork_server_pid not in (0, first)
    await second.close()


@pytest.fixture
def subreaper() -> Iterator[None]:
    """This process adopts what others leave, as the invoker does."""
    process.become_subreaper()
    yield
    assert process._libc is not None
    process._libc.prctl(process._PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.usefixtures("subreaper")
async def test_what_workers_detached_ends_with_their_fork_server(tmp_path: Path) -> None:
    """Without a PID namespace. It becomes this process's child when its worker ends, which is after the fork server."""
    others = process.children()
    made = ProcessDriver(
        dict(os.environ),
        argv=ZYGOTE,
        isolate=False,
        on_end=lambda: process.end_orphans(others | {made.fork_server_pid}),
    )
    await made.start()
    try:
        sandbox = await made.create("a")
        assign = Assign(
            instance="i", function="fn", version=1, manifest=manifest("daemon"), bundle="", workdir=str(tmp_path),
            threads=1, fds=1,
        )  # fmt: skip
        null = os.open("/dev/null", os.O_RDONLY)
        sandbox.wire.send(codec.pack(ToWorker(assign)), [null])
        os.close(null)
        async with asyncio.timeout(GIVE_UP_S):
            while (said := await sandbox.wire.receive()) is not None:
                if isinstance(codec.unpack(FromWorker, said).body, Ready):
                    break
        (daemon,) = map(int, children_of(sandbox.pid))
        await until(lambda: os.getsid(daemon) == daemon, what="it is detached")
        os.kill(made.fork_server_pid, signal.SIGKILL)
        await sandbox.exited
        await sandbox.close()
        await until(lambda: not Path(f"/proc/{daemon}").exists(), what="it has ended")
        await until(lambda: process.children() <= others | {made.fork_server_pid}, what="nothing is left")
    finally:
        await made.close()


def children_of(pid: int) -> list[str]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for thread in found for child in thread.read_text().split()]


async def test_the_end_of_the_fork_server_is_the_end_of_all_waiting_for_its_word(
    driver: ProcessDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_driver, "EXIT_REPORT_S", 10 * GIVE_UP_S)
    sandbox = await driver.create("a")
    os.kill(driver.fork_server_pid, signal.SIGKILL)
    async with asyncio.timeout(GIVE_UP_S):
        await sandbox.exited
    await sandbox.close()


async def test_a_worker_that_does_not_speak_in_time_is_none(
    driver: ProcessDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await driver.ready()
    monkeypatch.setattr(process_driver, "HELLO_S", 0.0)
    with pytest.raises(Unavailable, match="did not say hello"):
        await driver.create("a")
    assert not driver._living


@pytest.mark.parametrize("readable", [True, False])
async def test_a_worker_that_speaks_another_protocol_is_none(
    driver: ProcessDriver, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    await driver.ready()
    if readable:
        monkeypatch.setattr(process_driver, "PROTOCOL_VERSION", PROTOCOL_VERSION + 2)
    else:
        monkeypatch.setattr(process_driver, "FromWorker", Exited)
    with pytest.raises(Unavailable, match="speaks another protocol"):
        await driver.create("a")
    assert not driver._living


async def test_many_are_made_at_once(driver: ProcessDriver) -> None:
    made = await asyncio.gather(*(driver.create(f"s{number}") for number in range(8)))
    assert len({sandbox.pid for sandbox in made}) == 8
    await asyncio.gather(*(sandbox.close() for sandbox in made))


async def test_a_fork_server_that_cannot_run_is_one_clear_error() -> None:
    driver = ProcessDriver(dict(os.environ), argv=("/bin/false",), isolate=False)
    await driver.start()
    try:
        with pytest.raises(Unavailable, match="fork server has ended 3 times before it was ready"):
            await driver.create("a")
    finally:
        await driver.close()


async def test_closing_while_one_is_being_made_leaves_nothing(driver: ProcessDriver) -> None:
    making = [asyncio.create_task(driver.create(f"s{number}")) for number in range(4)]
    await until(lambda: driver._living, what="a worker is being made")
    for task in making:
        task.cancel()
    for made in await asyncio.gather(*making, return_exceptions=True):
        if not isinstance(made, BaseException):  # it was quicker than we
            await made.close()
    await until(lambda: not driver._living, what="all of them ended")


async def test_who_is_cancelled_while_it_closes_one_leaves_no_descriptor(driver: ProcessDriver) -> None:
    """The fixture counts them. A node that stops ends what its starts are giving back."""
    sandbox = await driver.create("a")
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)  # it waits for the worker's end
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(GIVE_UP_S):
        await sandbox.exited


def test_the_pid_behind_a_pidfd() -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        assert process_driver.host_pid(pidfd) == os.getpid()
    finally:
        os.close(pidfd)


async def test_what_is_left_is_looked_for_again_when_a_look_fails() -> None:
    """No descriptor may be left for it just then."""
    looks = list[int]()

    def look() -> None:
        looks.append(made.fork_server_pid)
        if len(looks) in (1, 3):
            raise OSError(errno.EMFILE, "Too many open files")

    made = ProcessDriver(dict(os.environ), argv=ZYGOTE, isolate=False, on_end=look)
    await made.start()
    try:
        await made.ready()
        os.kill(made.fork_server_pid, signal.SIGKILL)
        await until(lambda: len(looks) > 5, what="it goes on")
    finally:
        await made.close()

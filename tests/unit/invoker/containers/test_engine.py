"""An engine's command line: real processes that answer, refuse, hang and leave others behind."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sllm_invoker.containers import engine as engines
from sllm_invoker.containers.engine import Engine, EngineFailed, EngineHangs
from tests.fixtures.waiting import GIVE_UP_S, dead, until

Make = Callable[[str], Engine]


@pytest.fixture
def engine(tmp_path: Path) -> Make:
    """An engine that does what a shell script says."""

    def make(script: str) -> Engine:
        program = tmp_path / "engine"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return Engine("podman", str(program), ("--option",))

    return make


async def test_a_command_gets_its_words_and_its_data(engine: Make) -> None:
    assert await engine('echo "$@"; cat').command("load", "it", data=b"what") == "--option load it\nwhat"


async def test_what_it_refuses_is_said_in_its_own_words(engine: Make) -> None:
    with pytest.raises(EngineFailed) as caught:
        await engine("echo no space left on device >&2; exit 125").command("run")
    assert caught.value.message == "`podman run` failed (125): no space left on device"


async def test_one_that_hangs_is_given_up_with_all_that_it_started(
    engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over when it has come so far."""
    pids, loop = tmp_path / "pids", asyncio.get_running_loop()
    clock, late_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: clock() + late_s)
    asking = asyncio.create_task(engine(f"sleep 1000 & echo $$ $! > {pids}; wait").command("ps", within_s=1000))
    await until(lambda: pids.exists() and pids.read_text(), what="it hangs")
    late_s = 1000.0
    with pytest.raises(EngineFailed, match="`podman ps` has not ended within 1000 s"):
        await asking
    await dead([psutil.Process(int(pid)) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))])


async def test_one_that_not_even_sigkill_ends_is_given_up_as_well(
    engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs in the kernel (a dead disk) looks from outside: SIGKILL is sent, and it does not end."""
    pid, told = tmp_path / "pid", list[EngineFailed]()
    stuck = engine(f"echo $$ > {pid}; exec sleep 1000")
    stuck.listeners.append(told.append)
    with monkeypatch.context() as patched:
        patched.setattr(engines, "KILLED_S", 0.1, raising=False)
        patched.setattr(os, "killpg", lambda pid, number: None)
        try:
            async with asyncio.timeout(GIVE_UP_S / 4):
                with pytest.raises(EngineHangs, match=r"`podman ps` has not ended within 0\.3 s"):
                    await stuck.command("ps", within_s=0.3)
        finally:
            os.kill(int(pid.read_text()), signal.SIGKILL)
            await until(lambda: not psutil.pid_exists(int(pid.read_text())), what="it has ended")
            await asyncio.sleep(0.1)  # and asyncio knows it
    assert len(told) == 1, "so it is known that the engine hangs"
    assert not stuck.turns.locked()


@pytest.mark.parametrize("takes_s", [0.3, 1000])
async def test_one_that_nobody_wants_any_more_may_end_but_not_go_on(
    engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_s: float
) -> None:
    """What it has begun (a container, a temporary file) it may finish."""
    monkeypatch.setattr(engines, "LET_END_S", GIVE_UP_S if takes_s < 1 else 0.1)
    begun, done = tmp_path / "begun", tmp_path / "done"
    running = asyncio.create_task(engine(f"echo $$ > {begun}; sleep {takes_s}; echo > {done}").command("run"))
    await until(lambda: begun.exists() and begun.read_text(), what="it has begun")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert done.exists() == (takes_s < 1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


async def test_who_goes_on_in_the_background_holds_up_nobody(engine: Make) -> None:
    """As a container's monitor does, with its parent's output open."""
    async with asyncio.timeout(GIVE_UP_S):
        background = int(await engine("sleep 1000 & echo $!").command("run"))
    os.kill(background, signal.SIGKILL)


async def test_a_program_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(EngineFailed, match="/no/such/engine cannot be run"):
        await Engine("docker", "/no/such/engine").command("ps")


@pytest.mark.parametrize("said", ["Error: No such container: sb-1", 'no container with name or ID "sb-1" found'])
async def test_removing_what_is_not_there_is_no_error(engine: Make, said: str) -> None:
    await engine(f"echo '{said}' >&2; exit 1").remove("sb-1")
    with pytest.raises(EngineFailed, match="device busy"):
        await engine("echo device busy >&2; exit 1").remove("sb-1")


async def test_what_lost_its_monitor_is_taken_from_its_runtime_by_its_id(engine: Make, tmp_path: Path) -> None:
    runtime, log = tmp_path / "runtime", tmp_path / "log"
    runtime.write_text(f'#!/bin/sh\necho "$@" > {log}\necho not there >&2; exit 1\n')
    runtime.chmod(0o755)
    await engine(f"echo {runtime} 4711abc").abandon("sb-1")
    assert log.read_text() == "delete --force 4711abc\n"


@pytest.mark.parametrize("script", ["exit 1", "true", "echo /no/such/runtime 4711abc", "echo only-one-word"])
async def test_one_that_nobody_knows_is_left_to_be_removed(engine: Make, script: str) -> None:
    await engine(script).abandon("sb-1")

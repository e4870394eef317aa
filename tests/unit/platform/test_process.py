"""Processes: their end with the parent, orphans, logs, the frame around daemons."""

import asyncio
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from sllm_runtime.platform import descriptors, log_files, process
from sllm_runtime.platform.process import Child, children, start_time, tail
from tests.fixtures.waiting import until

SLEEPS = "import time; time.sleep(600)"
ABANDONS = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {SLEEPS!r}])"


@pytest.mark.parametrize("told", [True, False])
def test_a_child_of_any_thread_is_found(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_TELLS_CHILDREN", told and process._TELLS_CHILDREN)
    born: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
    ended = threading.Event()

    def bear() -> None:
        born.put(subprocess.Popen([sys.executable, "-S", "-c", SLEEPS]))
        ended.wait(60)

    mother = threading.Thread(target=bear)
    mother.start()
    try:
        with born.get(timeout=60) as child:
            assert child.pid in children()
            ended.set()
            mother.join()
            assert child.pid in children(), "another thread has it now"
            child.kill()
        assert child.pid not in children()
    finally:
        ended.set()


def test_the_start_time_of_nobody_and_of_a_zombie_is_none() -> None:
    assert start_time(os.getpid()) is not None
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_time(child.pid) is None
        assert child.pid in children()
    assert child.pid not in children()


async def test_a_subreaper_ends_orphans_and_spares_its_own(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys, time
from sllm_runtime.platform.process import become_subreaper, children, end_orphans
become_subreaper()
own = subprocess.Popen([sys.executable, "-S", "-c", {SLEEPS!r}])
subprocess.run([sys.executable, "-S", "-c", {ABANDONS!r}])
orphans = children() - {{own.pid}}
assert len(orphans) == 1, orphans
deadline = time.monotonic() + 60
while children() != {{own.pid}}:
    end_orphans({{own.pid}})
    assert time.monotonic() < deadline
assert own.poll() is None
own.kill()
own.wait()
print("good")
"""
    child = Child(name="reaper", argv=[sys.executable, "-c", code], env=dict(os.environ), output=tmp_path / "log")
    await child.start()
    status = await child.wait()
    assert (status, tail(child.output)) == (0, "good")


async def test_one_that_not_even_sigkill_ends_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that hangs in the kernel looks from outside: SIGKILL is sent, and it does not end."""
    child = Child(name="stuck", argv=["sh", "-c", "trap '' TERM; echo up; sleep 600"], env={}, output=tmp_path / "log")
    await child.start()
    await until(lambda: tail(child.output) == "up")
    with monkeypatch.context() as patched:
        patched.setattr(process, "KILLED_S", 0.1)
        patched.setattr(os, "killpg", lambda pid, number: None)
        assert await child.stop(0.05) is None
    assert f"stuck (pid {child.pid}) has not ended 0.1 s after SIGKILL" in caplog.text
    assert await child.stop(0) == -signal.SIGKILL


async def test_the_log_of_one_that_runs_for_long_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "ROTATE_AT", 1000)
    monkeypatch.setattr(log_files, "EVERY_S", 0.01)
    log, steps = tmp_path / "x.log", tmp_path / "steps"
    os.mkfifo(steps)
    # It says a line for each it is told, over the descriptor that it was born with.
    child = Child(name="x", argv=["sh", "-c", f"while read -r line; do echo $line; done <{steps}"], env={}, output=log)
    await child.start()
    keeping = asyncio.create_task(log_files.keep_short({log, tmp_path / "none.log"}))
    try:
        with steps.open("w", buffering=1) as told:
            for turn in range(3):
                told.write(f"{turn} {'x' * 2000}\n")
                await until(partial(put_aside, log, str(turn)))
            told.write("the end\n")
        assert await child.wait() == 0
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
    assert log.read_text() == "the end\n"
    assert sorted(os.listdir(tmp_path)) == ["steps", "x.log", "x.log.1"]


def put_aside(log: Path, beginning: str) -> bool:
    """Whether a line that begins so is what was put aside, and the log is empty."""
    aside = log.with_name(log.name + ".1")
    return aside.exists() and aside.read_text().startswith(beginning) and log.stat().st_size == 0


async def test_a_log_that_is_long_is_put_aside_at_the_next_start(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.log"
    log.parent.mkdir()
    with log.open("wb") as file:
        file.truncate(17 * 2**20)
    child = Child(name="x", argv=["echo", "fresh"], env={}, output=log)
    await child.start()
    await child.wait()
    assert log.read_text() == "fresh\n"
    assert log.with_name("x.log.1").stat().st_size == 17 * 2**20


DAEMON = """
import asyncio, os, sys
from sllm_runtime.platform.daemon import ready, run_daemon
from sllm_runtime.protocol.errors import Unavailable

async def main(stop):
    print("up", type(asyncio.get_running_loop()).__module__, flush=True)
    ready()
    await stop.wait()
    {end}

sys.exit(run_daemon(main, title="sllm-test one"))
"""


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


def said(pid: int, file: str, pattern: str) -> list[int]:
    """The numbers that a file of the kernel has for ``pid``."""
    found = re.search(pattern, Path(f"/proc/{pid}/{file}").read_text())
    assert found is not None
    return [int(number) for number in found.groups()]


async def daemon(tmp_path: Path, end: str) -> Child:
    argv = [sys.executable, "-c", DAEMON.format(end=end)]
    child = Child(name="x", argv=argv, env=dict(os.environ), output=tmp_path / "log")
    await child.start()
    await until(lambda: tail(tmp_path / "log").startswith("up uvloop"))
    return child


async def test_a_daemon_has_a_table_of_descriptors_that_need_not_grow(tmp_path: Path) -> None:
    child = await daemon(tmp_path, "pass")
    soft, hard = said(child.pid, "limits", r"Max open files +(\d+) +(\d+)")
    (size,) = said(child.pid, "status", r"FDSize:\s(\d+)")
    assert soft == min(hard, descriptors.OF_DAEMON)
    assert size >= min(hard, descriptors.AT_ONCE)
    assert len(os.listdir(f"/proc/{child.pid}/fd")) < 32  # none of them is left open
    assert await child.stop(10) == 0


async def test_a_daemon_has_a_name_and_ends_well_on_sigterm(tmp_path: Path) -> None:
    child = await daemon(tmp_path, "pass")
    assert title(child.pid) == "sllm-test one"
    assert await child.stop(10) == 0


@pytest.mark.parametrize(
    ("end", "text"),
    [('raise Unavailable("no NATS server")', "sllm-test one: no NATS server"), ("1 / 0", "ZeroDivisionError")],
)
async def test_an_error_is_said_and_is_status_1(tmp_path: Path, end: str, text: str) -> None:
    child = await daemon(tmp_path, end)
    assert await child.stop(10) == 1
    assert text in tail(tmp_path / "log")


def test_an_orphan_of_another_user_keeps_no_other_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = set[int]()

    def kill(pid: int, number: int) -> None:
        if pid == 1:
            raise PermissionError(1, "Operation not permitted")
        killed.add(pid)

    monkeypatch.setattr(process, "children", lambda: {1, 2**22 - 1, 2**22 - 2})
    monkeypatch.setattr(os, "kill", kill)
    process.end_orphans(set())
    assert killed == {2**22 - 1, 2**22 - 2}


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    child = await daemon(tmp_path, "print('stopping', flush=True); await asyncio.Event().wait()")
    os.kill(child.pid, signal.SIGINT)
    await until(lambda: "stopping" in tail(tmp_path / "log"))
    os.kill(child.pid, signal.SIGINT)
    assert await child.wait() == 130


def test_daemons_are_started_without_torch() -> None:
    code = (
        "import sys, sllm_runtime.platform.up, sllm_runtime.platform.commands, sllm_runtime.platform.state;"
        "sys.exit(', '.join({'torch', 'numpy', 'httpx', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "\n"

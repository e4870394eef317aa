"""The supervisor with small real processes."""

import asyncio
import errno
import os
import pty
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.platform import log_files, process
from sllm_runtime.platform.daemon import READY_FD, ready
from sllm_runtime.platform.process import Child, start_time
from sllm_runtime.platform.restarts import Restarts
from sllm_runtime.platform.supervise import CHILD, ChildSpec, ChildState, Supervisor
from sllm_runtime.protocol.errors import StartFailed
from tests.fixtures.waiting import GIVE_UP_S, until

READY = "import os, time; os.write(int(os.environ['SLLM_READY_FD']), b'READY\\n'); "
SERVES = READY + "time.sleep(600)"
QUICK = Restarts(first_s=0.01, longest_s=0.05, most=3, within_s=60)


def spec(
    name: str,
    code: str,
    tmp_path: Path,
    stage: int = 0,
    stop_order: int = 0,
    ready_s: float = 20.0,
    grace_s: float = 5.0,
) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=lambda: [sys.executable, "-S", "-c", code],
        env={"PATH": os.environ["PATH"], "DIR": str(tmp_path)},
        log=tmp_path / f"{name}.log",
        stage=stage,
        stop_order=stop_order,
        ready_s=ready_s,
        grace_s=grace_s,
    )


async def test_children_are_ready_when_start_returns_and_gone_when_stop_returns(tmp_path: Path) -> None:
    supervisor = Supervisor([spec("a", SERVES, tmp_path), spec("b", SERVES, tmp_path)])
    await supervisor.start()
    pids = supervisor.pids()
    assert set(pids) == {"a", "b"}
    assert all(start_time(pid) for pid in pids.values())
    await supervisor.stop()
    assert supervisor.pids() == {}
    assert not any(start_time(pid) for pid in pids.values())


async def test_what_a_child_says_when_it_is_ready_is_kept_while_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    monkeypatch.setenv(READY_FD, str(write))
    ready("mind the gap")
    said = os.read(read, 100)
    os.close(read)
    code = f"import os, time; os.write(int(os.environ[{READY_FD!r}]), {said!r}); time.sleep(600)"
    supervisor = Supervisor([spec("a", code, tmp_path), spec("b", SERVES, tmp_path)], restarts=QUICK)
    await supervisor.start()
    assert supervisor.notes() == {"a": "mind the gap"}
    await supervisor.stop()
    assert supervisor.notes() == {}


async def test_one_that_is_killed_is_started_again_and_the_other_is_left_alone(tmp_path: Path) -> None:
    supervisor = Supervisor([spec("a", SERVES, tmp_path), spec("b", SERVES, tmp_path)], restarts=QUICK)
    await supervisor.start()
    before = supervisor.pids()
    os.kill(before["a"], signal.SIGKILL)
    await until(lambda: supervisor.pids().get("a") not in (None, before["a"]))
    assert supervisor.pids()["b"] == before["b"]
    assert supervisor.restarts() == {"a": 1, "b": 0}
    await supervisor.stop()


async def test_a_restart_is_told_when_it_serves_again_with_how_it_ended(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    specs = [spec("a", SERVES, tmp_path), spec("b", SERVES, tmp_path)]
    supervisor = Supervisor(specs, restarts=QUICK, restarted=lambda name, end: told.append((name, end)))
    await supervisor.start()
    assert told == []
    for number in (1, 2):
        os.kill(supervisor.pids()["a"], signal.SIGKILL)
        await until(lambda number=number: len(told) == number)  # type: ignore[misc]
    assert told == [("a", "signal 9")] * 2
    await supervisor.stop()
    assert len(told) == 2


async def test_a_start_that_fails_is_told_by_its_own_lines_alone(tmp_path: Path) -> None:
    """Who has corrected what the start before complained of is not told of it again."""
    for wrong in ("SLLM_SANDBOX is wrong", "SLLM_GPUS is wrong"):
        supervisor = Supervisor([spec("a", f"print({wrong!r}); raise SystemExit(2)", tmp_path)], restarts=QUICK)
        with pytest.raises(StartFailed) as failed:
            await supervisor.start()
        await supervisor.stop()
    assert "SLLM_GPUS is wrong" in failed.value.message
    assert "SLLM_SANDBOX" not in failed.value.message
    silent = Supervisor([spec("a", "raise SystemExit(2)", tmp_path)], restarts=QUICK)
    with pytest.raises(StartFailed) as failed:
        await silent.start()
    await silent.stop()
    assert "SLLM_" not in failed.value.message


async def test_one_that_ends_too_often_is_given_up(tmp_path: Path) -> None:
    dies = READY + "print('out of luck', flush=True); raise SystemExit(3)"
    supervisor = Supervisor([spec("a", dies, tmp_path)], restarts=QUICK)
    await supervisor.start()
    error = await asyncio.wait_for(asyncio.shield(supervisor.failed), GIVE_UP_S)
    assert isinstance(error, StartFailed)
    assert "a ended 4 times within 60 s" in error.message
    assert "out of luck" in error.message
    await supervisor.stop()


async def test_ends_of_long_ago_do_not_count(tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += QUICK.within_s
        return now

    lasts = [spec("a", SERVES, tmp_path)]
    supervisor = Supervisor(lasts, restarts=QUICK, clock=clock)
    await supervisor.start()
    for number in range(1, QUICK.most + 3):
        before = supervisor.pids()["a"]
        os.kill(before, signal.SIGKILL)
        await until(
            lambda: supervisor.failed.done() or supervisor.pids().get("a") not in (None, before)  # noqa: B023
        )
        assert not supervisor.failed.done()
        assert supervisor.restarts() == {"a": number}
    await supervisor.stop()


async def test_the_children_of_one_that_died_are_killed_before_it_is_started_again(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, flush=True);" + SERVES
    )
    supervisor = Supervisor([spec("a", parent, tmp_path)], restarts=QUICK)
    await supervisor.start()
    grandchild, before = int((tmp_path / "a.log").read_text()), supervisor.pids()["a"]
    assert start_time(grandchild) is not None
    os.kill(before, signal.SIGKILL)
    await until(lambda: supervisor.pids().get("a") not in (None, before))
    await until(lambda: start_time(grandchild) is None)
    await supervisor.stop()


@pytest.mark.parametrize(
    ("code", "ready_s", "what"),
    [
        ("print('no port', flush=True); raise SystemExit(3)", 60.0, "ended with status 3 before it was ready"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 60.0, "ended with signal 9 before it was ready"),
        ("import time; time.sleep(600)", 1.0, "was not ready after 1 s"),
    ],
)
async def test_a_first_start_that_fails_says_why_with_the_log(
    tmp_path: Path, code: str, ready_s: float, what: str
) -> None:
    supervisor = Supervisor([spec("good", SERVES, tmp_path), spec("bad", code, tmp_path, ready_s=ready_s)])
    with pytest.raises(StartFailed, match=what) as caught:
        await supervisor.start()
    assert ("no port" in caught.value.message) == ("no port" in code)
    await supervisor.stop()
    assert supervisor.pids() == {}


async def test_a_program_that_is_not_there_is_start_failed(tmp_path: Path) -> None:
    missing = ChildSpec(name="a", argv=lambda: ["/nowhere/at/all"], log=tmp_path / "a.log")
    supervisor = Supervisor([missing])
    with pytest.raises(StartFailed, match="/nowhere/at/all"):
        await supervisor.start()
    await supervisor.stop()


WRITES = (
    "import os, signal, sys, time; from pathlib import Path; log = Path(os.environ['DIR']) / 'order';"
    "note = lambda word: log.open('a').write(word + '\\n');"
    "signal.signal(signal.SIGTERM, lambda *_: (note('stop {0}'), sys.exit(0)));"
    "note('start {0}');" + SERVES
)


async def test_stages_start_and_stop_in_their_orders(tmp_path: Path) -> None:
    supervisor = Supervisor(
        [
            spec("late", WRITES.format("late"), tmp_path, stage=1, stop_order=0),
            spec("early", WRITES.format("early"), tmp_path, stage=0, stop_order=1),
        ]
    )
    await supervisor.start()
    await supervisor.stop()
    assert (tmp_path / "order").read_text().split("\n") == ["start early", "start late", "stop early", "stop late", ""]


async def test_a_deaf_child_and_its_own_children_are_killed_after_the_grace(tmp_path: Path) -> None:
    deaf = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, flush=True);" + SERVES
    )
    supervisor = Supervisor([spec("a", deaf, tmp_path, grace_s=0.2)])
    await supervisor.start()
    grandchild = int((tmp_path / "a.log").read_text())
    await supervisor.stop()
    await until(lambda: start_time(grandchild) is None)


async def test_stop_during_a_start_leaves_nothing(tmp_path: Path) -> None:
    supervisor = Supervisor([spec("a", "import time; time.sleep(600)", tmp_path)])
    starting = asyncio.ensure_future(supervisor.start())
    await until(lambda: "a" in supervisor.pids())
    pid = supervisor.pids()["a"]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await supervisor.stop()
    assert start_time(pid) is None


async def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
from sllm_runtime.platform.supervise import ChildSpec, Supervisor
from sllm_runtime.platform.daemon import ready

async def main():
    child = ChildSpec(name="a", argv=lambda: [sys.executable, "-S", "-c", {SERVES!r}], log=Path("a.log"))
    supervisor = Supervisor([child])
    await supervisor.start()
    Path("pid").write_text(str(supervisor.pids()["a"]))
    ready()
    await asyncio.Event().wait()

asyncio.run(main())
"""
    outer = Supervisor(
        [
            ChildSpec(
                name="outer",
                argv=lambda: [sys.executable, "-c", code],
                env=dict(os.environ),
                cwd=tmp_path,
                log=tmp_path / "outer.log",
            )
        ],
        restarts=Restarts(first_s=60),
    )
    await outer.start()
    inner = int((tmp_path / "pid").read_text())
    assert start_time(inner)
    os.kill(outer.pids()["outer"], signal.SIGKILL)
    await until(lambda: start_time(inner) is None)
    await outer.stop()


@given(recent=st.integers(1, 100), most=st.integers(0, 50), first=st.floats(0.001, 1), longest=st.floats(1, 60))
def test_back_off_grows_up_to_its_limit_then_gives_up(recent: int, most: int, first: float, longest: float) -> None:
    restarts = Restarts(first_s=first, longest_s=longest, most=most)
    delay, next_delay = restarts.delay(recent), restarts.delay(recent + 1)
    assert (delay is None) == (recent > most)
    if delay is not None:
        assert first <= delay <= longest
    if delay is not None and next_delay is not None:
        assert next_delay == min(longest, 2 * delay)


def test_the_table_names_every_state() -> None:
    assert set(CHILD) == set(ChildState)
    assert not CHILD[ChildState.ENDED]


async def test_a_child_leads_a_group_in_the_session_of_its_parent() -> None:
    child = Child(name="x", argv=[sys.executable, "-S", "-c", "import time; time.sleep(600)"], env=dict(os.environ))
    await child.start()
    group, session = os.getpgid(child.pid), os.getsid(child.pid)
    assert await child.stop(5) == -signal.SIGTERM
    assert (group, session) == (child.pid, os.getsid(0))


STARTS = r"""
import asyncio, os, sys
from pathlib import Path
from sllm_runtime.platform.process import Child
LOOK = "import os\ntry:\n    os.open('/dev/tty', os.O_RDWR)\nexcept OSError:\n    print('none')"
async def main():
    child = Child(name="x", argv=[sys.executable, "-S", "-c", LOOK], env=dict(os.environ), output=Path(sys.argv[1]))
    await child.start()
    await child.wait()
asyncio.run(main())
os.close(os.open("/dev/tty", os.O_RDWR))
"""


def test_a_child_has_no_terminal(tmp_path: Path) -> None:
    """What could be typed into it would be what the person who started the platform types."""
    said = tmp_path / "said"
    pid, terminal = pty.fork()  # its child leads a session with a terminal
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", STARTS, str(said)])
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "who starts it keeps the terminal"
    finally:
        os.close(terminal)
    assert said.read_text() == "none\n"


@pytest.mark.parametrize("what", ["pipe", "log"])
async def test_one_that_cannot_be_started_again_now_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its program, or the table of open files of the machine, has no room for a moment: the others are left alone."""
    supervisor = Supervisor([spec("a", SERVES, tmp_path), spec("b", SERVES, tmp_path)], restarts=QUICK)
    await supervisor.start()
    before, real, tries = supervisor.pids(), {"pipe": os.pipe, "log": log_files.open_log}[what], list[int]()

    def short(*args: Path) -> object:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.ENFILE, "Too many open files in system")
        return real(*args)  # type: ignore[operator]

    monkeypatch.setattr(*((os, "pipe") if what == "pipe" else (process, "open_log")), short)
    os.kill(before["a"], signal.SIGKILL)
    await until(lambda: supervisor.failed.done() or supervisor.pids().get("a") not in (None, before["a"]))
    try:
        assert not supervisor.failed.done(), supervisor.failed.result()
        assert supervisor.pids()["b"] == before["b"]
    finally:
        await supervisor.stop()

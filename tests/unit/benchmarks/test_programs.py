"""Programs of a benchmark: real processes, ended with everything below them."""

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.programs import Program, ProgramFailed, may_isolate, run_to_end
from sllm_runtime.platform.process import start_time
from tests.fixtures.waiting import GIVE_UP_S

WITH_CHILD = """
import json, subprocess, sys, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN) if "deaf" in sys.argv else None
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("not for us", flush=True)
print(json.dumps({"child": child.pid}), flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def test_it_hears_json_and_logs_the_rest(tmp_path: Path) -> None:
    with Program(python(WITH_CHILD), tmp_path / "log") as program:
        assert "child" in program.hear(30)
        program.say({"echo": 1})
        assert program.hear(30) == {"echo": 1}
        assert (tmp_path / "log").read_text() == "not for us\n"


def test_what_nobody_hears_does_not_stop_it(tmp_path: Path) -> None:
    """Its pipe holds 64 KiB; a server writes a line for each call."""
    code = "import pathlib, sys\nprint('a call\\n' * 20_000, flush=True)\npathlib.Path(sys.argv[1]).touch()"
    with Program(python(code, str(tmp_path / "done")), tmp_path / "log") as program:
        until = time.monotonic() + GIVE_UP_S
        while not (tmp_path / "done").exists():
            assert time.monotonic() < until, "it stands in its write"
            time.sleep(0.01)
        with pytest.raises(ProgramFailed, match="ended"):
            program.hear(GIVE_UP_S)
        assert (tmp_path / "log").read_text().count("a call\n") == 20_000


def test_what_was_said_before_anybody_heard_is_heard(tmp_path: Path) -> None:
    with Program(python('print(\'{"one": 1}\\n[2]\\n{"three": 3}\')'), tmp_path / "log") as program:
        assert program.hear(GIVE_UP_S) == {"one": 1}
        assert program.hear(GIVE_UP_S) == {"three": 3}
        for _ in range(2):
            with pytest.raises(ProgramFailed, match="exit status 0"):
                program.hear(GIVE_UP_S)
    assert (tmp_path / "log").read_text() == "[2]\n"


def test_what_a_command_used_is_known_when_it_has_ended() -> None:
    code = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint('said')\nsys.exit('and why')"
    done, used = run_to_end(python(code), GIVE_UP_S)
    assert (done.returncode, done.stdout, done.stderr) == (1, "said\n", "and why\n")
    assert 0.2 <= used < GIVE_UP_S


def test_its_usage_counts_its_children(tmp_path: Path) -> None:
    burn = (
        "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "print('{}', flush=True)\np.wait()"
    )
    with Program(python(burn), tmp_path / "log") as program:
        program.hear(30)
        until = time.monotonic() + 60
        while program.usage().cpu_s < 0.3:
            assert time.monotonic() < until, "the child's CPU time is not counted"
        assert program.usage().pss_mib > 1


def test_it_starts_nothing_while_what_it_has_started_goes_on(tmp_path: Path) -> None:
    with Program(python(WITH_CHILD), tmp_path / "log") as program:
        child = psutil.Process(program.hear(30)["child"])
        own = psutil.Process(program.pid)
        with program.starting_nothing():
            until = time.monotonic() + 60
            while own.status() != psutil.STATUS_STOPPED:
                assert time.monotonic() < until
            assert child.status() != psutil.STATUS_STOPPED
        program.say({"echo": 1})
        assert program.hear(30) == {"echo": 1}


@pytest.mark.parametrize("own_namespace", [False, True])
def test_stopping_it_ends_a_child_in_a_session_of_its_own(tmp_path: Path, own_namespace: bool) -> None:
    if own_namespace and not may_isolate():
        pytest.skip("this user may not make PID namespaces")
    with Program(python(WITH_CHILD), tmp_path / "log", own_namespace=own_namespace) as program:
        program.hear(30)
        tree = program.tree()
    assert len(tree) >= 2
    assert [process for process in tree if start_time(process.pid) is not None] == []


def test_a_namespace_ends_what_lost_its_parent(tmp_path: Path) -> None:
    if not may_isolate():
        pytest.skip("this user may not make PID namespaces")
    orphan = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
        "    os._exit(0)\nos.wait()\nprint('{}', flush=True)\ntime.sleep(600)"
    )
    with Program(python(orphan), tmp_path / "log", own_namespace=True) as program:
        program.hear(30)
        assert len(psutil.Process(program.pid).children(recursive=True)) >= 2


def test_what_ended_too_soon_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        Program(python("import sys; sys.exit('no such port')"), tmp_path / "log") as program,
        pytest.raises(ProgramFailed, match=r"exit status 1(?s:.*)no such port"),
    ):
        program.hear(30)


def test_silence_is_a_failure_after_its_time(tmp_path: Path) -> None:
    with (
        Program(python("import time; time.sleep(600)"), tmp_path / "log") as program,
        pytest.raises(ProgramFailed, match="in time"),
    ):
        program.hear(0.1)


def test_it_dies_with_the_benchmark(tmp_path: Path) -> None:
    outer = (
        "import sys, time\nfrom pathlib import Path\nfrom benchmarks.programs import Program\n"
        f"p = Program([sys.executable, '-c', 'import time; time.sleep(600)'], Path({str(tmp_path)!r}) / 'inner')\n"
        "print('{\"pid\": %d}' % p.pid, flush=True)\ntime.sleep(600)"
    )
    with Program(python(outer), tmp_path / "log", cwd=Path(__file__).parents[3]) as program:
        inner = int(program.hear(60)["pid"])
        psutil.Process(program.pid).send_signal(signal.SIGKILL)
        until = time.monotonic() + 60
        while start_time(inner) is not None:
            assert time.monotonic() < until, "it outlived the benchmark"
            time.sleep(0.01)

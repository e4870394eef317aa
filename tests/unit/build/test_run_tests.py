"""`make test`'s runs: they share the files, show one report, and end together."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.build.stage import ROOT
from tools import run_tests

WITHIN_S = 60
HEAD = "import os, pathlib\nHERE = pathlib.Path(__file__).parent\n"
NOTES = "def note(name): open(HERE / 'log', 'a').write(name + '\\n')\n"


@contextmanager
def running(folder: Path, files: dict[str, str], *options: str, runs: int = 2) -> Iterator[subprocess.Popen[str]]:
    """The runner on `files` alone, in a process group of its own as a terminal would have it."""
    for name, code in files.items():
        (folder / f"test_{name}.py").write_text(HEAD + NOTES + code)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --disable-plugin-autoload\n")
    command = [sys.executable, str(ROOT / "tools/run_tests.py"), "-p", "tests.leaks", "-c", str(folder / "pytest.ini")]
    with subprocess.Popen(
        [*command, *options, str(folder)],
        env={name: value for name, value in os.environ.items() if name != "SLLM_TEST_SHARE"}
        | {run_tests.RUNS: str(runs)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def done(folder: Path, files: dict[str, str], *options: str, runs: int = 2) -> tuple[int, str]:
    """Exit status and output."""
    with running(folder, files, *options, runs=runs) as process:
        output, _ = process.communicate(timeout=WITHIN_S)
        return process.returncode, output


def test_each_file_is_run_once_and_what_failed_is_told_at_the_end(tmp_path: Path) -> None:
    """The first and the last file wait for each other: one run alone would never end."""
    os.mkfifo(tmp_path / "meet")
    files = {
        "a": "import atexit; atexit.register(print, 'said at the very end')\n"
        "def test_reads(): note('a'); assert (HERE / 'meet').read_text() == 'y'\n",
        "b": "def test_b(): note('b')\ndef test_b2(): note('b2')\n",
        "c": "def test_writes(): note('c'); (HERE / 'meet').write_text('x')\n",
    }
    code, output = done(tmp_path, files)
    assert code == 1, output
    assert sorted((tmp_path / "log").read_text().split()) == ["a", "b", "b2", "c"]
    *_, last = output.splitlines()
    assert sorted(last.removeprefix("all runs: ").split(", ")) == ["1 failed", "3 passed"]
    assert "AssertionError: assert 'x' == 'y'" in output


def test_three_runs_are_at_work_at_once(tmp_path: Path) -> None:
    """Each of three files waits for the next one."""
    files = {}
    for name, following in ("ab", "bc", "ca"):
        os.mkfifo(tmp_path / name)
        files[name] = (
            "def test_meets():\n"
            f"    mine = os.open(HERE / {name!r}, os.O_RDWR)\n"
            f"    (HERE / {following!r}).write_text('x')\n"
            "    assert os.read(mine, 1) == b'x'\n"
            "    os.close(mine)\n"
        )
    code, output = done(tmp_path, files, runs=3)
    assert (code, output.splitlines()[-1]) == (0, "all runs: 3 passed"), output


@pytest.mark.parametrize("asked", ["0", "4", "many"])
def test_what_is_no_number_of_runs_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match=asked):
        run_tests.ends(asked)


@pytest.mark.parametrize(("gib", "runs"), [(0, "2"), (5, "2"), (8.9, "2"), (9, "3"), (500, "3")])
def test_there_are_as_many_runs_as_memory_is_for(gib: float, runs: str) -> None:
    assert run_tests.usual(int(gib * 2**30)) == runs
    assert len(run_tests.ends(runs)) == int(runs)


def test_the_memory_that_is_available_is_read_or_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "MEMINFO", tmp_path / "meminfo")
    assert run_tests.available() == 0
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\n")
    assert run_tests.available() == 0
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:    20 kB\nBuffers: 1 kB\n")
    assert run_tests.available() == 20 * 1024


def test_what_one_run_has_still_open_the_other_is_not_blamed_for(tmp_path: Path) -> None:
    """A process and a file in /dev/shm that a test holds while tests of the other run begin and end."""
    shared = Path("/dev/shm") / f"sllm-test-{os.getpid()}"
    os.mkfifo(tmp_path / "held")
    os.mkfifo(tmp_path / "looked")
    holds = f"""
import subprocess
def test_holds():
    with open({str(shared)!r}, 'w'), subprocess.Popen(['sleep', '600']) as child:
        (HERE / 'held').write_text('x')
        (HERE / 'looked').read_text()
        child.kill()
    os.unlink({str(shared)!r})
"""
    looks = """
def test_until_it_is_held(): (HERE / 'held').read_text()
def test_leaves_nothing(): pass
import pytest
@pytest.fixture(scope='module', autouse=True)
def says_when_it_is_over():
    yield
    (HERE / 'looked').write_text('x')
"""
    code, output = done(tmp_path, {"a": holds, "b": looks})
    assert (code, "all runs: 3 passed" in output) == (0, True), output


def test_x_ends_both(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "meet")
    files = {
        "a": "def test_fails(): (HERE / 'meet').read_text(); assert False\n",
        "b": "def test_not_begun(): note('b')\n",
        "c": """
import time
def test_lasts_until_the_other_has_failed():
    (HERE / 'meet').write_text('x')
    share = pathlib.Path(os.environ['SLLM_TEST_SHARE'].rpartition(':')[0])
    while not (share / 'stop').exists():
        time.sleep(0.01)
def test_not_begun_either(): note('c')
""",
    }
    code, output = done(tmp_path, files, "-x")
    assert code == 1, output
    assert "1 failed" in output.splitlines()[-1], output
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_both(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C comes to the whole group, SIGTERM to the runner alone."""
    files = {}
    for name in ("a", "b"):
        os.mkfifo(tmp_path / name)
        files[name] = f"import time\ndef test_waits():\n    (HERE / {name!r}).write_text('x')\n    time.sleep(600)\n"
    with running(tmp_path, files) as process:
        for name in files:
            (tmp_path / name).read_text()
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == (2 if number == signal.SIGINT else 128 + number), output

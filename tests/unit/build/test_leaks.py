"""The guard that every test stands under: what leaks is named, what is tidy passes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.build.stage import ROOT

RUN_SECONDS = 60
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
LEAKING = {
    "processes": "import subprocess; kept.append(subprocess.Popen(['sleep', '600']))",
    "files": "import tempfile; tempfile.mkdtemp(prefix='sllm-')",
    "descriptors": "import os; os.open('/dev/null', os.O_RDONLY)",
    "threads": "import threading; threading.Thread(target=stop.wait).start()",
}
HEAD = """
import threading
import pytest
kept = []
stop = threading.Event()
def teardown_module():
    stop.set()
"""
ORPHAN = "import subprocess; subprocess.run(['sh', '-c', 'sleep 600 & echo $! >orphan'], check=True)"


def run_pytest(folder: Path, code: str, *options: str, grace: str = "0.2") -> subprocess.CompletedProcess[str]:
    """Run `code` as a test file under the guard."""
    (folder / "test_it.py").write_text(HEAD + code)
    plugins = ["--disable-plugin-autoload", "-p", "pytest_asyncio.plugin", "-p", "tests.leaks"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "--rootdir", str(folder), *options]
    return subprocess.run(
        command,
        cwd=folder,
        env=ENVIRONMENT | {"SLLM_TEST_GRACE": grace},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )


def test_each_kind_of_leak_is_named_once(tmp_path: Path) -> None:
    tests = "".join(f"def test_{kind}():\n    {line}\n" for kind, line in LEAKING.items())
    done = run_pytest(tmp_path, tests)
    assert done.returncode == 1, done.stdout + done.stderr
    for kind in LEAKING:
        section = done.stdout.partition(f"ERROR at teardown of test_{kind} ")[2].partition("____")[2]
        assert f"\n  {kind}: " in section.partition("\n___")[0], done.stdout
    assert "4 passed, 4 errors" in done.stdout


def test_an_orphan_is_found_and_killed(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, f"def test_orphan():\n    {ORPHAN}\n")
    assert done.returncode == 1
    assert "sleep 600" in done.stdout
    orphan = int((tmp_path / "orphan").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)


def test_a_forgotten_task_is_named(tmp_path: Path) -> None:
    code = """
import asyncio
async def test_task():
    kept.append(asyncio.create_task(asyncio.sleep(600), name="forgotten"))
"""
    done = run_pytest(tmp_path, code, "-p", "pytest_asyncio", "-o", "asyncio_mode=auto")
    assert done.returncode == 1
    assert "asyncio tasks left behind:\n  forgotten: " in done.stdout


def test_what_a_wider_fixture_holds_is_its_own_affair_until_it_ends(tmp_path: Path) -> None:
    code = """
import subprocess
@pytest.fixture(scope="module")
def shell():
    with subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        yield shell
        shell.communicate("kill $!\\n")
def test_starts_a_child_of_the_shell(shell):
    shell.stdin.write("sleep 600 & echo started\\n")
    shell.stdin.flush()
    assert shell.stdout.readline() == "started\\n"
def test_is_idle(shell):
    pass
"""
    done = run_pytest(tmp_path, code, grace="60")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@pytest.mark.parametrize(("scope", "last"), [("module", "test_last_here"), ("session", "test_last_of_all")])
def test_what_a_wider_fixture_leaves_is_named_when_it_ends(tmp_path: Path, scope: str, last: str) -> None:
    code = f"""
@pytest.fixture(scope={scope!r})
def leaks():
    {LEAKING["processes"]}
def test_begins(leaks):
    pass
def test_last_here():
    pass
"""
    (tmp_path / "test_later.py").write_text("def test_last_of_all():\n    pass\n")
    done = run_pytest(tmp_path, code)
    assert done.returncode == 1
    assert f"ERROR at teardown of {last} " in done.stdout, done.stdout
    assert "sleep 600" in done.stdout
    assert "3 passed, 1 error" in done.stdout


def test_a_descriptor_with_the_number_of_one_that_was_closed_is_found(tmp_path: Path) -> None:
    code = """
import os
kept.append(os.open("/dev/zero", os.O_RDONLY))
def test_opens_another_one():
    os.close(kept[0])
    assert os.open("/dev/null", os.O_RDONLY) == kept[0]
"""
    done = run_pytest(tmp_path, code)
    assert done.returncode == 1
    assert "descriptors: " in done.stdout, done.stdout


def test_what_is_just_closing_has_time_to_go(tmp_path: Path) -> None:
    code = """
def test_thread_ends_soon():
    threading.Thread(target=stop.wait, args=(0.3,)).start()
@pytest.mark.leaves_behind("threads")
def test_is_excused():
    threading.Thread(target=stop.wait).start()
"""
    done = run_pytest(tmp_path, code, "-o", "markers=leaves_behind", grace="60")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_the_reaper_hands_on_signals_and_exit_status(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "here")
    code = "def test_waits():\n    open('here', 'w').close()\n    stop.wait(50)\n"
    (tmp_path / "test_it.py").write_text(HEAD + code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.leaks", "--rootdir", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        (tmp_path / "here").read_bytes()
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=RUN_SECONDS) == 128 + signal.SIGTERM

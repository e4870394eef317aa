"""`make demo` as a person runs it: to its end, interrupted, killed, and with a function that is broken."""

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fixtures.cluster import QUICK
from tests.fixtures.command import here, sllm_json
from tests.fixtures.deployed import descendants, wait_gone
from tests.fixtures.waiting import GIVE_UP_S

ROOT = Path(__file__).parents[2]
WITHIN_S = 240
KEEP_ALIVE = re.compile(r'keep_alive="\d+s"')
ROW = r"│ {} +│ +([0-9.]+|-) +│ +([0-9.]+|-) +│"
START = ("sandbox", "import", "weights", "setup")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with what the demo needs."""
    return checkout(tmp_path, ROOT / "functions" / "coder")


@pytest.fixture
def quick(tmp_path: Path, coder: Path) -> Path:
    """The same, but that its model is converted."""
    return checkout(tmp_path, coder)


def checkout(tree: Path, coder: Path) -> Path:
    """The demo and its function, which is let go of soon."""
    (tree / "tools").mkdir()
    for name in ("demo.py", "main_job.py"):
        shutil.copy(ROOT / "tools" / name, tree / "tools")
    shutil.copytree(coder, tree / "functions" / "coder")
    (tree / "tmp").mkdir()
    keep(tree, 1)
    return tree


def keep(tree: Path, seconds: int) -> None:
    """For so long after its last call."""
    function = tree / "functions" / "coder" / "function.py"
    text, changed = KEEP_ALIVE.subn(f'keep_alive="{seconds}s"', function.read_text())
    assert changed == 1
    function.write_text(text)


def environment(tree: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLLM_")}
    own = {"SLLM_HOME": str(tree / "home"), "SLLM_PORT": "0", "TMPDIR": str(tree / "tmp"), "COLUMNS": "100"}
    return {**kept, **QUICK, **own}


class Demo:
    """The running program: what it has printed so far, and its family."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.printed = ""

    def until(self, text: str) -> None:
        """Read on until it has printed ``text``."""
        deadline = time.monotonic() + WITHIN_S
        while text not in self.printed:
            assert self._read(deadline), f"it ended before {text!r}: {self.printed}"

    def end(self) -> int:
        """Read all it prints; its exit status."""
        deadline = time.monotonic() + WITHIN_S
        while self._read(deadline):
            pass
        return self.process.wait(WITHIN_S)

    def _read(self, deadline: float) -> bool:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"it says nothing more: {self.printed}"
        data = os.read(self.process.stdout.fileno(), 65536)
        self.printed += data.decode(errors="replace")
        return bool(data)

    def family(self) -> set[int]:
        return descendants(self.process.pid)


@contextmanager
def demo(tree: Path, *words: str, below: tuple[str, ...] = (), **more: str) -> Iterator[Demo]:
    """``tools/demo.py`` in a process group of its own, as a shell would run it; ``below``: a program that runs it.
    ``more``: of its environment."""
    argv = [*below, sys.executable, "-u", "tools/demo.py", *words]
    with subprocess.Popen(
        argv, cwd=tree, env=environment(tree) | more, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, process_group=0,
    ) as process:  # fmt: skip
        try:
            yield Demo(process)
        finally:
            process.kill()


def nothing_left(tree: Path) -> None:
    """Neither the platform's directory nor anything else of it."""
    assert [path.name for path in (tree / "tmp").iterdir() if path.name.startswith("sllm")] == []
    assert not (tree / "home").exists()


def test_the_whole_demo(tree: Path) -> None:
    for patience in (1, 10, 40):
        keep(tree, patience)
        printed = whole_demo(tree)
        rows = {stage: re.search(ROW.format(stage), printed) for stage in START}
        for found in rows.values():
            assert found, printed
            assert found.group(1) != "-", "the cold call"
        if all(found and found.group(2) == "-" for found in rows.values()):
            return  # where the machine stands still the warm call may come when the function is held no more
    pytest.fail(f"no call was warm: {printed}")


def whole_demo(tree: Path) -> str:
    """To its end; what it printed."""
    with demo(tree) as running:
        running.until("cold call")
        family = running.family()
        assert running.end() == 0, running.printed
    printed = running.printed
    assert printed.index("cold call") < printed.index("warm call") < printed.index("Where the time went")
    for stage in ("queue", "first_token", "tokens", "first token at the client"):
        found = re.search(ROW.format(stage), printed)
        assert found, printed
        assert "-" not in found.groups(), "both calls have it"
    assert "curl -N http://127.0.0.1:" in printed
    assert "from openai import OpenAI" in printed
    assert printed.rstrip().endswith("everything is stopped")
    wait_gone(family)
    nothing_left(tree)
    return printed


def test_it_can_leave_the_platform_up_and_its_lines_work(quick: Path) -> None:
    env = environment(quick)
    try:
        with demo(quick, "--keep") as running:
            assert running.end() == 0, running.printed
        assert [function["name"] for function in sllm_json(env, "fn", "list")["functions"]] == ["coder"]
        start, end = running.printed.index("from openai import"), running.printed.index("the platform is up")
        snippet = running.printed[start:end]
        done = subprocess.run(
            [sys.executable, "-c", snippet], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stdout) > 20
    finally:
        here(env, "down")


@pytest.mark.parametrize("moment", [pytest.param("ready in", marks=pytest.mark.slow), "cold call"])
def test_ctrl_c_leaves_nothing(quick: Path, moment: str) -> None:
    with demo(quick) as running:
        running.until(moment)
        family = running.family()
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.end() == 130, running.printed
    assert "interrupted; everything is stopped" in running.printed
    wait_gone(family)
    nothing_left(quick)


@pytest.mark.chaos
@pytest.mark.slow  # test_up.py has the death of whoever started the platform, a test below that of the demo's parent
@pytest.mark.parametrize(
    ("below", "moment"),
    [
        pytest.param((), "cold call", id="of itself"),
        pytest.param(("sh", "-c", '"$@"; exit $?', "make"), "cold call", id="of its parent"),
    ],
)
def test_kill_9_leaves_nothing(quick: Path, below: tuple[str, ...], moment: str) -> None:
    with demo(quick, below=below) as running:
        running.until(moment)
        family = running.family()
        assert len(family) >= 6
        running.process.kill()
        running.process.wait(GIVE_UP_S)
        wait_gone(family)
    nothing_left(quick)


@pytest.fixture
def importing(tree: Path) -> Path:
    """A checkout in which an import of the demo takes as long as a test likes."""
    (tree / "tools" / "rich.py").write_text("import signal\nprint('importing')\nsignal.pause()\n")
    return tree


def test_ctrl_c_while_it_imports(importing: Path) -> None:
    with demo(importing) as running:
        running.until("importing\n")
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.end() == 130
    assert running.printed == "importing\n"


def test_it_ends_with_its_parent_while_it_imports(importing: Path) -> None:
    with demo(importing, below=("sh", "-c", '"$@"; exit $?', "make")) as running:
        running.until("importing\n")
        family = running.family()
        assert family
        running.process.kill()
        running.end()
        wait_gone(family)
    assert running.printed == "importing\n"


def test_it_does_nothing_if_its_parent_was_dead_before_it_began(importing: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait(GIVE_UP_S)
    with demo(importing, SLLM_PARENT_PID=str(gone.pid)) as running:
        assert running.end() == 1
    assert running.printed == ""


@pytest.mark.parametrize("words", [pytest.param((), marks=pytest.mark.slow), ("--keep",)])
def test_a_function_that_cannot_be_deployed_fails_it(quick: Path, words: tuple[str, ...]) -> None:
    function = quick / "functions" / "coder" / "function.py"
    function.write_text(
        function.read_text().replace("from sllm import", "import nowhere_to_be_found\nfrom sllm import")
    )
    with demo(quick, *words) as running:
        running.until("ready in")
        family = running.family()
        assert running.end() == 1, running.printed
    assert "nowhere_to_be_found" in running.printed
    assert "demo failed" in running.printed
    wait_gone(family)
    here(environment(quick), "down", expect=3)

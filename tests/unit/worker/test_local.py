"""Calls without a platform: ``Function.local`` and ``sllm run``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sllm.cli.load import one as find
from sllm_runtime.protocol.errors import InvalidArgument
from sllm_runtime.worker import local
from sllm_runtime.worker.local import run_local
from tests.fixtures import command
from tests.fixtures.waiting import GIVE_UP_S

FUNCTIONS = Path(__file__).parents[2] / "fixtures" / "functions"

SPEAKS = """
import os
from sllm import model_function

@model_function(env={"NUMBER": "1"})
def speaks():
    print("hello", os.environ["NUMBER"])
    yield "one"
    print("hello 2")
    yield 2
"""
WITH_MODEL = """
from collections.abc import AsyncIterator, Iterator
from sllm import Model, model_function

@model_function(model=MODEL, name="sync")
def sync(model: Model, prompt: str = "def f", n: int = 4) -> Iterator[str]:
    yield from model.generate(prompt, max_tokens=n)

@model_function(model=MODEL, name="awaited")
async def awaited(model: Model, prompt: str = "def f", n: int = 4) -> AsyncIterator[str]:
    async for piece in model.agenerate(prompt, max_tokens=n):
        yield piece
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("name", "given", "answer"),
    [
        ("awaited", {"text": "a"}, "A"),
        ("yields", {"count": 1}, [{"left": "0", "right": "r"}]),
        ("yields_async", {"count": 2}, [0, 1]),
        ("Counter", {"step": 3}, 3),
        ("AsyncCounter", {}, [10, 11]),
        ("returns_iterator", {"count": 2}, [0, 1]),
        ("mapped", {"count": 2}, [0, 1]),
        ("wrapped", {"count": 0}, []),
        ("lists", {"count": 2}, [0, 1]),
    ],
)
def test_every_kind(name: str, given: dict[str, Any], answer: Any) -> None:
    assert run_local(find(f"{FUNCTIONS / 'kinds.py'}::{name}"), given) == answer


async def test_inside_an_event_loop() -> None:
    assert run_local(find(f"{FUNCTIONS / 'kinds.py'}::yields_async"), {"count": 2}) == [0, 1]
    await asyncio.sleep(0)


def test_the_users_exception_and_bad_arguments() -> None:
    with pytest.raises(ValueError, match="oh"):
        run_local(find(str(FUNCTIONS / "raises.py")), {"text": "oh"})
    with pytest.raises(InvalidArgument):
        run_local(find(str(FUNCTIONS / "raises.py")), {"texts": "oh"})


def run(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", "from sllm.cli import main; main()", "run", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)


def test_a_model_here_and_by_the_command(models: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "with_model.py"
    file.write_text(WITH_MODEL.replace("MODEL", repr(str(models("llama")))))
    here = run_local(find(f"{file}::sync"), {})
    assert len(here) == 4
    assert run_local(find(f"{file}::awaited"), {}) == here
    done = command.here(os.environ, "run", f"{file}::sync", "n=4", "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == here


def test_the_command_runs_with_the_functions_environment_and_keeps_its_prints_apart(tmp_path: Path) -> None:
    (tmp_path / "speaks.py").write_text(SPEAKS)
    done = run(f"{tmp_path / 'speaks.py'}::speaks", "--json")
    assert (done.returncode, [json.loads(line) for line in done.stdout.splitlines()]) == (0, ["one", 2]), done.stderr
    assert done.stderr == "hello 1\nhello 2\n"


def test_the_commands_failures() -> None:
    done = command.here(os.environ, "run", str(FUNCTIONS / "raises.py"), "text=oh", "--json", expect=1)
    assert json.loads(done.stderr.splitlines()[-1])["error"]["code"] == "function_error"
    assert "raise ValueError(text)" in done.stderr
    assert done.stdout == ""


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "from sllm.cli import main; main()", "run", str(FUNCTIONS / "slow_stream.py")]
    with subprocess.Popen([*argv, "count=100000"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(GIVE_UP_S) == 130


BOUND = """
import asyncio
from sllm import model_function

@model_function
async def bound():
    async with asyncio.timeout(0.2):
        yield 1
        await asyncio.sleep(2)
        yield 2
"""


def test_what_spans_a_yield_is_as_deployed(tmp_path: Path) -> None:
    """One task runs all of a call: a deadline that it sets itself is kept."""
    (tmp_path / "bound.py").write_text(BOUND)
    with pytest.raises(TimeoutError):
        run_local(find(str(tmp_path / "bound.py")), {})


async def test_what_a_generator_raises_when_it_is_closed_is_told() -> None:
    async def fails_at_its_end() -> AsyncIterator[int]:
        try:
            yield 0
            yield 1
        finally:
            raise RuntimeError("it cannot be written")

    values = local._InOneTask(fails_at_its_end())
    assert await values.next() == 0
    with pytest.raises(RuntimeError, match="it cannot be written"):
        await values.close()


async def test_values_that_come_to_their_end_are_closed_as_deployed() -> None:
    """What closes takes its time, and is not cancelled meanwhile; what it raises is told."""
    said: list[str] = []

    class Values:
        def __aiter__(self) -> Values:
            return self

        async def __anext__(self) -> int:
            if said:
                raise StopAsyncIteration
            said.append("begun")
            return 0

        async def aclose(self) -> None:
            await asyncio.sleep(0.05)
            said.append("closed")
            raise RuntimeError("it cannot be written")

    values = local._InOneTask(Values())
    assert await values.next() == 0
    with pytest.raises(RuntimeError, match="it cannot be written"):
        await values.next()
    await values.close()
    assert said == ["begun", "closed"]

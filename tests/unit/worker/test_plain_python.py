"""What real modules do holds in a worker as it does in a plain Python process."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sllm_runtime.worker import bundle
from tests.unit.worker.harness import Worker, Zygote, bundle_of, manifest

DECIMAL = """
import decimal
decimal.getcontext().prec = 50
{0}def fn():
    {1} str(decimal.Decimal(1) / 3)
"""
CONTEXT = """
import contextvars
tenant = contextvars.ContextVar("tenant", default="none")
class fn:
    def setup(self):
        tenant.set("acme")
    def __call__(self):
        before = tenant.get()
        tenant.set("changed in a call")
        return before
"""
NUMPY = """
import numpy as np
np.seterr(all="raise")
def fn():
    return np.geterr()["divide"]
"""
GRAD = """
import torch
class fn:
    def setup(self):
        torch.set_grad_enabled(False)
        self.layer = torch.nn.Linear(2, 2)
    def __call__(self):
        return len(self.layer(torch.ones(2)).numpy())
"""
DEVICE = """
import torch
torch.set_default_device("meta")
def fn():
    return str(torch.ones(2).device)
"""


MONEY = """
import decimal
class Money(decimal.Context):
    def cents(self, amount):
        return self.quantize(amount, decimal.Decimal("0.01"))
decimal.setcontext(Money(prec=12))
def fn():
    return str(decimal.getcontext().cents(decimal.Decimal(1) / 3))
"""


@pytest.mark.parametrize(
    ("text", "kind", "output"),
    [
        (DECIMAL.format("", "return"), "function", "0." + "3" * 50),
        (DECIMAL.format("", "yield"), "generator", "0." + "3" * 50),
        (DECIMAL.format("async ", "return"), "async_function", "0." + "3" * 50),
        (MONEY, "function", "0.33"),
        (CONTEXT, "class", "acme"),
        (NUMPY, "function", "raise"),
        (GRAD, "class", 2),
        (DEVICE, "function", "meta"),
    ],
    ids=["decimal", "decimal-generator", "decimal-async", "own-decimal", "contextvar", "numpy", "grad", "device"],
)
def test_what_a_module_or_setup_has_set_holds_in_calls(
    worker: Worker, tmp_path: Path, text: str, kind: Any, output: Any
) -> None:
    worker.start(manifest(kind=kind), bundle_of({"user.py": text}), workdir=tmp_path)
    for _ in range(2):
        answer = worker.run()
        assert answer.end is not None
        assert (answer.outputs, answer.end.error) == ([output], None)


CLOCK = "import datetime\ndef fn():\n    return str(datetime.datetime.fromtimestamp(0))\n"


def test_a_time_zone_of_the_manifest_is_that_of_its_function(worker: Worker, tmp_path: Path) -> None:
    made = manifest(env={"TZ": "America/New_York"})
    worker.start(made, bundle_of({"user.py": CLOCK}), workdir=tmp_path)
    assert worker.run().outputs == ["1969-12-31 19:00:00"]


@pytest.fixture
def buffered() -> Iterator[tuple[Zygote, Worker]]:
    """Without PYTHONUNBUFFERED, which those who run tests may have, and nodes have not."""
    before = os.environ.pop("PYTHONUNBUFFERED", None)
    try:
        server = Zygote()
    finally:
        if before is not None:
            os.environ["PYTHONUNBUFFERED"] = before
    one = server.spawn()
    yield server, one
    one.close()
    server.exited(1)
    server.close()


def piped(worker: Worker, number: int) -> str:
    """What is in the pipe of stdout (0) or stderr (1)."""
    fd = worker._pipes[number]
    return os.read(fd, 1 << 16).decode() if select.select([fd], [], [], 5)[0] else ""


BYTES = """
import sys
def fn():
    sys.stdout.buffer.write(b"by its buffer\\n")
    sys.stdout.flush()
"""


def test_bytes_that_were_flushed_are_in_the_log(buffered: tuple[Zygote, Worker], tmp_path: Path) -> None:
    _, worker = buffered
    worker.start(manifest(), bundle_of({"user.py": BYTES}), workdir=tmp_path)
    worker.run()
    assert piped(worker, 0) == "by its buffer\n"


RECONFIGURES = """
import sys
sys.stdout.reconfigure(line_buffering=True)
sys.stderr.reconfigure(encoding="utf-8", errors="replace")
def fn():
    print("said")
    return [sys.stdout.name, sys.stdout.mode, sys.stdout.line_buffering]
"""


def test_a_module_may_configure_its_streams(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest(), bundle_of({"user.py": RECONFIGURES}), workdir=tmp_path)
    assert worker.run().outputs == [["<stdout>", "w", True]]
    assert [log.text for log in worker.logs] == ["said"]


LOGS = """
import logging, multiprocessing, sys, threading
logging.basicConfig(level=logging.INFO)

def child():
    logging.info("said by the child")

def fn(times: int = 1):
    busy = times > 1
    def talks():
        while busy:
            sys.stderr.write("x" * 100)
    threading.Thread(target=talks, daemon=True).start()
    codes = []
    for _ in range(times):
        one = multiprocessing.get_context("fork").Process(target=child)
        one.start()
        one.join(10)
        codes.append(one.exitcode)
    busy = False
    return codes
"""


def test_what_a_forked_child_logs_is_in_the_log(worker: Worker, tmp_path: Path) -> None:
    """Also by a handler that the parent has made."""
    worker.start(manifest(), bundle_of({"user.py": LOGS}), workdir=tmp_path)
    assert worker.run().outputs == [[0]]
    assert "said by the child" in piped(worker, 1)


def test_a_child_that_logs_does_not_wait_for_a_thread_of_its_parent(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest(), bundle_of({"user.py": LOGS}), workdir=tmp_path)
    assert worker.run({"times": 40}).outputs == [[0] * 40]


MAIN = """
{future}
import dataclasses, pickle, sys
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
from pydantic import BaseModel
from sllm import bundle, model_function

@dataclasses.dataclass
class Item:
    number: int

def square(item):
    return item.number ** 2

class Point(BaseModel):
    x: int

class Line(BaseModel):
    a: Point
    b: list[Point]

@model_function()
def pickles() -> int:
    return pickle.loads(pickle.dumps(Item(3))).number

@model_function()
def pools() -> list[int]:
    with ProcessPoolExecutor(2, mp_context=mp.get_context("fork")) as pool:
        return list(pool.map(square, [Item(1), Item(2)]))

@model_function()
class PoolsInItsCall:
    def __call__(self) -> list[int]:
        with ProcessPoolExecutor(2, mp_context=mp.get_context("fork")) as pool:
            return list(pool.map(square, [Item(1), Item(2)]))

@model_function()
def models(line: Line) -> int:
    return line.a.x + line.b[0].x

if __name__ == "__main__":
    sys.stdout.buffer.write(bundle.build(globals()[sys.argv[1]]).data)
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"], ids=["", "future"])
@pytest.mark.parametrize(
    ("name", "kind", "given", "output"),
    [
        ("pickles", "function", {}, 3),
        ("pools", "function", {}, [1, 4]),
        ("PoolsInItsCall", "class", {}, [1, 4]),
        ("models", "function", {"line": {"a": {"x": 1}, "b": [{"x": 2}]}}, 3),
    ],
)
def test_what_a_script_defines_works_where_it_travels_by_value(
    worker: Worker, tmp_path: Path, name: str, kind: Any, given: Any, output: Any, future: str
) -> None:
    script, home = tmp_path / "script" / "main.py", tmp_path / "home"
    for directory in (script.parent, home):
        directory.mkdir()
    script.write_text(MAIN.format(future=future).strip())
    data = subprocess.run(
        [sys.executable, str(script), name], stdout=subprocess.PIPE, check=True, cwd=script.parent
    ).stdout
    worker.start(manifest("pickle:", kind), data, workdir=home)
    answer = worker.run(given)
    assert answer.end is not None
    assert (answer.outputs, answer.end.error) == ([output], None)


SHARED = """
import decimal
VAT = decimal.Decimal(119) / 100
def fn(digits: int = 0):
    if digits:
        decimal.getcontext().prec = digits
    return str(decimal.Decimal(1) / 3)
"""


def test_the_precision_of_one_call_is_not_that_of_the_next(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest(), bundle_of({"user.py": SHARED}), workdir=tmp_path)
    assert worker.run({"digits": 5}).outputs == ["0.33333"]
    assert worker.run({}).outputs == ["0." + "3" * 28]


WHILE = """
import asyncio, torch
def gen():
    yield torch.is_grad_enabled()
async def fn(hold: bool = False):
    if hold:
        with torch.no_grad():
            await asyncio.sleep(1.5)
        return iter([])
    return gen()
"""


def test_what_a_call_on_the_loop_sets_for_a_while_is_no_others(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest(kind="async_function"), bundle_of({"user.py": WHILE}), workdir=tmp_path)
    holding = worker.call({"hold": True})
    assert worker.run({}).outputs == [True]
    assert worker.finish(holding).end is not None


def test_names_of_a_script_are_found_behind_a_librarys_decorator(worker: Worker, tmp_path: Path) -> None:
    script, home = tmp_path / "script" / "main.py", tmp_path / "home"
    for directory in (script.parent, home):
        directory.mkdir()
    decorated = "import torch\n\n@model_function()\n@torch.inference_mode()\ndef pickles"
    script.write_text(MAIN.format(future="").strip().replace("@model_function()\ndef pickles", decorated))
    data = subprocess.run(
        [sys.executable, str(script), "pickles"], stdout=subprocess.PIPE, check=True, cwd=script.parent
    ).stdout
    worker.start(manifest("pickle:", "function"), data, workdir=home)
    assert worker.run({}).outputs == [3]


PART = """
import multiprocessing, sys
kept = sys.stderr
def child():
    kept.write("done 3/10")
    kept.flush()
def fn():
    one = multiprocessing.get_context("fork").Process(target=child)
    one.start()
    one.join(10)
    return one.exitcode
"""


def test_what_a_forked_child_flushes_is_in_the_log_without_an_end(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest(), bundle_of({"user.py": PART}), workdir=tmp_path)
    assert worker.run().outputs == [0]
    assert "done 3/10" in piped(worker, 1)


def test_a_method_that_says_it_wraps_itself_is_looked_at_once() -> None:
    class Odd:
        def run(self) -> None: ...

    Odd.run.__wrapped__ = Odd.run  # type: ignore[attr-defined]
    assert list(bundle._functions(Odd)) == [Odd.run]

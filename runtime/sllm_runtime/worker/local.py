"""Runs one call in this process, without a platform, on the worker's own way: loaderd, module, engine, function.

loaderd is a child for as long as the weights are loaded; its memory outlives it here. One load at a time on a machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import inspect
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import msgspec

from sllm_loaderd.client import LoaderControl
from sllm_runtime.platform.process import die_with_parent
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.manifest import TARGET_ATTRIBUTE, Manifest
from sllm_runtime.worker import handler
from sllm_runtime.worker.arriving import Report, Weights
from sllm_runtime.worker.calls import described
from sllm_runtime.worker.engine.sinks import Mailbox
from sllm_runtime.worker.handle import ModelHandle
from sllm_runtime.worker.model import load_model
from sllm_runtime.worker.own import Foreign
from sllm_runtime.worker.values import encode

_START_S: Final = 30.0
_TURN_S: Final = 600.0
_STOP_S: Final = 10.0
_FETCH_S: Final = 3600.0
T = TypeVar("T")


def run_local(function: Any, arguments: dict[str, Any]) -> Any:
    """The whole answer of one call of a described function: a list where it yields. What ``Function.local`` runs.

    Raises the user's own exception, or ``SllmError``.
    """

    def whole() -> Any:
        with _values(function, arguments) as (values, yielded):
            found = list(values)
        return found if yielded else found[0]

    return _apart(whole)


@contextlib.contextmanager
def stream_local(function: Any, arguments: dict[str, Any], report: Report | None = None) -> Iterator[Iterator[Any]]:
    """The values of one call as they come; ``report`` hears of the model's loading."""
    with _values(function, arguments, report) as (values, _):
        yield values


@contextlib.contextmanager
def _values(
    function: Any, arguments: dict[str, Any], report: Report | None = None
) -> Iterator[tuple[Iterator[Any], bool]]:
    target = getattr(function, TARGET_ATTRIBUTE)
    manifest: Manifest = function.manifest(f"{target.__module__}:{target.__qualname__}")
    with contextlib.ExitStack() as stack:
        handle = None
        if manifest.model is not None:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sllm-local-")))
            handle = _apart(lambda: _load(manifest, home, sys.modules.get(target.__module__), report or _silent))
            stack.callback(handle.close)
        runner = stack.enter_context(asyncio.Runner())
        if handle is not None:
            handle.use_loop(Mailbox(runner.get_loop()))
        try:
            made = runner.run(handler.instantiate(target, handle)) if isinstance(target, type) else target
        except Foreign as error:  # here it is the user's own exception, as that of a call is
            raise error.__cause__ or error from None
        user = handler.bind(made, handle)
        result = user.call(**user.arguments.convert(arguments))
        if inspect.iscoroutine(result):
            result = runner.run(result)
        yielded = isinstance(result, AsyncIterator | Iterator)
        yield (_through_json(value) for value in _iterated(result, runner)), yielded


def _iterated(result: Any, runner: asyncio.Runner) -> Iterator[Any]:
    if isinstance(result, AsyncIterator):
        values = _InOneTask(result)
        try:
            while (value := runner.run(values.next())) is not _END:
                yield value
        finally:
            runner.run(values.close())
    elif isinstance(result, Iterator):
        yield from result
    else:
        yield result


_END: Final = object()


class _InOneTask:
    """Values asked for one at a time, all in the same task: what spans a yield (a deadline, a group of tasks) is that
    task's."""

    def __init__(self, values: AsyncIterator[Any]) -> None:
        self._values = values
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Semaphore(0)
        self._found: asyncio.Future[Any]

    async def next(self) -> Any:
        """The next one, ``_END`` behind the last. Raises what asking for it raised."""
        self._found = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self._wanted.release()
        await asyncio.wait((self._found, self._task), return_when=asyncio.FIRST_COMPLETED)
        if self._found.done() and self._found.result() is not _END:
            return self._found.result()
        await self._task  # until it has closed what gave the values
        return _END

    async def _run(self) -> None:
        try:
            while True:
                await self._wanted.acquire()
                value = await anext(self._values, _END)
                self._found.set_result(value)
                if value is _END:
                    return
        finally:
            if hasattr(self._values, "aclose"):
                await self._values.aclose()

    async def close(self) -> None:
        """End it, wherever it stands. Raises what its end raises."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))
            if not self._task.cancelled() and (error := self._task.exception()) is not None:
                raise error


def _through_json(value: Any) -> Any:
    """What a caller of the deployed function would get."""
    return msgspec.json.decode(encode(value))


def _silent(_stage: str, _done: int, _total: int) -> None:
    return


def _apart(work: Callable[[], T]) -> T:
    """Run ``work`` here, or in a thread where this one has a running event loop (a notebook)."""
    if not _in_a_loop():
        return work()
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # handed on below
            failed.append(error)

    thread = threading.Thread(target=run, name="sllm-local")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _load(manifest: Manifest, home: Path, module: ModuleType | None, report: Report) -> ModelHandle:
    base = Settings.load().home / "local"
    base.mkdir(parents=True, exist_ok=True)
    with _turn(base / "turn"), _loaderd(base, home) as path:
        granted = asyncio.run(_granted(path, str(manifest.model), report))
        pending = Weights.begin(granted, "local", manifest.startup_timeout)
        try:
            handle = load_model(manifest, home, pending, module, report)
            pending.wait(report)  # loaderd ends here
            return handle
        finally:
            pending.session.close()


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """One loaderd on a data directory at a time."""
    until = time.monotonic() + _TURN_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Unavailable(f"another local run has been loading for {_TURN_S:.0f} s ({path})") from None
                time.sleep(0.05)  # flock offers no event
            else:
                break
        yield


@contextlib.contextmanager
def _loaderd(base: Path, home: Path) -> Iterator[Path]:
    path, log, me = home / "loaderd.sock", home / "loaderd.log", os.getpid()
    command = [sys.executable, "-m", "sllm_loaderd", "--node", "local", "--data", str(base), "--socket", str(path)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is ours to handle
            preexec_fn=lambda: die_with_parent(parent=me),
        )
    try:
        until = time.monotonic() + _START_S
        while not path.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise Unavailable(f"loaderd did not start: {log.read_text(errors='replace')[-500:].strip()}")
            time.sleep(0.01)  # until it listens there is nothing to wait on
        yield path
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)


async def _granted(path: Path, uri: str, report: Report) -> int:
    async with LoaderControl(path) as control:
        info = await control.register(uri, report=report, deadline_s=_FETCH_S)
        return await control.grant(f"local-{os.getpid()}", info.model, range(len(info.partitions)))


def user_error(error: BaseException) -> SllmError:
    """What a call that raised in user code is for a command line."""
    return error if isinstance(error, SllmError) else described(error).to_error()

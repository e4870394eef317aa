"""A container engine, by its command line: each command with a deadline, each failure with its own last words."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Final

from sllm_invoker.containers import arguments
from sllm_invoker.containers.arguments import ContainerSpec, Kind
from sllm_runtime.platform.process import KILLED_S
from sllm_runtime.protocol.errors import Unavailable

log = logging.getLogger(__name__)

COMMAND_S: Final = 60.0
"""An engine that has not answered by then hangs. A loaded machine takes seconds to start a container."""
LET_END_S: Final = 2.0
"""At most, for a command that nobody wants any more: one that is killed leaves temporary files, a container that is
half made and locks of its store to the next one. Whose owner cancels it again is killed then."""
MAX_AT_ONCE: Final = 4
"""Commands that one node runs at one time: each is a process of its own, and engines lock their store."""
_WORDS: Final = 400
_GONE: Final = ("no such container", "no container with name or id")


class EngineFailed(Unavailable):
    """The engine refused a command, or hangs. ``said``: the end of what it said."""

    said = ""


class EngineHangs(EngineFailed):
    """It has not answered in time."""


@dataclass(frozen=True)
class Engine:
    """``program``: its path; ``options``: what this machine needs before every command (``probe`` finds out)."""

    kind: Kind
    program: str
    options: tuple[str, ...] = ()
    command_s: float = COMMAND_S
    """Seconds that a command has, unless it is one that takes longer."""
    turns: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_AT_ONCE), init=False, repr=False, compare=False
    )
    listeners: list[Callable[[EngineFailed], None]] = field(default_factory=list, init=False, repr=False, compare=False)
    """Told of each command that failed."""

    @property
    def words(self) -> tuple[str, ...]:
        return (self.program, *self.options)

    async def command(self, *words: str, data: bytes | None = None, within_s: float | None = None) -> str:
        """What it prints, ``data`` at its stdin. Raises ``EngineFailed``; cancelled, it may end (LET_END_S)."""
        async with self.turns:
            try:
                out, _err = await self._run(words, data, within_s or self.command_s, LET_END_S)
            except EngineFailed as error:
                for told in self.listeners:
                    told(error)
                raise
        return out

    async def _run(
        self, words: Sequence[str], data: bytes | None, within_s: float, patient_s: float = 0.0
    ) -> tuple[str, str]:
        """What it prints, and its errors. Cancelled, it has ``patient_s`` to end: one that only waits has none."""
        # Files, not pipes: what an engine puts into the background may hold on to a pipe's end for ever.
        with contextlib.ExitStack() as stack:
            out, err = stack.enter_context(_file()), stack.enter_context(_file())
            given = stack.enter_context(_file(data)) if data is not None else asyncio.subprocess.DEVNULL
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.words, *words, stdin=given, stdout=out, stderr=err,
                    start_new_session=True,  # a Ctrl-C at the terminal is the platform's
                )  # fmt: skip
            except OSError as error:
                raise EngineFailed(f"{self.program} cannot be run: {error}") from error
            try:
                async with asyncio.timeout(within_s):
                    code = await process.wait()
            except TimeoutError as error:
                patient_s = 0.0
                raise EngineHangs(
                    f"`{self.kind} {words[0]}` has not ended within {within_s:g} s; see whether {self.kind} answers"
                ) from error
            finally:
                await _end(process, patient_s)
            said = _text(err).strip()
            if code != 0:
                failed = EngineFailed(f"`{self.kind} {words[0]}` failed ({code}): {said[-_WORDS:]}")
                failed.said = said
                raise failed
            return _text(out), said

    # --- containers -----------------------------------------------------------------------------------
    async def run(self, spec: ContainerSpec, command: tuple[str, ...]) -> str:
        """Start a container in the background; its id."""
        return (await self.command(*arguments.run(self.kind, spec, command))).strip()

    async def limit(self, name: str, memory: int, cpu: float) -> None:
        """Other limits for a container that runs: bytes of memory, cores."""
        await self.command("update", *arguments.limits(memory, cpu), name)

    async def remove(self, name: str) -> None:
        """Kill and remove it; one that is not there is no error."""
        try:
            await self.command(*arguments.remove(self.kind, name))
        except EngineFailed as error:
            if not any(words in error.said.lower() for words in _GONE):
                raise

    async def abandon(self, name: str) -> None:
        """Have its runtime end a container whose monitor may be dead, before it is removed: podman leaves that to the
        monitor, and so would leave its control groups and what the runtime knows of it. Whatever goes wrong here, it is
        removed next."""
        if self.kind != "podman":
            return
        with contextlib.suppress(EngineFailed):
            out, _ = await self._run(arguments.runtime(name), None, self.command_s)
            program, _, container = out.strip().partition(" ")
            path = shutil.which(program)
            if path is not None and container:
                runtime = replace(self, program=path, options=())
                await runtime._run(("delete", "--force", container), None, self.command_s)

    async def wait(self, name: str, within_s: float = COMMAND_S) -> int:
        """The exit code of its process 1, once that has ended."""
        out, _err = await self._run(("wait", name), None, within_s)  # as long as others want to be made
        return int(out.strip() or -1)

    async def last_words(self, name: str) -> str:
        """What it wrote before its worker had pipes of its own; "" where the engine cannot say."""
        try:
            out, err = await self._run(("logs", "--tail", "5", name), None, 10.0)
        except EngineFailed:
            return ""
        return " | ".join(line for line in (out + err).splitlines() if line.strip())[-_WORDS:]

    async def places(self) -> dict[str, str]:
        """The place of each container of ours on this machine, by name."""
        lines = (await self.command(*arguments.places(self.kind))).splitlines()
        return {name: place for name, _, place in (line.partition("\t") for line in lines) if name}


def _file(content: bytes = b"") -> BinaryIO:
    """In memory, at its beginning."""
    file = os.fdopen(os.memfd_create("engine", os.MFD_CLOEXEC), "w+b")
    file.write(content)
    file.seek(0)
    return file


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


async def _end(process: asyncio.subprocess.Process, patient_s: float) -> None:
    """Nothing of a command goes on without us after ``patient_s``. What it has put into the background does."""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patient_s):
                await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(KILLED_S):
            await process.wait()
    except TimeoutError:
        log.error("a command of the engine (pid %d) has not ended %g s after SIGKILL: given up", process.pid, KILLED_S)

"""A worker's other end, as its invoker has it, with nothing of the platform behind: what a sandbox itself costs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.programs import ProgramFailed
from sllm import bundle
from sllm.cli import load
from sllm_invoker.bundles import sealed
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.frames import CallHead, End, FrameKind
from sllm_runtime.protocol.worker import Assign, CallFrames, Failed, FromWorker, Ready, StartCall, ToWorker

READY_S: Final = 60.0
CALL_S: Final = 60.0
_CREDIT: Final = 1 << 30
_numbers: Iterator[int] = itertools.count(1)


@dataclass(frozen=True)
class Answer:
    """One call's outputs, and when each was read off the socket (CLOCK_MONOTONIC, ns)."""

    values: tuple[Any, ...]
    arrived: tuple[int, ...]


class Worker:
    """The worker behind ``wire``, from its ``Hello`` on. Each step raises ``ProgramFailed`` where it fails."""

    def __init__(self, wire: AsyncWire) -> None:
        self._wire = wire

    async def become(self, function: bundle.Bundle, home: Path | str) -> None:
        """Its start, until it is ready."""
        manifest = function.manifest
        assign = Assign(
            instance=f"i-{next(_numbers)}",
            function=manifest.name,
            version=1,
            manifest=manifest,
            bundle=function.digest,
            env={"TMPDIR": str(home)},
            memory_limit=manifest.memory,
            threads=max(1, int(manifest.cpu)),
            workdir=str(home),
        )
        fd = sealed(function.data, "bundle")
        try:
            self._wire.send(codec.pack(ToWorker(assign)), [fd])
        finally:
            os.close(fd)
        await self._until(Ready, lambda _ready: True, READY_S)

    async def call(self, function: bundle.Bundle, arguments: dict[str, Any]) -> Answer:
        """One call of it, to its end."""
        number, body = next(_numbers), json.dumps(arguments).encode()
        name = function.manifest.name
        head = CallHead(
            call=f"c-{number}", epoch=1, instance="i", function=name, version=1, kind="fn", stream=True,
            body_bytes=len(body), timeout_s=CALL_S, idle_timeout_s=CALL_S, seed=1, credit=_CREDIT,
        )  # fmt: skip
        values: list[Any] = []
        arrived: list[int] = []

        def taken(said: CallFrames) -> bool:
            now = time.monotonic_ns()
            for frame in (frame for _, frames in said.items for frame in frames):
                if frame.kind is FrameKind.END:
                    _check(codec.unpack(End, frame.data))
                    return True
                values.append(msgspec.json.decode(frame.data))
                arrived.append(now)
            return False

        self._wire.send(codec.pack(ToWorker(StartCall(number=number, head=head, body=body))))
        await self._until(CallFrames, taken, CALL_S)
        return Answer(tuple(values), tuple(arrived))

    async def _until(self, kind: type[Any], done: Callable[[Any], bool], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while True:
                    payload = await self._wire.receive()
                    if payload is None:
                        raise ProgramFailed("the worker ended")
                    body = codec.unpack(FromWorker, payload).body
                    if isinstance(body, Failed):
                        raise ProgramFailed(f"the worker failed: {body.error.message}")
                    if isinstance(body, kind) and done(body):
                        return
        except TimeoutError as error:
            raise ProgramFailed(f"the worker said no {kind.__name__} within {within_s:g} s") from error


def _check(end: End) -> None:
    if end.error is not None:
        raise ProgramFailed(f"the call failed: {end.error.message}")


def copied(file: Path, directory: Path, module: str) -> Path:
    """``file`` as ``module``, alone in a directory: one interpreter imports one module of a name."""
    (directory / module).mkdir()
    copy = directory / module / f"{module}.py"
    copy.write_bytes(file.read_bytes())
    return copy


def packed(file: Path) -> bundle.Bundle:
    """The one function of ``file``."""
    return bundle.build(load.one(str(file)))

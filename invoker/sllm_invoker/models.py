"""Registering, validating and deleting models on this node: joined, long-polled, idempotent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeAlias, TypeVar

from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import DeadlineExceeded, InvalidRequest, SllmError
from sllm_runtime.protocol.loader import ModelInfo
from sllm_runtime.protocol.node import ModelCommand, Ok, PrepareModel, PrepareReply, Progress, PullModel
from sllm_runtime.protocol.records import ModelRecord

RESULT_S: Final = 60.0
"""How a command ended, or why a model is not there, is kept for whoever asks again, no longer."""
T = TypeVar("T")

log = logging.getLogger(__name__)


Report: TypeAlias = Callable[[str, int, int], None]
"""Told stage, bytes done, bytes in all."""
Work: TypeAlias = Callable[[Report], Awaitable[ModelRecord]]


class Store(Protocol):
    """loaderd, as far as models go."""

    async def register(self, uri: str, digest: str, report: Callable[[str, int, int], None]) -> ModelInfo:
        """Have the model in the store."""

    async def pull(self, model: ModelRecord, report: Callable[[str, int, int], None]) -> None:
        """Have all of it on this node's disk."""

    async def validate(self, digest: str) -> None:
        """Compare every byte with its digest."""

    async def delete(self, digest: str) -> None:
        """Remove it."""


@dataclass
class _Registration:
    task: asyncio.Task[ModelRecord | SllmError]
    progress: Progress | None = None


def record(info: ModelInfo, uri: str, wall: float) -> ModelRecord:
    """What the registry keeps of a model that loaderd has."""
    return ModelRecord(
        digest=info.model,
        uri=uri,
        nbytes=info.nbytes,
        partitions=info.partitions,
        architecture=info.architecture,
        tensors=info.tensors,
        dtype=info.dtype,
        sources=tuple(dict.fromkeys((uri, *info.sources))),
        adapter=info.adapter,
        created=wall,
    )


class Models:
    """Long work goes on when its asker gives up, and the next one who asks for the same joins it."""

    def __init__(self, store: Store, wall: Callable[[], float]) -> None:
        self._store = store
        self._wall = wall
        self._tasks = Tasks("models")
        self._registrations: dict[tuple[str, str], _Registration] = {}
        self._commands: dict[tuple[str, str], asyncio.Task[SllmError | None]] = {}

    async def prepare(self, request: PrepareModel) -> PrepareReply:
        """The model's record when it is there, its progress after ``wait_s``. Raises what registering raised."""
        digest = request.digest or ""

        async def register(report: Report) -> ModelRecord:
            info = await self._store.register(request.uri, digest, report)
            return record(info, request.uri, self._wall())

        return await self._joined((request.uri, digest), register, request.wait_s)

    async def pull(self, request: PullModel) -> PrepareReply:
        """The record when all of it is on this node's disk, its progress after ``wait_s``. Raises what failed."""

        async def pull(report: Report) -> ModelRecord:
            await self._store.pull(request.model, report)
            return request.model

        return await self._joined(("", request.model.digest), pull, request.wait_s)

    async def _joined(self, key: tuple[str, str], work: Work, wait_s: float) -> PrepareReply:
        entry = self._registrations.get(key)
        if entry is None:
            entry = self._registrations[key] = self._begin(work, " ".join(key))
            entry.task.add_done_callback(partial(self._done, key, entry))
        done, _ = await asyncio.wait({entry.task}, timeout=wait_s)
        if not done:
            return PrepareReply(progress=entry.progress or Progress(stage="fetch"))
        self._forget(self._registrations, key, entry)  # told once
        found = entry.task.result()
        if isinstance(found, SllmError):
            raise found
        return PrepareReply(model=found)

    def _begin(self, work: Work, name: str) -> _Registration:
        def report(stage: str, done: int, total: int) -> None:
            entry.progress = Progress(stage=stage, done=done, total=total)

        async def told() -> ModelRecord | SllmError:
            try:
                return await work(report)
            except SllmError as error:  # an answer for whoever asks next, no failure of this node
                return error

        entry = _Registration(self._tasks.start(told(), f"register {name}"))
        return entry

    def _done(self, key: tuple[str, str], entry: _Registration, task: asyncio.Task[ModelRecord | SllmError]) -> None:
        """A model that nobody waits for just now is asked for anew, which is cheap when it is there: its source may
        have changed by then. What failed is kept for who asks between."""
        if task.cancelled() or isinstance(task.result(), ModelRecord):
            self._forget(self._registrations, key, entry)
        else:
            self._forget_later(self._registrations, key, entry)

    async def command(self, request: ModelCommand) -> Ok:
        """``validate`` or ``delete``. Raises ``DeadlineExceeded`` while it goes on; asked again, it is joined."""
        work = {"validate": self._store.validate, "delete": self._store.delete}.get(request.verb)
        if work is None:
            raise InvalidRequest(f"a node does not know what {request.verb!r} is to a model")
        key = (request.verb, request.digest)
        task = self._commands.get(key)
        if task is None:

            async def do() -> SllmError | None:
                try:
                    await work(request.digest)
                except SllmError as error:
                    return error
                if request.verb == "delete":
                    self._forget_model(request.digest)
                return None

            task = self._commands[key] = self._tasks.start(do(), f"{request.verb} {request.digest}")
            task.add_done_callback(partial(self._forget_later, self._commands, key))
        done, _ = await asyncio.wait({task}, timeout=request.wait_s)
        if not done:
            raise DeadlineExceeded(f"{request.verb} of {request.digest} goes on; ask again")
        self._forget(self._commands, key, task)
        if (error := task.result()) is not None:
            raise error
        return Ok(note=f"{request.verb}d" if request.verb.endswith("e") else request.verb)

    def _forget_model(self, digest: str) -> None:
        """Who asks for it from now on wants it again: how its coming ended is no answer to that."""
        for key in [key for key in self._registrations if key[1] == digest]:
            del self._registrations[key]

    def _forget_later(self, kept: dict[tuple[str, str], T], key: tuple[str, str], entry: T) -> None:
        """What nobody asks for in time says nothing of the model that is there then."""
        asyncio.get_running_loop().call_later(RESULT_S, self._forget, kept, key, entry)

    def _forget(self, kept: dict[tuple[str, str], T], key: tuple[str, str], entry: T) -> None:
        if kept.get(key) is entry:
            del kept[key]

    async def close(self) -> None:
        """End what goes on."""
        await self._tasks.close()

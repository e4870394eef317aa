"""Bringing models into the store: one child process per conversion, joined by all who ask for the same source."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sllm_loaderd.convert.child_messages import ChildError, ChildMessage, ChildOutcome, ChildProgress, ChildReady
from sllm_loaderd.held import Held
from sllm_loaderd.opening import finished
from sllm_loaderd.origins import SourceRecord
from sllm_loaderd.sources.directory import DirectorySource
from sllm_loaderd.store import ModelStore
from sllm_loaderd.verify import open_checkpoint
from sllm_runtime.protocol.errors import InternalError, SllmError, Unavailable
from sllm_runtime.protocol.limits import CHUNK_BYTES, MIB
from sllm_runtime.protocol.loader import CONVERT_LATER, CONVERT_NOW

log = logging.getLogger(__name__)

Report = Callable[[str, int, int], None]
"""Called with stage, bytes done, bytes in all."""
_STOP_S = 5.0
FIRST_LOAD_S = 600.0
"""A model that nobody loads is converted all the same, after this."""
_LINE_LIMIT = 4 * MIB
MOST_CHILDREN = 16
"""Models that are fetched, converted or wait for it at a time, each in a process of its own."""


@dataclass(eq=False)
class _Registration:
    task: asyncio.Task[str]
    reports: list[Report] = field(default_factory=list)
    last: ChildProgress | None = None

    def tell(self, progress: ChildProgress) -> None:
        self.last = progress
        for report in self.reports:
            report(progress.stage, progress.done, progress.total)


_Key = tuple[str, bool]
"""(URI, whether it has to be converted)"""


class Registrations:
    """Owns the conversions that run. ``close`` ends them."""

    def __init__(
        self, store: ModelStore, at_once: int, held: Held, listing_s: float, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """``chunk_bytes``: of this node's pool, which loads no others."""
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._held = held
        self._listing_s = listing_s
        self._children = asyncio.Semaphore(MOST_CHILDREN)
        self._turns = asyncio.Semaphore(at_once)
        """To convert. A source that hangs holds none."""
        self._running: dict[_Key, _Registration] = {}
        self._later: dict[str, asyncio.Task[None]] = {}
        """Conversions of models that can be loaded already, by digest."""
        self._taking: dict[asyncio.Task[None], set[str]] = {}
        """Models on their way into the store, each with the one whose place it takes."""

    async def register(self, uri: str, report: Report, convert: str = CONVERT_NOW) -> str:
        """The digest of the model at ``uri``, which can be loaded then.

        Joins a registration of the same source; the work ends when the last who asked is cancelled.
        """
        key = (uri, convert == CONVERT_NOW)
        running = self._running.get(key)
        if running is None:
            running = _Registration(asyncio.create_task(self._bring(uri, key[1]), name=f"register {uri}"))
            self._running[key] = running
            running.task.add_done_callback(functools.partial(self._ended, key, running))
        running.reports.append(report)
        if running.last is not None:
            report(running.last.stage, running.last.done, running.last.total)
        try:
            digest = await asyncio.shield(running.task)
            if convert == CONVERT_LATER:
                await self._convert_later(uri, digest)
            return digest
        finally:
            running.reports.remove(report)
            if not running.reports and not running.task.done():
                running.task.cancel()
                # A newcomer must not join what is being cancelled.
                self._running.pop(key, None)
                await asyncio.wait([running.task], timeout=2 * _STOP_S)

    def _ended(self, key: _Key, running: _Registration, _task: asyncio.Task[str]) -> None:
        if self._running.get(key) is running:  # not one that began while this one was being cancelled
            del self._running[key]

    async def close(self) -> None:
        """Cancel what runs and wait for its end."""
        tasks = [*(running.task for running in self._running.values()), *self._later.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2 * _STOP_S)

    async def _bring(self, uri: str, converted: bool) -> str:
        """``converted``: as it is will not do."""
        known = self._store.recall(uri)
        if known is not None and await asyncio.to_thread(self._of_other_chunks, known.digest):
            known = None  # the pool loads none such, as when it was started with --chunk-bytes since
        former = None
        if known is not None and converted and await asyncio.to_thread(self._store.is_direct, known.digest):
            known, former = None, known
        if known is not None and await asyncio.to_thread(self._unchanged, known):
            return known.digest
        report = functools.partial(self._tell, (uri, converted))
        async with self._children, self._staging() as staging:
            arguments = ["--known", known.fingerprint if known else "", *([] if converted else ["--direct"])]
            outcome = await self._convert(uri, staging, report, *arguments)
            if not outcome.digest and known is not None:
                return known.digest
            taking = asyncio.create_task(finished(lambda: self._take(staging, uri, outcome, former)))
            self._taking[taking] = {outcome.digest} if former is None else {outcome.digest, former.digest}
            taking.add_done_callback(self._taking.pop)
            await taking
        return outcome.digest

    async def taken(self, digest: str) -> None:
        """Wait until a model that is just coming into the store is there with all that is known of it: its files are
        seen before their source is. Raises ``Unavailable``."""
        taking = [task for task, digests in self._taking.items() if digest in digests]
        if not taking:
            return
        _, late = await asyncio.wait(taking, timeout=2 * _STOP_S)
        if late:
            raise Unavailable(f"model {digest} is not in the store yet, whose disk is slow; try again", field="model")

    @contextlib.asynccontextmanager
    async def _staging(self) -> AsyncIterator[Path]:
        """As the store's. What is left in it may be a whole model, which a disk removes in seconds: not in the loop."""
        block = contextlib.ExitStack()
        path = block.enter_context(self._store.staging())
        try:
            yield path
        finally:
            await finished(block.close)

    def _take(self, staging: Path, uri: str, outcome: ChildOutcome, former: SourceRecord | None) -> None:
        """Into the store, with where it came from; in place of ``former`` if that was the same. Blocking."""
        self._store.adopt(staging, outcome.digest)
        if former is not None and former.fingerprint == outcome.fingerprint:
            self._store.replace(former.digest, outcome.digest)
        self._store.remember(SourceRecord(uri, outcome.fingerprint, outcome.digest, outcome.entries))

    async def forget(self, digest: str) -> None:
        """The model goes: a conversion that was to take its place is of no use, and is ended."""
        if (later := self._later.get(digest)) is not None:
            later.cancel()
            await asyncio.wait([later], timeout=2 * _STOP_S)

    def _tell(self, key: _Key, progress: ChildProgress) -> None:
        if (running := self._running.get(key)) is not None:
            running.tell(progress)

    async def _convert_later(self, uri: str, digest: str) -> None:
        """Begin to convert a model that is loaded as it is, unless that is done or under way."""
        there = await asyncio.to_thread(lambda: self._store.replacement(digest) or not self._store.is_direct(digest))
        if not there and digest not in self._later:
            task = asyncio.create_task(self._replace(uri, digest), name=f"convert {uri}")
            self._later[digest] = task
            task.add_done_callback(lambda _: self._later.pop(digest, None))

    async def _replace(self, uri: str, digest: str) -> None:
        """Convert behind the first load, with idle priority; then the conversion stands for the model.

        What that load has brought is not fetched again.
        """
        try:
            if (record := self._store.recall(uri)) is not None and record.digest == digest:
                await self._held.loaded(record, FIRST_LOAD_S)
                await self._held.hand_over(record)
            async with self._children, self._staging() as staging:
                outcome = await self._convert(uri, staging, lambda progress: None, "--known", "", "--idle")
                await finished(lambda: self._put(staging, uri, outcome, digest))
        except (SllmError, OSError) as error:
            log.warning("%s stays as it is, its conversion failed: %s", uri, error)

    def _put(self, staging: Path, uri: str, outcome: ChildOutcome, digest: str) -> None:
        """In place of the model ``digest``, if its source is what it was. Blocking."""
        known = self._store.recall(uri)
        if known is None or (known.digest, known.fingerprint) != (digest, outcome.fingerprint):
            log.warning("%s has changed or is gone: its conversion is not used", uri)
            return
        self._store.adopt(staging, outcome.digest)
        self._store.replace(digest, outcome.digest)

    def _of_other_chunks(self, digest: str) -> bool:
        return open_checkpoint(self._store.directory(digest), digest).index.chunk_bytes != self._chunk_bytes

    def _unchanged(self, known: SourceRecord) -> bool:
        """Whether a local source is what it was; a remote one is asked by the child."""
        if "://" in known.uri:
            return False
        return DirectorySource(Path(known.uri)).fingerprint() == known.fingerprint

    async def _convert(
        self, uri: str, staging: Path, report: Callable[[ChildProgress], None], *options: str
    ) -> ChildOutcome:
        arguments = ("--uri", uri, "--staging", staging, "--cache", self._store.cache, *options)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sllm_loaderd.convert.child",
            *(str(argument) for argument in arguments),
            "--parent",
            str(os.getpid()),
            "--chunk-bytes",
            str(self._chunk_bytes),
            # Where torch would litter the machine's temporary directory.
            env={"TORCHINDUCTOR_CACHE_DIR": str(self._store.cache / "inductor"), **os.environ},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
        )
        async with contextlib.AsyncExitStack() as turn:  # given back when the process is dead
            try:
                return await self._listen(uri, process, report, turn)
            finally:
                await _end(process)

    async def _first_word(self, uri: str, said: asyncio.StreamReader) -> bytes:
        """The child's first line, which a remote source's has once its objects are listed: from then on each request
        is bounded by itself. Others wait for this one's slot. Raises ``Unavailable``."""
        try:
            async with asyncio.timeout(self._listing_s if _is_remote(uri) else None):
                return await said.readline()
        except TimeoutError as error:
            raise Unavailable(
                f"{uri} did not say within {self._listing_s:g} s what it has; check the network and the server, and"
                " register it again",
                field="model",
            ) from error

    async def _listen(
        self,
        uri: str,
        process: asyncio.subprocess.Process,
        report: Callable[[ChildProgress], None],
        turn: contextlib.AsyncExitStack,
    ) -> ChildOutcome:
        if process.stdout is None or process.stdin is None:
            raise InternalError("the conversion has no pipes")
        line = await self._first_word(uri, process.stdout)
        while line:
            message = _DECODER.decode(line)
            if isinstance(message, ChildOutcome | ChildError):
                with contextlib.suppress(TimeoutError):  # it has said all; what is left of it is ended anyway
                    await asyncio.wait_for(process.wait(), _STOP_S)
                if isinstance(message, ChildError):
                    raise message.error.to_error()
                return message
            if isinstance(message, ChildReady):
                await turn.enter_async_context(self._turns)
                process.stdin.write(b"\n")
            else:
                report(message)
            line = await process.stdout.readline()
        code = await process.wait()
        raise InternalError(
            f"the conversion of {uri} ended with status {code} and no result; if it was killed, memory was short",
            stage="convert",
        )


def _is_remote(uri: str) -> bool:
    """Whether it is a server's to answer."""
    return "://" in uri and not uri.startswith("file://")


_DECODER = msgspec.json.Decoder(ChildMessage)


async def _end(process: asyncio.subprocess.Process) -> None:
    """The process is dead and reaped when this returns, also if its task was cancelled."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()

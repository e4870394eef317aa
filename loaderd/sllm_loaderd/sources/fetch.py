"""Brings the files of any source to a directory: parallel ranges, resumed where an earlier attempt broke off."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import msgspec

from sllm_loaderd.convert.shards import weights_of
from sllm_loaderd.files import (
    FULL,
    SHARD_INDEX,
    chunk_digest,
    gguf_parts,
    is_small_file,
    plain_name,
    sync_directory,
)
from sllm_loaderd.reader import ByteSource
from sllm_loaderd.sources import Entry, Source
from sllm_loaderd.sources.listing import read_whole
from sllm_runtime.protocol.checkpoint import INDEX_NAME, MAX_INDEX
from sllm_runtime.protocol.errors import Conflict, InvalidCheckpoint, SllmError, Unavailable
from sllm_runtime.protocol.limits import MIB

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""
PART: Final = 8 * MIB
THREADS: Final = 8
_NOTES: Final = ".parts"
_OLD: Final = ".old"
KEPT_S: Final = 7 * 24 * 3600.0
"""What was fetched can be used, and an attempt that broke off resumed, for so long."""
RESERVE: Final = 512 * MIB
"""Of the disk, for all else that is written there: functions' code, bundles, logs, a store of the cluster's state."""


def resolve(
    source: Source,
    cache: Path,
    progress: Progress | None = None,
    fingerprint: str | None = None,
    *,
    converted: bool = False,
) -> Path:
    """The local directory of ``source``'s files: where they stand, or below ``cache``, fetched if need be.

    ``converted``: as for ``fetch``.
    """
    target = place_of(cache, source.uri, fingerprint or source.fingerprint())
    with contextlib.suppress(FileNotFoundError):
        os.utime(target)  # it is there, and used: no ``forget_old`` takes it
        return target
    if (standing := source.local()) is not None:
        return standing
    fetch(source, needed(source, source.entries()), target, progress, converted=converted)
    return target


def needed(source: Files, entries: Sequence[Entry]) -> list[Entry]:
    """Those of a model's files that are read: beside safetensors many have the same weights again, in one file
    (``consolidated.safetensors``) or as ``.bin``. As ``convert.shards.weights_of`` chooses."""
    by_name = {entry.name: entry for entry in entries}
    if "adapter_config.json" in by_name or INDEX_NAME in by_name:
        return list(entries)
    found = weights_of(by_name, lambda name: read_whole(source, by_name[name], MAX_INDEX))
    if found is None:
        _require_one(source, [entry.name for entry in entries if not is_small_file(entry.name)])
        return list(entries)
    names = {*found[1], SHARD_INDEX} if found[0] is not None else set(found[1])
    return [entry for entry in entries if entry.name in names or is_small_file(entry.name)]


def _require_one(source: Files, weights: Sequence[str]) -> None:
    """Raises ``InvalidCheckpoint`` for several GGUF models: one was meant, and none is fetched."""
    if weights and all(name.endswith(".gguf") for name in weights):
        others = set(weights) - {part.name for part in gguf_parts(Path(weights[0]))}
        if others:
            text = f"{source.uri} has several models ({weights[0]}, {min(others)}); give one file"
            raise InvalidCheckpoint(text, field="model")


def place_of(cache: Path, uri: str, fingerprint: str) -> Path:
    """Where the files of a source are once they are fetched."""
    return _fetched(cache) / hashlib.sha256(f"{uri}\0{fingerprint}".encode()).hexdigest()


def _fetched(cache: Path) -> Path:
    return cache / "fetched"


def forget(directory: Path, cache: Path) -> None:
    """Remove the files of a source, if they are fetched ones."""
    if directory.is_relative_to(_fetched(cache)):
        shutil.rmtree(directory, ignore_errors=True)


def forget_old(cache: Path, now: float) -> None:
    """Remove what was neither added to nor used for KEPT_S: no attempt goes on with it, or its source has changed
    since. What is being fetched stays. What goes has another name before any of it is removed: nobody finds half."""
    for directory in _fetched(cache).glob("*"):
        with contextlib.suppress(OSError, Conflict), _alone(directory):
            changed = max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
            if now - changed > KEPT_S:
                left = directory.suffix == _OLD  # by an attempt that broke off
                shutil.rmtree(directory if left else directory.rename(directory.with_name(directory.name + _OLD)))


def fetch(
    source: Source,
    entries: Iterable[Entry],
    target: Path,
    progress: Progress | None = None,
    *,
    converted: bool = False,
) -> None:
    """Bring ``entries`` into the new directory ``target``, which appears whole or not at all.

    ``converted``: what is made of them on the same disk stands beside them until it is whole. What an earlier call left
    beside ``target`` under a temporary name is used. Raises typed errors, ``Conflict`` if another process fetches the
    same, ``Unavailable`` before the first byte if the disk has not room for all of it.
    """
    with _begun(target) as partial:
        work = _Fetch(source, partial, list(entries), progress, converted)
        work.run()
        for entry in work.entries:
            _sync(partial / entry.name)
        (partial / _NOTES).unlink(missing_ok=True)
        sync_directory(partial)
        os.rename(partial, target)
    sync_directory(target.parent)


def begin_fetch(source: Files, entries: Iterable[Entry], target: Path, stop: threading.Event) -> None:
    """Bring what ``source`` has of ``entries`` to where ``fetch`` finds it as of an earlier attempt, until ``stop``.

    What cannot be brought is left to that.
    """
    if target.is_dir():
        return
    with contextlib.suppress(SllmError, OSError), _begun(target) as partial:
        _Fetch(source, partial, list(entries), None, converted=True, stop=stop).run()


@contextlib.contextmanager
def _begun(target: Path) -> Iterator[Path]:
    """The directory that becomes ``target``, ours alone. Raises ``Conflict``. On a full disk nothing is left of it:
    whatever else is written there waits for its room."""
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with _alone(partial):
        try:
            yield partial
        except OSError as error:
            if error.errno in FULL:
                shutil.rmtree(partial, ignore_errors=True)
            raise


class Files(Protocol):
    """What a fetch needs of a source."""

    @property
    def uri(self) -> str: ...

    def open(self, entry: Entry) -> ByteSource: ...

    def close(self) -> None: ...


class _Part(msgspec.Struct, frozen=True):
    name: str
    etag: str
    offset: int
    nbytes: int


class _Note(msgspec.Struct, frozen=True):
    """A part that has been written, and what it held."""

    part: _Part
    digest: str


@dataclass(slots=True)
class _Fetch:
    source: Files
    directory: Path
    entries: list[Entry]
    progress: Progress | None
    converted: bool
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """All parts that are not there yet, ``THREADS`` at a time; the first error ends the rest."""
        known = self._known()
        self._require_room(known)
        opened: dict[str, tuple[ByteSource, int]] = {}
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((self.directory / _NOTES).open("ab", buffering=0))
            for entry in self.entries:
                fd = os.open(self.directory / entry.name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                stack.callback(os.close, fd)
                os.ftruncate(fd, entry.nbytes)
                reader = self.source.open(entry)
                stack.callback(reader.close)
                opened[entry.name] = (reader, fd)
            with ThreadPoolExecutor(THREADS, "sllm-fetch") as pool:
                self._parallel(pool, known, opened, log.fileno())

    def _require_room(self, known: set[_Part]) -> None:
        """Raises ``Unavailable`` if the disk will be full before all is there. Of a conversion no more is known by now
        than that it makes about as much of it."""
        wanted = {(entry.name, entry.etag) for entry in self.entries}
        total = sum(entry.nbytes for entry in self.entries)
        missing = total - sum(part.nbytes for part in known if (part.name, part.etag) in wanted)
        made = total if self.converted else 0
        needed, free = missing + made + RESERVE, shutil.disk_usage(self.directory).free
        if needed > free:
            raise Unavailable(
                f"{self.source.uri} needs {needed} bytes on the disk of {self.directory.parent} ({missing} to fetch,"
                f" {made} to convert them, {RESERVE} to spare), {free} are free; make room there",
                field="model",
                stage="fetch",
            )

    def _parallel(
        self, pool: ThreadPoolExecutor, known: set[_Part], opened: dict[str, tuple[ByteSource, int]], log: int
    ) -> None:
        total = sum(entry.nbytes for entry in self.entries)
        futures = []
        for entry in self.entries:
            for offset in range(0, entry.nbytes, PART):
                part = _Part(entry.name, entry.etag, offset, min(PART, entry.nbytes - offset))
                if part in known:
                    self._advance(part.nbytes, total)
                else:
                    futures.append(pool.submit(self._bring, *opened[entry.name], part, log, total))
        finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failures = [error for future in finished if (error := future.exception()) is not None]
        if failures:
            self.stop.set()
            self.source.close()  # what still reads ends now, with errors that say no more than this
            raise failures[0]

    def _bring(self, reader: ByteSource, fd: int, part: _Part, log: int, total: int) -> None:
        if self.stop.is_set():
            return
        buffer = bytearray(part.nbytes)
        with memoryview(buffer) as view:
            reader.read(view, part.offset)
            done = 0
            while done < part.nbytes:
                done += os.pwrite(fd, view[done:], part.offset + done)
        os.write(log, msgspec.json.encode(_Note(part, chunk_digest(buffer))) + b"\n")
        self._advance(part.nbytes, total)

    def _advance(self, count: int, total: int) -> None:
        with self.lock:
            self.done += count
            if self.progress is not None:
                self.progress(self.done, total)

    def _known(self) -> set[_Part]:
        """Parts that an earlier attempt brought and that are whole: a crash may have kept a note and lost its bytes."""
        try:
            lines = (self.directory / _NOTES).read_bytes().splitlines()
        except FileNotFoundError:
            return set()
        known = set()
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError, OSError):  # a torn line, a file that is gone
                note = msgspec.json.decode(line, type=_Note)
                with (self.directory / plain_name(note.part.name, "part")).open("rb") as file:
                    file.seek(note.part.offset)
                    if chunk_digest(file.read(note.part.nbytes)) == note.digest:
                        known.add(note.part)
        return known


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        text = f"{directory} is being fetched by another process; wait for it"
        raise Conflict(text, field="model", retry_after_s=1.0) from error
    finally:
        os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""The directory of the SSD tier: one file a partition, which appears by a rename and goes by LRU.

Nothing but the directory is state, so there is no moment at which a kill could leave it wrong: a copy has its name when
all of its bytes are durable, what has another name is removed at the next start. The access time says what was used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sllm_loaderd.disk.local import LocalFile
from sllm_loaderd.files import FULL, sync_directory
from sllm_loaderd.ssd.ledger import Copy, Key, Ledger
from sllm_loaderd.ssd.write import CopyWrite
from sllm_runtime.protocol.checkpoint import digest_hex
from sllm_runtime.protocol.errors import ModelNotFound
from sllm_runtime.protocol.loader import TierStatus

if TYPE_CHECKING:
    from sllm_loaderd.store import StoredModel

log = logging.getLogger(__name__)
_NAME: Final = re.compile(r"([0-9a-f]{64})\.(\d{1,6})\.bin")


class SsdDirectory:
    """The SSD tier in ``directory``, of at most ``limit`` bytes (0: off). Thread-safe; blocking calls.

    ``now`` gives nanoseconds since the epoch, for access times.
    """

    def __init__(self, directory: Path, limit: int, now: Callable[[], int] = time.time_ns) -> None:
        self._directory = directory
        self._now = now
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._removing = self._removed = 0
        """Files that were set aside and still take the disk's room, and how many no longer do."""
        self._ledger = Ledger(limit)
        directory.mkdir(parents=True, exist_ok=True)
        self._recover()

    def begin(self, model: StoredModel, rank: int, *, wanted: bool = False) -> CopyWrite | None:
        """Begin a copy of a partition, evicting others, for what is ``wanted`` here also those that are kept. None:
        there is one or one is made, or there is no room."""
        key = (digest_hex(model.checkpoint.digest), rank)
        return self.begin_copy(key, model.index.partitions[rank].nbytes, model.index.chunk_bytes, wanted=wanted)

    def begin_copy(self, key: Key, nbytes: int, chunk_bytes: int, *, wanted: bool = False) -> CopyWrite | None:
        """As ``begin``; ``nbytes`` in chunks of ``chunk_bytes``."""
        with self._lock:
            ledger = self._ledger
            victims = ledger.victims(nbytes, wanted=wanted)
            if key in ledger.copies or key in ledger.writing or victims is None or not nbytes:
                return None
            ledger.writing[key] = nbytes
            gone = [self._set_aside(victim) for victim in victims]
        self._remove(gone)
        partial = self._partial(key)
        try:
            self._allocate(partial, nbytes, wanted)  # may take its time where the file system has to write for it
            return CopyWrite(partial, nbytes, chunk_bytes, lambda whole: self._ended(key, partial, nbytes, whole))
        except OSError as error:
            log.warning("the SSD tier has no room for %d bytes: %s", nbytes, error.strerror)
            self._ended(key, partial, nbytes, whole=False)
            return None

    def open(self, digest: str, rank: int, nbytes: int) -> LocalFile | None:
        """The copy of a partition, if there is one; it stays until it is closed."""
        key = (digest_hex(digest), rank)
        with self._lock:
            copy = self._ledger.copies.get(key)
            if copy is None:
                return None
            path = self._path(key)
            try:
                opened = _OpenCopy(path, lambda: self._closed(copy))
            except ModelNotFound:  # somebody else removed it
                del self._ledger.copies[key]
                return None
            if opened.nbytes != nbytes:
                LocalFile.close(opened)
                gone = self._set_aside(copy)
            else:
                copy.readers += 1
                copy.used_at = self._used(path)
                return opened
        self._remove([gone])
        return None

    def holds(self, digest: str, rank: int) -> bool:
        """Whether there is a copy of a partition."""
        with self._lock:
            return (digest_hex(digest), rank) in self._ledger.copies

    def making(self, digest: str, rank: int) -> bool:
        """Whether a copy of a partition is being written."""
        with self._lock:
            return (digest_hex(digest), rank) in self._ledger.writing

    def lacks_room(self, model: StoredModel, rank: int) -> bool:
        """Whether a copy is neither there nor made, and would have room if others went."""
        key, nbytes = (digest_hex(model.checkpoint.digest), rank), model.index.partitions[rank].nbytes
        with self._lock:
            ledger = self._ledger
            return key not in ledger.copies and key not in ledger.writing and 0 < nbytes <= ledger.limit - ledger.stays

    def keep(self, digests: Iterable[str]) -> None:
        """The models that are to lie here: their copies go last. Those that were told before are so no more."""
        kept = frozenset(digest_hex(digest) for digest in digests)
        with self._lock:
            self._ledger.kept = kept

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep the copies of a model, or stop doing so."""
        with self._lock:
            (self._ledger.pinned.add if pinned else self._ledger.pinned.discard)(digest_hex(digest))

    def drop(self, digest: str, rank: int) -> None:
        """Remove the copy of a partition, if there is one: its bytes are not what they should be."""
        with self._lock:
            copy = self._ledger.copies.get((digest_hex(digest), rank))
            gone = [self._set_aside(copy)] if copy is not None else []
        if gone:
            log.warning("the SSD copy of partition %d of %s is spoiled and removed", rank, digest)
            self._remove(gone)

    def delete(self, digest: str) -> None:
        """Remove the copies of a model; who reads one goes on doing so."""
        with self._lock:
            copies = [copy for key, copy in self._ledger.copies.items() if key[0] == digest_hex(digest)]
            gone = [self._set_aside(copy) for copy in copies]
        self._remove(gone)

    def status(self) -> tuple[int, int]:
        """Bytes that are used, and the limit."""
        with self._lock:
            return self._ledger.used, self._ledger.limit

    def report(self) -> TierStatus:
        """What the tier holds, for the scheduler."""
        used, limit = self.status()
        copies = tuple((f"sha256:{name}", rank, nbytes) for (name, rank), nbytes in sorted(self.copies().items()))
        return TierStatus(used=used, limit=limit, copies=copies)

    def copies(self) -> dict[Key, int]:
        """Bytes of each copy."""
        with self._lock:
            return {key: copy.nbytes for key, copy in self._ledger.copies.items()}

    def recent(self) -> list[str]:
        """Models that have copies, the one used last first."""
        with self._lock:
            copies = sorted(self._ledger.copies.values(), key=lambda copy: copy.used_at, reverse=True)
        return list(dict.fromkeys(f"sha256:{copy.key[0]}" for copy in copies))

    def files(self) -> list[Path]:
        """The file of each copy."""
        return [self._path(key) for key in self.copies()]

    def _path(self, key: Key) -> Path:
        return self._directory / f"{key[0]}.{key[1]}.bin"

    def _partial(self, key: Key) -> Path:
        """A name that no copy has: the next start removes what is left under it."""
        return self._directory / f".{key[0]}.{key[1]}.{secrets.token_hex(4)}.partial"

    def _recover(self) -> None:
        """Take over what a predecessor left: whole copies stay, within the limit, the rest goes."""
        for entry in list(os.scandir(self._directory)):
            match = _NAME.fullmatch(entry.name)
            if match is None or not entry.is_file(follow_symlinks=False):
                if entry.name.endswith(".partial"):
                    Path(entry.path).unlink()
                continue
            stat, key = entry.stat(), (match[1], int(match[2]))
            self._ledger.copies[key] = Copy(key, stat.st_size, stat.st_atime_ns)
        self._remove([self._set_aside(victim) for victim in self._ledger.victims(0) or ()])

    def _allocate(self, partial: Path, nbytes: int, wanted: bool) -> None:
        """A file with room for ``nbytes``. A disk that is full: what is being removed is waited for, then copies go
        until there is room, none where they would not make enough."""
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while True:
                removed = self._removed
                try:
                    os.posix_fallocate(fd, 0, nbytes)
                except OSError as error:
                    taken = os.fstat(fd).st_blocks * 512  # some file systems keep what they had found
                    if error.errno not in FULL or not self._make_room(nbytes - taken, removed, wanted):
                        raise
                else:
                    return
        finally:
            os.close(fd)

    def _make_room(self, nbytes: int, removed: int, wanted: bool) -> bool:
        """Whether the disk has more room for ``nbytes`` than when so many files were ``removed``: what others have
        freed in the ledger alone is waited for before another copy goes."""
        with self._lock:
            self._freed.wait_for(lambda: not self._removing)
            if self._removed != removed:
                return True
            lacking = nbytes - shutil.disk_usage(self._directory).free
            # A disk may be full though it tells of room: by a quota, or for its own records. Then one goes.
            gone = [self._set_aside(victim) for victim in self._ledger.to_free(max(lacking, 1), wanted=wanted) or ()]
        self._remove(gone)
        return bool(gone)

    def _set_aside(self, copy: Copy) -> Path:
        """Under another name it is no copy any more. To ``_remove`` it takes seconds, for which nobody waits in the
        lock."""
        path, aside = self._path(copy.key), self._partial(copy.key)
        del self._ledger.copies[copy.key]
        self._removing += 1
        try:
            os.rename(path, aside)
        except OSError:  # it is gone, or a full disk has no room for the name
            return path
        return aside

    def _remove(self, gone: Sequence[Path]) -> None:
        """What was set aside."""
        _unlink(gone)
        with self._lock:
            self._removing -= len(gone)
            self._removed += len(gone)
            self._freed.notify_all()

    def _ended(self, key: Key, partial: Path, nbytes: int, whole: bool) -> None:
        """A write is over. Whole: its bytes are durable; now its name."""
        if not whole:
            _unlink([partial])
        with self._lock:
            del self._ledger.writing[key]
            if not whole:
                return
            used_at = self._used(partial)
            try:
                os.rename(partial, self._path(key))
            except OSError:  # a full disk may have no room for its name
                _unlink([partial])
                raise
            self._ledger.copies[key] = Copy(key, nbytes, used_at)
        sync_directory(self._directory)

    def _used(self, path: Path) -> int:
        """Now, which becomes the access time of ``path``: the kernel's own may be one for all files of some ms."""
        now = self._now()
        with contextlib.suppress(OSError):  # the order is a matter of speed alone
            os.utime(path, ns=(now, path.stat().st_mtime_ns))
        return now

    def _closed(self, copy: Copy) -> None:
        with self._lock:
            copy.readers -= 1
            copy.used_at = self._used(self._path(copy.key))  # the kernel may have noted each read by another clock


def _unlink(gone: Iterable[Path]) -> None:
    for path in gone:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s stays until the next start: %s", path, error.strerror)


class _OpenCopy(LocalFile):
    """A copy that is being read."""

    def __init__(self, file: Path, closed: Callable[[], None]) -> None:
        super().__init__(file)
        self._closed = closed

    def close(self) -> None:
        super().close()
        self._closed()

"""Bundles on this node: fetched once, kept by digest, handed to a sandbox as a sealed memory file."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from sllm_runtime.protocol.errors import DigestMismatch
from sllm_runtime.protocol.limits import MAX_BUNDLE

log = logging.getLogger(__name__)

MOST: Final = 1000
"""Bundles that are kept: a start waits for a look at all of them, which takes 10 µs for each."""
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
Fetch = Callable[[str, int], Awaitable[bytes]]
"""``fetch(digest, nbytes)``: the bytes from the cluster's store, checked."""


def sealed(data: bytes, name: str) -> int:
    """A memfd with ``data`` that nobody can change; the caller owns it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


async def _sealed(data: bytes, name: str) -> int:
    """As ``sealed``, apart from the loop, which a copy of 100 MiB would hold up. Cancelled, what is made is closed."""
    making = asyncio.get_running_loop().run_in_executor(None, sealed, data, name)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_unwanted)
        raise


def _unwanted(made: asyncio.Future[int]) -> None:
    if not made.cancelled() and made.exception() is None:
        os.close(made.result())


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class BundleCache:
    """Bundles below ``folder``, at most MOST of ``limit`` bytes, the least recently used dropped first."""

    def __init__(self, folder: Path, fetch: Fetch, limit: int = 10 * MAX_BUNDLE) -> None:
        self._folder = folder
        self._fetch = fetch
        self._limit = limit
        self._getting: dict[str, asyncio.Task[bytes]] = {}

    def reset(self) -> None:
        """Remove what a killed life has left half written; called before the first start."""
        for path in self._folder.glob(".*"):
            with contextlib.suppress(OSError):  # what stays is no bundle's file
                path.unlink()

    async def open(self, digest: str, nbytes: int) -> int:
        """A sealed memfd with the bundle; the caller owns it. Raises what ``fetch`` raises, ``DigestMismatch``."""
        return await _sealed(await self._joined(digest, nbytes), f"bundle-{digest[-12:]}")

    async def _joined(self, digest: str, nbytes: int) -> bytes:
        """One look and one fetch, however many starts wait for it; it goes on when one of them gives up."""
        task = self._getting.get(digest)
        if task is None:
            task = asyncio.create_task(self._had(digest, nbytes), name=f"bundle {digest}")
            self._getting[digest] = task
            task.add_done_callback(lambda done: self._done(digest, done))
        return await asyncio.shield(task)

    def _done(self, digest: str, task: asyncio.Task[bytes]) -> None:
        self._getting.pop(digest, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("bundle %s: %s", digest, error)

    async def _had(self, digest: str, nbytes: int) -> bytes:
        data = await asyncio.to_thread(self._read, digest)
        if data is None:
            data = await self._fetch(digest, nbytes)
            await asyncio.to_thread(self._checked, digest, data)
        return data

    def _checked(self, digest: str, data: bytes) -> None:
        """Keep ``data``, if it is what was wanted; a disk that takes it not keeps nobody from its start."""
        if (found := _digest(data)) != digest:
            raise DigestMismatch(f"the bundle {digest} has the content {found}; deploy the function again")
        try:
            self._keep(digest, data)
        except OSError as error:
            log.warning("bundle %s is not kept, and is fetched again for the next start: %s", digest, error)

    def _path(self, digest: str) -> Path:
        return self._folder / digest.removeprefix("sha256:")

    def _read(self, digest: str) -> bytes | None:
        """What is kept; None: it is to be fetched. Another start may take it away meanwhile (``_trim``)."""
        path = self._path(digest)
        try:
            data = path.read_bytes()
            if _digest(data) != digest:
                log.warning("cached bundle %s is damaged; it is fetched again", digest)
                path.unlink(missing_ok=True)
                return None
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("cached bundle %s cannot be read; it is fetched again: %s", digest, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def _keep(self, digest: str, data: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{digest[-16:]}.{os.getpid()}"
        try:
            temporary.write_bytes(data)
            temporary.rename(self._path(digest))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._trim()

    def _trim(self) -> None:
        entries = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if not path.name.startswith("."):
                    entries.append((path, path.stat()))
        used, left = sum(stat.st_size for _path, stat in entries), len(entries)
        for path, stat in sorted(entries, key=lambda entry: entry[1].st_mtime):
            if used <= self._limit and left <= MOST:
                return
            path.unlink(missing_ok=True)
            used, left = used - stat.st_size, left - 1

    async def close(self) -> None:
        """End what is being fetched."""
        tasks = list(self._getting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

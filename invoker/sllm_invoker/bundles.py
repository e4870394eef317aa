"""Bundles on this node: fetched once, kept by digest, handed to a sandbox as a sealed memory file."""

from __future__ import annotations

import asyncio
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


class BundleCache:
    """Bundles below ``folder``, at most ``limit`` bytes, the least recently used dropped first."""

    def __init__(self, folder: Path, fetch: Fetch, limit: int = 10 * MAX_BUNDLE) -> None:
        self._folder = folder
        self._fetch = fetch
        self._limit = limit
        self._fetching: dict[str, asyncio.Task[bytes]] = {}

    async def open(self, digest: str, nbytes: int) -> int:
        """A sealed memfd with the bundle; the caller owns it. Raises what ``fetch`` raises, ``DigestMismatch``."""
        data = await asyncio.to_thread(self._read, digest)
        if data is None:
            data = await self._joined(digest, nbytes)
        return sealed(data, f"bundle-{digest[-12:]}")

    async def _joined(self, digest: str, nbytes: int) -> bytes:
        """One fetch, however many starts wait for it; it goes on when one of them gives up."""
        task = self._fetching.get(digest)
        if task is None:
            task = asyncio.create_task(self._download(digest, nbytes), name=f"bundle {digest}")
            self._fetching[digest] = task
            task.add_done_callback(lambda done: self._done(digest, done))
        return await asyncio.shield(task)

    def _done(self, digest: str, task: asyncio.Task[bytes]) -> None:
        self._fetching.pop(digest, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("bundle %s: %s", digest, error)

    async def _download(self, digest: str, nbytes: int) -> bytes:
        data = await self._fetch(digest, nbytes)
        found = "sha256:" + hashlib.sha256(data).hexdigest()
        if found != digest:
            raise DigestMismatch(f"the bundle {digest} has the content {found}; deploy the function again")
        await asyncio.to_thread(self._keep, digest, data)
        return data

    def _path(self, digest: str) -> Path:
        return self._folder / digest.removeprefix("sha256:")

    def _read(self, digest: str) -> bytes | None:
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if "sha256:" + hashlib.sha256(data).hexdigest() != digest:
            log.warning("cached bundle %s is damaged; it is fetched again", digest)
            path.unlink(missing_ok=True)
            return None
        os.utime(path)
        return data

    def _keep(self, digest: str, data: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{digest[-16:]}.{os.getpid()}"
        temporary.write_bytes(data)
        temporary.rename(self._path(digest))
        self._trim()

    def _trim(self) -> None:
        entries = [(path, path.stat()) for path in self._folder.iterdir() if not path.name.startswith(".")]
        used = sum(stat.st_size for _path, stat in entries)
        for path, stat in sorted(entries, key=lambda entry: entry[1].st_mtime):
            if used <= self._limit:
                return
            path.unlink(missing_ok=True)
            used -= stat.st_size

    async def close(self) -> None:
        """End what is being fetched."""
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

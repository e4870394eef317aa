"""The platform's secrets: what keeps them, and the one that is a directory of its own with a file for each, which the
platform's user alone can read.

Controllers on several machines need the same directory, or a key with which they keep them in the state
(``sealed_vault``), which every component may read.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, Protocol, TypeVar

from sllm_runtime.protocol.ctl import SecretInfo
from sllm_runtime.protocol.errors import Conflict, InvalidArgument, SecretNotFound, Unavailable
from sllm_runtime.protocol.quantities import show_bytes
from sllm_runtime.protocol.secrets import MAX_SECRET, MAX_STORED, SECRET_NAME, Secrets, secret_name

T = TypeVar("T")

AT_ONCE: Final = 2
"""Threads that read or write secrets. Where the directory hangs so do they, also when nobody waits for them any more:
others of the controller's are left for all else."""
_NEW: Final = ".new"
"""Begins the name of a file that is written, no secret's, and is followed by what no other one has."""


class Vault(Protocol):
    """What keeps secrets. What one controller has stored counts for all at once: each is read when it is needed."""

    async def put(self, name: str, value: bytes) -> SecretInfo:
        """Store ``value``, in place of an older one. Raises ``InvalidArgument``, ``Conflict``, ``Unavailable``."""

    async def names(self) -> tuple[SecretInfo, ...]:
        """All of them, by name. Raises ``Unavailable``."""

    async def read(self, names: Iterable[str]) -> Secrets:
        """The values of ``names``. Raises ``SecretNotFound`` naming those that there are not, ``Unavailable``."""

    async def remove(self, name: str) -> None:
        """Forget it. Raises ``SecretNotFound``, ``Unavailable``."""


class DirectoryVault:
    """``directory`` is made when the first secret is stored. Every value is read when it is needed: what another
    controller has stored counts at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._changing = threading.Lock()
        """One is stored or removed at a time: each takes away what another has not stored yet."""

    async def put(self, name: str, value: bytes) -> SecretInfo:
        """As ``Vault``."""
        checked(name)
        bounded(value)
        return await self._do(lambda: self._alone(lambda: self._put(name, value)))

    async def names(self) -> tuple[SecretInfo, ...]:
        """As ``Vault``."""
        return await self._do(self._list)

    async def read(self, names: Iterable[str]) -> Secrets:
        """As ``Vault``."""
        wanted = tuple(names)
        return await self._do(lambda: self._read(wanted)) if wanted else Secrets()

    async def remove(self, name: str) -> None:
        """As ``Vault``."""
        checked(name)
        await self._do(lambda: self._alone(lambda: self._remove(name)))

    def _done(self, doing: asyncio.Future[Any]) -> None:
        self._turns.release()
        if not doing.cancelled():
            doing.exception()  # whoever waited for it may have given up

    async def _do(self, work: Callable[[], T]) -> T:
        await self._turns.acquire()
        doing = asyncio.ensure_future(asyncio.to_thread(work))
        doing.add_done_callback(self._done)
        try:
            return await asyncio.shield(doing)
        except OSError as error:
            text = (
                f"the platform's secrets in {self._directory} cannot be used: {error.strerror}; see its owner and mode"
            )
            raise Unavailable(text) from error

    def _alone(self, work: Callable[[], T]) -> T:
        with self._changing:
            return work()

    # --- files --------------------------------------------------------------------------------------
    def _put(self, name: str, value: bytes) -> SecretInfo:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / name
        if not path.exists():
            room_for(len(self._list()))
        self._clear(name)
        new = self._directory / f"{_NEW}.{token_hex(8)}.{name}"
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())
            self._rename(new, path)
            self._sync()
        finally:
            new.unlink(missing_ok=True)
        return _info(path)

    @staticmethod
    def _rename(new: Path, path: Path) -> None:
        try:
            new.replace(path)
        except FileNotFoundError as error:
            text = f"secret {path.name} was stored or deleted by another controller at this moment; store it again"
            raise Unavailable(text) from error

    def _clear(self, name: str) -> None:
        """Remove what was written of it and never got its name: its controller was killed. Or was stopped, or is as far
        as that just now: then it stores nothing any more, and an older value takes no place of what was done since."""
        for left in self._directory.glob(f"{_NEW}.*.{name}"):
            left.unlink(missing_ok=True)

    def _list(self) -> tuple[SecretInfo, ...]:
        if not self._directory.is_dir():
            return ()
        found = (path for path in sorted(self._directory.iterdir()) if SECRET_NAME.match(path.name))
        return tuple(_info(path) for path in found)

    def _read(self, names: tuple[str, ...]) -> Secrets:
        values, missing = {}, []
        for name in names:
            try:
                values[name] = (self._directory / checked(name)).read_bytes()
            except FileNotFoundError:
                missing.append(name)
        if missing:
            raise SecretNotFound(not_there(*missing), field="secrets")
        return Secrets(values)

    def _remove(self, name: str) -> None:
        self._clear(name)
        try:
            (self._directory / name).unlink()
        except FileNotFoundError as error:
            raise SecretNotFound(not_there(name)) from error
        self._sync()

    def _sync(self) -> None:
        """Make names that came and went durable: what is acknowledged outlives a power cut, as the state does. Some
        file systems know no such thing for a directory."""
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF):
                raise
        finally:
            os.close(fd)


def checked(name: str) -> str:
    """``name``, which becomes a path. Raises ``InvalidArgument``."""
    try:
        return secret_name(name)
    except ValueError as error:
        raise InvalidArgument(str(error), field="name") from error


def _info(path: Path) -> SecretInfo:
    return SecretInfo(name=path.name, stored=path.stat().st_mtime)


def bounded(value: bytes) -> None:
    """Raises ``InvalidArgument`` for one that is empty or too large."""
    if not 0 < len(value) <= MAX_SECRET:
        text = f"a secret has 1 byte to {show_bytes(MAX_SECRET)}, this one {show_bytes(len(value))}"
        raise InvalidArgument(text, field="value")


def room_for(stored: int) -> None:
    """Raises ``Conflict`` where ``stored`` are as many as there may be."""
    if stored >= MAX_STORED:
        raise Conflict(f"there are {MAX_STORED} secrets already; delete those that no function needs")


def not_there(*names: str) -> str:
    """That these are not stored, and what to do."""
    what = "secret" if len(names) == 1 else "secrets"
    return f"there is no {what} {', '.join(names)}; `sllm secret set {names[0]}` stores one"

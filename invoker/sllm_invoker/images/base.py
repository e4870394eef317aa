"""The image that containers run where nobody names another one: made of this machine's own installation, once for
each state of it, with no registry. Two layers: what an installation brings (a gigabyte with torch), and ours."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from sllm_invoker.images import places
from sllm_invoker.images.contents import Digests
from sllm_runtime.platform.process import KILLED_S
from sllm_runtime.protocol.errors import ErrorBody, Unavailable

log = logging.getLogger(__name__)

PRODUCER: Final = (sys.executable, "-m", "sllm_invoker.images")
DIGESTS_S: Final = 120.0
LAYER_S: Final = 300.0
LOCK_S: Final = 1200.0
"""Another node of this machine makes the same image: its work is waited for, not repeated."""
LAYER: Final = "layer.tar"
LAST_WORDS: Final = 2000
REFUSED: Final = 3
"""Exit status of our program that has said an error of ours on stderr."""
Report = Callable[[str], None]


class Images(Protocol):
    """Where images are kept (``store``). Each raises ``Unavailable``."""

    async def has_image(self, reference: str) -> bool:
        """Whether it is there."""

    async def identity(self, reference: str) -> str:
        """What names it for ever, whatever its name is given to later; "" where it is not there."""

    async def import_image(self, reference: str, archive: Path, changes: Sequence[str]) -> None:
        """Make an image of one layer, which the tar file ``archive`` holds."""

    async def build_image(self, reference: str, context: Path) -> None:
        """Build ``context``'s Containerfile, with no network and no registry."""

    async def prune(self) -> None:
        """Remove those of ours that were made long ago and are not in use."""


class Base:
    """Makes the base image of this installation, or finds it."""

    def __init__(
        self, images: Images, scratch: Path, env: Mapping[str, str], producer: Sequence[str] = PRODUCER
    ) -> None:
        """``scratch``: a directory with room for the larger layer, which nodes of one machine share for their lock."""
        self._images = images
        self._scratch = scratch
        self._env = dict(env)
        self._producer = tuple(producer)
        self._digests: Digests | None = None

    async def digests(self) -> Digests:
        """Of this installation, as it was when it was first asked. Raises ``Unavailable``."""
        if self._digests is None:
            said = await output((*self._producer, "digests"), self._env, DIGESTS_S)
            self._digests = msgspec.json.decode(said, type=Digests)
        return self._digests

    async def ensure(self, report: Report = lambda _step: None) -> str:
        """The image's name; built first where the engine lacks it. Raises ``Unavailable``."""
        digests = await self.digests()
        reference = places.reference("base", digests.base)
        if await self._images.has_image(reference):
            return reference
        async with alone(self._scratch, report):
            if not await self._images.has_image(reference):
                await self._build(reference, digests, report)
        return reference

    async def _build(self, reference: str, digests: Digests, report: Report) -> None:
        system = places.reference("system", digests.system)
        with tempfile.TemporaryDirectory(prefix="image-", dir=self._scratch) as scratch:
            context = Path(scratch)
            if not await self._images.has_image(system):
                report("base: interpreter and packages")
                archive = context / "system.tar"
                await write((*self._producer, "system"), self._env, archive, LAYER_S)
                changes = places.configuration("system", library_path=digests.library_path)
                await self._images.import_image(system, archive, changes)
                archive.unlink()
            report("base: worker")
            describe(context, places.over(system, LAYER, "base"))
            await write((*self._producer, "ours"), self._env, context / LAYER, LAYER_S)
            await self._images.build_image(reference, context)
        log.info("made the image %s over %s", reference, system)
        try:
            await self._images.prune()
        except Unavailable as error:
            log.warning("old images were not removed: %s", error.message)


@contextlib.asynccontextmanager
async def alone(directory: Path, report: Report) -> AsyncIterator[None]:
    """No other process that uses ``directory`` builds meanwhile; ``report`` is told where one does. Raises
    ``Unavailable`` after LOCK_S."""
    fd = _lock_file(directory)
    try:
        until = asyncio.get_running_loop().time() + LOCK_S
        if not (free := _locked(fd)):
            report("another image is being made on this machine and is waited for")
        while not free and not _locked(fd):
            if asyncio.get_running_loop().time() > until:
                raise Unavailable(f"another process has been building images in {directory} for {LOCK_S:.0f} s")
            await asyncio.sleep(0.2)  # a lock of the file tells nobody that it is free
        yield
    finally:
        os.close(fd)


def describe(context: Path, containerfile: str) -> None:
    """Make ``context`` one that ``containerfile`` is built in."""
    (context / places.CONTAINERFILE).write_text(containerfile)


def _lock_file(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def output(argv: Sequence[str], env: Mapping[str, str], within_s: float) -> bytes:
    """What a program writes to its stdout. Raises ``Unavailable`` with its last words."""
    return await _run(argv, env, asyncio.subprocess.PIPE, within_s)


async def write(argv: Sequence[str], env: Mapping[str, str], path: Path, within_s: float) -> None:
    """Like ``output``, to a new file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        await _run(argv, env, fd, within_s)
    finally:
        os.close(fd)


async def _run(argv: Sequence[str], env: Mapping[str, str], stdout: int, within_s: float) -> bytes:
    try:
        own = await asyncio.to_thread(tempfile.mkdtemp, prefix="sllm-images-", dir=env.get("TMPDIR"))
    except OSError as error:
        raise Unavailable(f"{' '.join(argv[-2:])} has no place for its temporary files: {error}") from error
    try:
        return await _told(argv, {**env, "TMPDIR": own}, stdout, within_s)
    finally:
        await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)  # who is killed cannot do so itself


async def _told(argv: Sequence[str], env: Mapping[str, str], stdout: int, within_s: float) -> bytes:
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, env=dict(env), stdin=asyncio.subprocess.DEVNULL, stdout=stdout, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # what it has started itself is ended with it
        )  # fmt: skip
    except OSError as error:
        raise Unavailable(f"{argv[0]} cannot be run: {error}") from error
    try:
        async with asyncio.timeout(within_s):
            said, errors = await process.communicate()
    except TimeoutError as error:
        raise Unavailable(f"{' '.join(argv[-2:])} took more than {within_s:.0f} s") from error
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            async with asyncio.timeout(KILLED_S):
                await process.wait()
    if process.returncode == REFUSED:
        with contextlib.suppress(msgspec.MsgspecError):
            raise msgspec.json.decode(errors, type=ErrorBody).to_error()
    if process.returncode != 0:
        words = errors.decode(errors="replace")[-LAST_WORDS:].strip()
        raise Unavailable(f"{' '.join(argv[-2:])} ended with {process.returncode}: {words}")
    return said or b""

"""Start, serve, stop: the control socket and everything behind it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from sllm_loaderd.daemon.control import ControlConnection
from sllm_loaderd.daemon.holders import Holders
from sllm_loaderd.daemon.service import LoaderService
from sllm_loaderd.daemon.settings import LoaderSettings
from sllm_runtime.platform.daemon import ready
from sllm_runtime.platform.wire import AsyncWire

log = logging.getLogger(__name__)
_BACKLOG = 64
_AGAIN_S = 1.0


async def run(settings: LoaderSettings, stop: asyncio.Event) -> None:
    """Serve until ``stop``. Raises ``Unavailable`` if another loaderd has the directory."""
    service = LoaderService(settings)
    try:
        with _listening(settings.socket) as listener:
            log.info("loaderd of node %s serves %s", settings.node, settings.socket)
            if not settings.integrity:
                log.warning("--integrity off: what is loaded is NOT compared with its digests; damage goes unseen")
            ready()
            await _serve(service, listener, stop)
    finally:
        await service.close()
    log.info("loaderd of node %s has stopped", settings.node)


async def _serve(service: LoaderService, listener: socket.socket, stop: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as group:
        holders = Holders(service, group)
        controls: set[asyncio.Task[None]] = set()
        accepting = group.create_task(_accept(service, listener, holders, group, controls), name="accept")
        looking = group.create_task(service.look(), name="look")
        tidying = group.create_task(service.tidy(), name="tidy")
        await stop.wait()
        for task in (accepting, looking, tidying, *controls):
            task.cancel()
        holders.close()


async def _accept(
    service: LoaderService,
    listener: socket.socket,
    holders: Holders,
    group: asyncio.TaskGroup,
    controls: set[asyncio.Task[None]],
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            peer, _ = await loop.sock_accept(listener)
        except OSError as error:  # short of descriptors: who waits to be heard is heard when there are some
            log.warning("nobody new is heard now: %s", error)
            await asyncio.sleep(_AGAIN_S)
            continue
        task = group.create_task(ControlConnection(AsyncWire(peer), service, holders).serve(), name="control")
        controls.add(task)
        task.add_done_callback(controls.discard)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """The control socket, for this user alone; its name is removed at the end. Whoever finds it is heard: it gets its
    name when it listens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    early = path.with_name(path.name[:-1] + "~")  # as long: names of sockets have little room
    for left in (path, early):  # by a loaderd that was killed; the lock on the data directory keeps out others
        left.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(str(early))
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
        early.rename(path)
        yield listener
    finally:
        listener.close()
        for made in (path, early):
            made.unlink(missing_ok=True)

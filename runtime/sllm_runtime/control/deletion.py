"""Deleting a function: no new call, running ones end (or are cancelled), then its records and bundles go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec

from sllm_runtime.control import instances, registry
from sllm_runtime.control.deploy import remove_bundles
from sllm_runtime.control.loop import Loop
from sllm_runtime.control.view import View
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.ctl import Delete
from sllm_runtime.protocol.errors import Conflict, Unavailable
from sllm_runtime.protocol.limits import LONG_POLL_S
from sllm_runtime.protocol.node import Ok

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
CLOCKS_S: Final = 5.0
"""The clocks of two controllers may be so far apart."""


class Deletions:
    """Runs deletions; each goes on by itself, and after a restart of the controller, until nothing is left."""

    def __init__(self, loop: Loop, bus: Bus, needed: Callable[[str], bool]) -> None:
        """``needed``: whether a deployment that goes on is of this bundle."""
        self._loop, self._bus, self._needed = loop, bus, needed
        self._running: dict[str, asyncio.Event] = {}
        self._tasks = Tasks("deletions")

    async def close(self) -> None:
        await self._tasks.close()

    def resume(self) -> None:
        """Go on with what an earlier controller began."""
        for record in tuple(self._loop.view.functions.values()):
            if record.deleting:
                self._start(record.function)

    async def delete(self, request: Delete) -> Ok:
        """Long poll: ``deleted``, or after LONG_POLL_S ``draining: …``; ask again. Raises ``FunctionNotFound``;
        ``Conflict`` where it is not known whether what is there is what was meant; ``Unavailable`` where it cannot be
        stored that it goes."""
        name, known = request.function, self._loop.view.functions.get(request.function)
        if (request.again and known is None) or (request.begun and (known is None or not known.deleting)):
            return Ok(note="deleted")
        if request.again and known is not None and not known.deleting:
            now = time.time()
            if made_since(self._loop.view, name, now - request.age_s, now):
                return Ok(note="deleted")
            if made_since(self._loop.view, name, now - request.age_s - CLOCKS_S, now + CLOCKS_S):
                text = f"function {name!r} is a few seconds old: it may be another one than was asked to be deleted"
                raise Conflict(f"{text}, and which may be gone; delete it again if it is to go")
        await self._loop.commit(lambda view: leaving(view, name, force=request.force))
        done = self._start(name)
        try:
            async with asyncio.timeout(LONG_POLL_S * 0.8):
                await done.wait()
        except TimeoutError:
            left = [i for i in self._loop.view.instances.values() if i.key[0] == name and not i.ended]
            if not left:
                return Ok(note="draining: nothing runs any more; its records wait to be removed")
            calls = sum(instance.running for instance in left)
            return Ok(note=f"draining: {calls} call(s) still run on {len(left)} instance(s)")
        return Ok(note="deleted")

    def _start(self, name: str) -> asyncio.Event:
        done = self._running.get(name)
        if done is None:
            done = self._running[name] = asyncio.Event()
            self._tasks.start(self._run(name, done), f"delete {name}")
        return done

    async def _run(self, name: str, done: asyncio.Event) -> None:
        try:
            while await self._loop.until(name, lambda view: gone(view, name), LOOK_S) is None:
                log.info("waits for running calls to end before it is deleted", extra={"function": name})
            reached = {record.bundle for record in self._loop.view.versions_of(name)}
            await self._remove(name)
            self._forget(name, done)  # from here on its name may be another's, which may be deleted as well
            await remove_bundles(self._loop, self._bus, sorted(reached), self._needed)
        finally:
            self._forget(name, done)
            done.set()

    def _forget(self, name: str, done: asyncio.Event) -> None:
        if self._running.get(name) is done:
            del self._running[name]

    async def _remove(self, name: str) -> None:
        """Until the store has it: whoever is told that it is deleted never sees it again."""
        while True:
            try:
                await self._loop.commit(lambda view: removed(view, name))
                return
            except Unavailable as error:  # after a while, by itself
                log.warning("it is deleted later: %s", error.message, extra={"function": name})


def made_since(view: View, name: str, at: float, now: float) -> bool:
    """Whether what has this name was first deployed after ``at``, in Unix seconds: it is another one. What was made
    after ``now`` was made by another clock than this one, which says nothing; by how much a clock may be ahead
    (``CLOCKS_S``) is the asker's to add."""
    versions = view.versions_of(name)
    return bool(versions) and all(at < record.created <= now for record in versions)


def leaving(view: View, name: str, *, force: bool) -> View:
    """No call is sent to it any more; its instances end when their calls do, with ``force`` now."""
    record = registry.function_of(view, name)
    if not record.deleting:
        view = view.put_function(msgspec.structs.replace(record, deleting=True))
    for instance in tuple(view.instances.values()):
        if instance.key[0] == name and not instance.ended:
            grace = 0.0 if force or not instance.ready else instance.manifest.timeout
            if force or instance.stop is None:
                view = instances.stop(view, instance, "the function is deleted", grace)
    return view


def removed(view: View, name: str) -> View:
    """Without the function, if it is to go still: what has its name by now may be another one."""
    record = view.functions.get(name)
    return registry.remove(view, name) if record is not None and record.deleting else view


def gone(view: View, name: str) -> bool | None:
    """True when no instance of it is left; None: wait."""
    return None if any(i.key[0] == name and not i.ended for i in view.instances.values()) else True

"""A node reads bundles through whatever gateway is there, part by part."""

from __future__ import annotations

import asyncio
from typing import Final

from sllm_runtime.platform import bundles
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.requests import Unserved
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import DeadlineExceeded, Unavailable
from sllm_runtime.protocol.node import BundlePart, ReadBundle

PART_S: Final = 5.0
"""That a gateway takes for a part at most."""
WITHIN_S: Final = 10.0
"""A start waits for a gateway that can read bundles for so long."""
SOON_S: Final = 1.0
"""A gateway that is made anew is there again; where none is by then, none of this release may be."""
AGAIN_S: Final = 0.25


class BundleReader:
    """Fetches parts of bundles for ``node``: by a gateway, or from JetStream itself where none answers."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus, self._subject = bus, subjects.read_bundle(node)
        self._alone = False
        """Whether it reads for itself: gateways, or its rights, are of the release before. To find out takes seconds,
        so it is not asked for each part."""

    async def part(self, asked: ReadBundle) -> BundlePart:
        """The one that is asked for. Raises what ``bundles.part`` does."""
        if self._alone and (found := await self._itself(asked)) is not None:
            return found
        clock = asyncio.get_running_loop().time
        began = clock()
        itself: asyncio.Task[BundlePart | None] | None = None
        try:
            while True:
                try:
                    return await self._bus.call(self._subject, asked, BundlePart, timeout_s=PART_S)
                except Unavailable as error:
                    failure, tries_itself = error, isinstance(error, Unserved)
                except DeadlineExceeded as error:
                    failure, tries_itself = Unavailable(error.message), True
                waited = clock() - began
                if waited > WITHIN_S:
                    if itself is not None and (found := await itself) is not None:
                        return found
                    raise Unavailable(f"no gateway gives bundle {asked.digest}: {failure.message}") from failure
                if tries_itself and waited >= SOON_S and (itself is None or itself.done()):
                    itself = asyncio.create_task(self._itself(asked), name=f"bundle {asked.digest}")
                if (found := await _meanwhile(itself, AGAIN_S)) is not None:
                    return found
        finally:
            if itself is not None:
                itself.cancel()
                await asyncio.gather(itself, return_exceptions=True)

    async def _itself(self, asked: ReadBundle) -> BundlePart | None:
        """None where that is not its right, which takes seconds to show: gateways are asked on meanwhile."""
        try:
            found = await bundles.part(self._bus, asked, direct=True)
        except Unavailable:
            found = None
        self._alone = found is not None
        return found


async def _meanwhile(itself: asyncio.Task[BundlePart | None] | None, seconds: float) -> BundlePart | None:
    """A pause, in which ``itself`` may bring the part."""
    try:
        async with asyncio.timeout(seconds):
            if itself is not None and (found := await asyncio.shield(itself)) is not None:
                return found
            await asyncio.sleep(seconds)
    except TimeoutError:
        pass
    return None

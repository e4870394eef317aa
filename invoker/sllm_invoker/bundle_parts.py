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
AGAIN_S: Final = 0.25


async def read_part(bus: Bus, node: str, asked: ReadBundle) -> BundlePart:
    """The part that ``node`` asks for. Raises what ``bundles.part`` does."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + WITHIN_S
    while True:
        try:
            return await bus.call(subjects.read_bundle(node), asked, BundlePart, timeout_s=PART_S)
        except (Unserved, DeadlineExceeded) as error:
            # Gateways, or rights, of the release before: there a node reads for itself.
            found = await _itself(bus, asked)
            if found is not None:
                return found
            if clock() > deadline:
                raise Unavailable(f"no gateway gives bundle {asked.digest}: {error.message}") from error
        except Unavailable:
            if clock() > deadline:
                raise
        await asyncio.sleep(AGAIN_S)


async def _itself(bus: Bus, asked: ReadBundle) -> BundlePart | None:
    """None where that is not its right."""
    try:
        return await bundles.part(bus, asked, direct=True)
    except Unavailable:
        return None

"""What a start has fetched when it fails is given back, in the order in which it may be."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sllm_invoker.bundles import BundleCache
from sllm_invoker.preparation import Suppliers, holder, prepare
from sllm_invoker.wiring import members
from sllm_invoker.workdir import Workdirs
from sllm_runtime.protocol.errors import NotFound
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.timeline import IMPORT
from tests.fixtures.invoker import BUNDLE, order
from tests.fixtures.waiting import GIVE_UP_S, until

MODEL = ModelRecord(digest="sha256:" + "0" * 64, uri="/m", nbytes=2, partitions=(1, 1))


class Parts:
    """A pool that makes ``sandboxes``, then none; weights that are there. ``happened`` in this order."""

    def __init__(self, sandboxes: int) -> None:
        self._left = sandboxes
        self.happened: list[str] = []

    async def acquire(self, wish: Any) -> Any:
        if not self._left:
            await asyncio.Event().wait()
        self._left -= 1
        return SimpleNamespace(name="sb", python="3.11", close=self._close, confine=self._confine)

    async def _close(self) -> None:
        self.happened.append("closed")

    async def _confine(self, memory: int, cpu: float) -> None:
        """As it is."""

    async def devices(self, gpus: Any) -> tuple[str, ...]:
        return ("cpu",)

    async def grant(self, model: ModelRecord, name: str, report: Any, **more: Any) -> int:
        self.happened.append(f"granted {name}")
        return os.open("/dev/null", os.O_RDONLY)

    async def gone(self, name: str) -> None:
        self.happened.append(f"gone {name}")


async def test_a_holder_that_no_sandbox_came_for_is_gone_too(tmp_path: Path) -> None:
    parts: Any = Parts(sandboxes=1)

    async def bundle(_digest: str, _nbytes: int) -> bytes:
        return BUNDLE

    suppliers = Suppliers(parts, BundleCache(tmp_path / "bundles", bundle), parts, Workdirs(tmp_path))
    asked = order(model=MODEL, parallelism={"pipeline": 2})
    names = [holder(asked, member) for member in members(asked.manifest.parallelism)]
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(prepare(asked, suppliers, stack, lambda _progress: None, time.monotonic))
        await until(lambda: len(parts.happened) == 2, what="both sessions are there")
        starting.cancel()
        await asyncio.wait([starting])
    assert parts.happened[:2] == [f"granted {name}" for name in names]
    assert parts.happened[2] == "closed", "before its chunks may be used again"
    assert sorted(parts.happened[3:]) == sorted(f"gone {name}" for name in names)


async def test_a_part_that_cannot_be_had_ends_the_wait_for_the_others(tmp_path: Path) -> None:
    """No sandbox may come for as long as a start may take."""
    parts: Any = Parts(sandboxes=0)

    async def bundle(_digest: str, _nbytes: int) -> bytes:
        raise NotFound("it is not there")

    suppliers = Suppliers(parts, BundleCache(tmp_path / "bundles", bundle), parts, Workdirs(tmp_path))
    async with AsyncExitStack() as stack, asyncio.timeout(GIVE_UP_S):
        with pytest.raises(NotFound) as caught:
            await prepare(order(model=MODEL), suppliers, stack, lambda _progress: None, time.monotonic)
    assert caught.value.stage == IMPORT

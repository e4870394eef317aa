"""Evicting a model waits for what is under way and nobody wants any more, and for nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from sllm_loaderd.client.control import DELETE_S
from sllm_loaderd.daemon import registration
from sllm_loaderd.eviction import EVICT_S, evict
from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.errors import Conflict
from tests.unit.loaderd.node import WAIT, Node, RemoteSource, stored_model
from tests.unit.loaderd.test_write_back import HookedTier


@pytest.fixture
def model(tmp_path: Path) -> Iterator[StoredModel]:
    with stored_model(tmp_path / "model") as made:
        yield made


def dropped(node: Node, model: StoredModel, within_s: float = EVICT_S) -> Coroutine[Any, Any, None]:
    return evict(model.checkpoint.digest, node.stage, node.residency, within_s)


async def until_done(node: Node, task: asyncio.Task[None]) -> None:
    """Do what is posted while ``task`` waits for it. Raises what ended it."""
    async with asyncio.timeout(WAIT):
        while not task.done():
            node.turn()
            await asyncio.sleep(0.001)
    await task


async def test_what_is_being_written_to_the_ssd_tier_ends_first(tmp_path: Path, model: StoredModel) -> None:
    gate, began = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        began.set()
        assert gate.wait(WAIT)

    with contextlib.closing(Node(ssd=HookedTier(tmp_path / "ssd", wait))) as node:
        wish = node.wish(model, sources=[RemoteSource(model)], holder="")
        node.until(lambda: wish.ended)
        assert await asyncio.to_thread(began.wait, WAIT)
        with pytest.raises(Conflict, match=r"still being read, copied or written after 0\.01 s"):
            await dropped(node, model, 0.01)
        task = asyncio.create_task(dropped(node, model))
        await asyncio.sleep(0)
        assert node.pool.status().used, "the chunk that is being written is still there"
        assert os.listdir(tmp_path / "ssd"), "and the file that it is written to"
        gate.set()
        await until_done(node, task)
        assert node.pool.status().used == 0
        assert os.listdir(tmp_path / "ssd") == [], "a copy without all chunks is none"


@pytest.mark.parametrize("device", [None, 0])
async def test_reads_that_nobody_waits_for_end_first(model: StoredModel, device: int | None) -> None:
    with contextlib.closing(Node(devices=1)) as node:
        source = RemoteSource(model)
        source.gate.clear()
        wish = node.wish(model, sources=[source], holder="", device=device)
        with pytest.raises(Conflict, match="cancel the load first"):
            await dropped(node, model)
        node.cancel(wish)
        task = asyncio.create_task(dropped(node, model))
        await asyncio.sleep(0)
        source.gate.set()
        await until_done(node, task)
        assert (node.pool.status().used, node.devices[0].used) == (0, 0)
        assert source.closed
        await dropped(node, model)  # what is not there is no error


def test_who_deletes_waits_as_long_as_what_is_let_end_first() -> None:
    """Twice what runs, and conversions; then files of hundreds of gigabytes go, for which there is no bound at all."""
    waits = 2 * EVICT_S + 2 * 2 * registration._STOP_S
    assert waits < DELETE_S

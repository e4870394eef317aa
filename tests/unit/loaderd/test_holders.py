"""Sandboxes that nobody answers for: what they hold is theirs until they are proven dead, however long that takes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sllm_loaderd.daemon import holders as module
from sllm_loaderd.daemon.holders import Holders
from tests.fixtures.waiting import until

TRIES = 3


@pytest.mark.parametrize("lives_for", [0, TRIES - 1, TRIES, 3 * TRIES])
async def test_what_an_orphan_holds_is_free_when_it_is_dead(monkeypatch: pytest.MonkeyPatch, lives_for: int) -> None:
    looks, forgotten = list[set[int]](), list[str]()

    def used() -> set[int]:
        looks.append({7} if len(looks) < lives_for else set())
        return looks[-1]

    for name, value in (("used_inodes", used), ("_PROOF_TRIES", TRIES), ("_PROOF_EVERY_S", 0), ("_PROOF_SELDOM_S", 0)):
        monkeypatch.setattr(module, name, value)
    pool: Any = SimpleNamespace(inodes_of=lambda _: {7}, on_freed=None)
    service: Any = SimpleNamespace(
        pool=pool, stage=SimpleNamespace(on_freed=None), counted=SimpleNamespace(on_freed=None), forget=forgotten.append
    )
    async with asyncio.TaskGroup() as group:
        holders = Holders(service, group)
        invoker = object()
        holders.declare(invoker, ["w"])
        holders.owner_lost(invoker)
        await until(lambda: forgotten, what="it is proven dead")
    assert forgotten == ["w"]
    assert len(looks) == lives_for + module._CLEAN_LOOKS

"""Clocks that were set: what is asked of the next controller, or after it was away, is done whatever they say."""

from __future__ import annotations

import time

import pytest

from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import Conflict
from tests.fixtures.nats import Nats
from tests.unit.control.bench import Gateway, controller_of, manifest
from tests.unit.control.scripted_node import ScriptedNode

HOUR_S = 3600.0


async def test_a_deletion_is_asked_of_a_controller_whose_clock_is_behind(
    nats: Nats, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that deployed it was ahead, or the clock has been set back since; and the first that was asked died."""
    gateway, real = Gateway(await nats.bus("gw")), time.time
    async with controller_of(nats):
        await gateway.deploy(manifest())
    monkeypatch.setattr(time, "time", lambda: real() - HOUR_S)
    async with controller_of(nats, "ctl2") as controller:
        told = await gateway.ask("delete", ctl.Delete(function="chat", again=True, age_s=1.0))
        assert told.note == "deleted"
        assert "chat" not in controller.loop.view.functions  # told as deleted, and it serves on


@pytest.mark.parametrize("ahead_s", [-4.0, 4.0])
async def test_what_was_deployed_anew_by_another_clock_is_not_deleted_for_the_one_before(
    nats: Nats, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """The first that was asked has done it, and has deployed another one before it ended without its answer."""
    gateway, real = Gateway(await nats.bus("gw")), time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    async with controller_of(nats):
        await gateway.deploy(manifest())
        await gateway.ask("delete", ctl.Delete(function="chat", force=True))
        await gateway.deploy(manifest(), b"anew")
    monkeypatch.setattr(time, "time", real)
    async with controller_of(nats, "ctl2") as controller:
        with pytest.raises(Conflict, match="delete it again"):
            await gateway.ask("delete", ctl.Delete(function="chat", again=True, age_s=3.0))
        assert "chat" in controller.loop.view.functions
        assert (await gateway.ask("delete", ctl.Delete(function="chat", force=True))).note == "deleted"

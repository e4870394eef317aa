"""The next controller expects what this one has seen."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sllm_runtime.control.remembering import REMEMBER_S, Remembering
from sllm_runtime.control.scheduling import remembered
from sllm_runtime.protocol.records import LearnedRecord
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.subjects import LEARNED_KEY
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.control.bench import Bench, controller_of, manifest

KEY = ("chat", 1)


async def test_the_next_controller_knows_what_starts_and_releases_took(bench: Bench, nats: Nats) -> None:
    loop, turn, said = bench.controller.loop, asyncio.Event(), list[float]()

    async def pause(seconds: float) -> None:
        said.append(seconds)
        await turn.wait()
        turn.clear()

    remembering = Remembering(loop, loop._ledger, pause)
    remembering.start()
    try:
        await bench.gateway.deploy(manifest())
        (instance,) = bench.live()
        bench.node.put(instance, InstanceState.STOPPED, release_s=0.75)
        await until(lambda: KEY in loop.view.learned.release, what="it has learned")
        turn.set()
        await until(lambda: len(said) == 2, what="it was looked at")
    finally:
        await remembering.close()
    assert said == [REMEMBER_S, REMEMBER_S]
    before = loop.view.learned
    stored = await bench.stored(LEARNED_KEY, LearnedRecord)
    assert remembered.learned(stored).release == before.release
    async with controller_of(nats, "ctl2") as other:
        now = other.loop.view.learned
        assert now.release_s(KEY) == 0.75
        assert now.sandbox_s("n1", True) == pytest.approx(before.sandbox_s("n1", True), abs=1e-6)
        assert now.rest_s(KEY, "none") == pytest.approx(before.rest_s(KEY, "none"), abs=1e-6)


async def test_what_cannot_be_read_keeps_nobody_from_leading(
    bench: Bench, nats: Nats, caplog: pytest.LogCaptureFixture
) -> None:
    """It is learned anew."""
    await bench.controller.loop._ledger._store._write(LEARNED_KEY, b'{"schema":1,"setup":[{"seconds":[null]}]}', {})
    async with controller_of(nats, "ctl2") as other:
        assert other.loop.view.learned.setup_s(KEY) == 0.0
    assert "what starts have taught is forgotten" in caplog.text


async def test_what_is_not_new_is_not_written_again(bench: Bench) -> None:
    loop = bench.controller.loop
    remembering = Remembering(loop, loop._ledger)
    remembering.remember()
    assert await bench.stored(LEARNED_KEY, LearnedRecord) is None
    loop.change(lambda view: replace(view, learned=view.learned.released(KEY, 0.5)))
    remembering.remember()
    assert (await bench.stored(LEARNED_KEY, LearnedRecord)).release

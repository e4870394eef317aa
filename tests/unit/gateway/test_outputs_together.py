"""Answers that are not streamed: each is bounded, and so is what all of them take together."""

import asyncio

import pytest

from sllm_gateway import settings as settings_module
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import Run, entry, manifest, world

MIB = 2**20
MEMORY = 16 * MIB
CALLS = 12


async def test_many_large_answers_take_a_part_of_the_memory(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is smaller than the largest; together they would be more than the machine has."""
    monkeypatch.setattr(settings_module, "memory", lambda: MEMORY)
    said, go_on = 0, asyncio.Event()

    async def large(run: Run) -> None:
        nonlocal said
        for _ in range(7):
            run.out("x" * (MIB // 8))
            await asyncio.sleep(0)
        said += 1
        await go_on.wait()
        if not run.cancelled.is_set():
            run.end()

    async with world(nats, max_output=MIB) as w:
        await w.deploy(manifest("large"), entry(), script=large)
        asked = [asyncio.create_task(w.http.post("/fn/large", json={})) for _ in range(CALLS)]
        await until(lambda: said == CALLS, what="all have said what they have")
        await asyncio.sleep(0.5)
        held = sum(len(frame.data) for call in w.gateway.calls._open.values() for frame in call.frames)
        go_on.set()
        answers = [await each for each in asked]
        assert held <= max(MEMORY // 4, 4 * MIB), f"{held / MIB:.1f} MiB"
        codes = {each.status_code: each.json() for each in answers if each.status_code != 200}
        assert codes[500]["error"]["code"] == "output_too_large"
        assert sum(each.status_code == 200 for each in answers) >= 3
        whole = await w.http.post("/fn/large", json={})
        assert whole.status_code == 200, "what was collected for others is given back"

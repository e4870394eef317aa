"""Restarts as events on a real server, which may itself be what was restarted."""

import asyncio
from pathlib import Path

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.chronicle import Chronicle
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.events import Event
from tests.fixtures.nats import UP, Nats
from tests.fixtures.waiting import until
from tests.unit.platform.test_announce import stored


async def test_a_restart_is_an_event_also_when_it_cannot_be_told_at_once(nats: Nats) -> None:
    controller = await nats.streams()
    refusals, now = 2, 1.5

    async def connect() -> Bus:
        nonlocal refusals, now
        if refusals:
            refusals -= 1
            now += 60.0  # it is told of a minute that is over
            raise Unavailable("not yet")
        return await Bus.connect(nats.settings(UP), UP, name="test up", jetstream=False)

    chronicle = Chronicle(connect, wall=lambda: now, again_s=0.01)
    running = asyncio.create_task(chronicle.run())
    try:
        chronicle.because("nats", "its disk was full and has space again")
        chronicle.restarted("nats", "status 0")
        chronicle.restarted("invoker-n1", "signal 9")

        async def both() -> bool:
            return len(await stored(controller)) == 2

        await until(both)
        now = 1.5
        chronicle.restarted("nats", "signal 9")

        async def all_three() -> bool:
            return len(await stored(controller)) == 3

        await until(all_three)
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert await stored(controller) == [
        Event(kind="daemon.restarted", at=1.5, component="platform", message=message, fields={"daemon": daemon})
        for daemon, message in (
            ("nats", "nats was started again: its disk was full and has space again"),
            ("invoker-n1", "invoker-n1 was started again: it ended with signal 9"),
            ("nats", "nats was started again: it ended with signal 9"),
        )
    ]


async def test_the_platform_s_own_user_can_tell_events_and_nothing_else(nats: Nats, tmp_path: Path) -> None:
    rights = nats.server._config()["authorization"]["users"]
    (own,) = [user["permissions"] for user in rights if user["user"] == UP]
    assert own == {
        "publish": ["sllm.events.platform.up", "sllm.events.platform.up.>"],
        "subscribe": {"allow": ["_INBOX_.platform.up.>"], "deny": []},
    }

"""A daemon's events reach the stream, and a storm of them does not."""

import msgspec

from sllm_runtime.platform.announce import BURST, RATE, Announcer
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol.events import DROPPED, Event, Kind
from sllm_runtime.protocol.subjects import EVENTS_STREAM
from tests.fixtures.nats import GATEWAY, Nats
from tests.fixtures.waiting import until


async def stored(controller: Bus) -> list[Event]:
    count = (await controller.jetstream.stream_info(EVENTS_STREAM)).state.messages
    found = [await controller.jetstream.get_msg(EVENTS_STREAM, number) for number in range(1, count + 1)]
    return [msgspec.msgpack.decode(message.data or b"", type=Event) for message in found]


async def test_a_storm_is_cut_and_counted(nats: Nats) -> None:
    controller, gateway = await nats.streams(), await nats.bus(GATEWAY)
    now = 100.0
    announcer = Announcer(gateway, "gateway", lambda: now, lambda: 1.5)
    for number in range(BURST + 30):
        announcer.tell(Kind.CALL_FAILED, f"error {number}", {"code": "internal"}, call=f"call-{number}")
    now += 1.0
    for _ in range(int(RATE) + 5):
        announcer.tell(Kind.GATEWAY_READY, "x" * 10_000)
    await gateway.flush()
    most = BURST + int(RATE)

    async def all_there() -> bool:
        return len(await stored(controller)) == most

    await until(all_there)
    events = await stored(controller)
    assert [event.call for event in events[:BURST]] == [f"call-{number}" for number in range(BURST)]
    assert events[0] == Event(
        kind="call.failed", at=1.5, component="gateway", message="error 0", call="call-0", fields={"code": "internal"}
    )
    assert events[BURST].fields == {DROPPED: "30"}
    assert events[BURST + 1].fields == {}
    assert len(events[-1].message) < 10_000


async def test_an_outage_raises_nothing(nats: Nats) -> None:
    controller, gateway = await nats.streams(), await nats.bus(GATEWAY)
    announcer = Announcer(gateway, "gateway", lambda: 0.0, lambda: 1.5)
    await nats.kill()
    await until(lambda: not gateway.connected)
    announcer.tell(Kind.GATEWAY_READY)
    await nats.start()
    await until(lambda: gateway.connected and controller.connected)
    announcer.tell(Kind.GATEWAY_STOPPING)

    async def last() -> bool:
        return [event.kind for event in await stored(controller)][-1:] == ["gateway.stopping"]

    await until(last)

"""What readers of streams leave at a real nats-server when they have ended, however they did: nothing."""

import asyncio

from sllm_runtime.platform.owned import end
from sllm_runtime.platform.streams import STATE_STREAM
from sllm_runtime.platform.watch import Watch
from sllm_runtime.protocol.node import NodeRecord
from sllm_runtime.protocol.subjects import node_key
from tests.fixtures.nats import CONTROLLER, GATEWAY, Nats


async def left(nats: Nats, stream: str) -> int:
    """Consumers of the stream."""
    info = await (await nats.bus(CONTROLLER)).jetstream.stream_info(stream)
    return info.state.consumer_count


async def test_fifty_listings_leave_no_consumer(nats: Nats) -> None:
    store = await nats.store()
    await store.elect(CONTROLLER)
    await store.put(node_key("n1"), NodeRecord(node="n1", first_seen=0.0))
    before = await left(nats, STATE_STREAM)
    for _ in range(50):
        assert list(await store.list("nodes", NodeRecord)) == ["nodes.n1"]
    await store._bus.flush()
    assert await left(nats, STATE_STREAM) == before


async def test_watches_that_are_cancelled_leave_none(nats: Nats) -> None:
    """Also while their consumer is being made."""
    await nats.streams()
    gateway = await nats.bus(GATEWAY)
    before = await left(nats, STATE_STREAM)
    for turns in (0, 1, 2, 3, 5, 10, 20, 40):
        watch = Watch(gateway, STATE_STREAM, "$KV.sllm_state.nodes.>", lambda _subject, _data: None)
        starting = asyncio.create_task(watch.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        await end([starting])
        await watch.close()
        await gateway.flush()
        assert await left(nats, STATE_STREAM) == before, f"after {turns} turns"

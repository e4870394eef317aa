"""Bundles in a real object store: whole or not at all, read by direct get with a node's rights."""

import hashlib
from collections.abc import AsyncIterator

import pytest
from nats.js.api import StreamInfo

from sllm_runtime.platform import bundles
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.streams import BUNDLE_STREAM
from sllm_runtime.protocol.errors import BodyTooLarge, DigestMismatch, NotFound, Unavailable
from tests.fixtures.nats import GATEWAY, NODE, Nats

DATA = bytes(range(256)) * 5000  # 1.28 MB: several chunks and a rest
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


async def pieces(data: bytes = DATA, size: int = 70_001, fail_at: int | None = None) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        if fail_at is not None and start >= fail_at:
            raise ConnectionResetError("the uploader is gone")
        yield data[start : start + size]


async def buses(nats: Nats) -> tuple[Bus, Bus, Bus]:
    return await nats.streams(), await nats.bus(GATEWAY), await nats.bus(NODE)


async def messages(controller: Bus) -> int:
    info: StreamInfo = await controller.jetstream.stream_info(BUNDLE_STREAM)
    return info.state.messages


async def test_a_gateway_stores_a_node_fetches_the_controller_deletes(nats: Nats) -> None:
    controller, gateway, node = await buses(nats)
    assert not await bundles.exists(gateway, DIGEST)
    assert await bundles.store(gateway, DIGEST, pieces(), 10**7) == len(DATA)
    assert await bundles.exists(gateway, DIGEST)
    assert await bundles.size(controller, DIGEST) == len(DATA)
    assert await bundles.fetch(node, DIGEST, len(DATA)) == DATA
    await bundles.delete(controller, DIGEST)
    await bundles.delete(controller, DIGEST)
    assert not await bundles.exists(controller, DIGEST)
    assert await messages(controller) == 0
    with pytest.raises(NotFound, match="deploy the function again"):
        await bundles.fetch(node, DIGEST, len(DATA))


async def test_the_same_twice_is_kept_once(nats: Nats) -> None:
    controller, gateway, node = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces(), 10**7)
    once = await messages(controller)
    await bundles.store(gateway, DIGEST, pieces(size=1000), 10**7)
    assert await messages(controller) == once
    assert await bundles.fetch(node, DIGEST, len(DATA)) == DATA


async def test_an_upload_that_fails_leaves_nothing(nats: Nats) -> None:
    controller, gateway, _node = await buses(nats)
    with pytest.raises(DigestMismatch, match="send it again"):
        await bundles.store(gateway, DIGEST, pieces(DATA + b"x"), 10**7)
    with pytest.raises(BodyTooLarge):
        await bundles.store(gateway, DIGEST, pieces(), len(DATA) - 1)
    with pytest.raises(ConnectionResetError):
        await bundles.store(gateway, DIGEST, pieces(fail_at=600_000), 10**7)
    assert not await bundles.exists(gateway, DIGEST)
    assert await messages(controller) == 0


async def test_no_more_is_stored_than_all_bundles_may_take(nats: Nats) -> None:
    controller, gateway, _ = await buses(nats)
    most = 2 * len(DATA)
    assert await bundles.store(gateway, DIGEST, pieces(), most=most) == len(DATA)
    before, other = await messages(controller), DATA[::-1]
    digest = f"sha256:{hashlib.sha256(other).hexdigest()}"
    with pytest.raises(Unavailable, match=r"MiB are left for it; delete functions"):
        await bundles.store(gateway, digest, pieces(other), most=most)
    assert await messages(controller) == before, "nothing of it is left"
    await bundles.delete(controller, DIGEST)
    assert await bundles.store(gateway, digest, pieces(other), most=most) == len(other)


async def test_another_size_than_expected_is_refused(nats: Nats) -> None:
    _controller, gateway, node = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces(), 10**7)
    with pytest.raises(DigestMismatch):
        await bundles.fetch(node, DIGEST, len(DATA) - 1)


async def test_an_empty_bundle(nats: Nats) -> None:
    _controller, gateway, node = await buses(nats)
    digest = f"sha256:{hashlib.sha256(b'').hexdigest()}"
    await bundles.store(gateway, digest, pieces(b""), 10)
    assert await bundles.fetch(node, digest, 0) == b""


async def test_the_layout_is_that_of_every_object_store(nats: Nats) -> None:
    controller, gateway, _node = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces(), 10**7)
    store = await controller.jetstream.object_store("sllm_bundles")
    assert (await store.get(DIGEST)).data == DATA


async def test_a_sweep_removes_what_a_dead_gateway_left_and_no_upload_that_goes_on(nats: Nats) -> None:
    controller, gateway, node = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces(), 10**7)
    whole = await messages(controller)
    for subject in ("dead", "alive"):
        await gateway.jetstream.publish(f"$O.sllm_bundles.C.{subject}", b"part")
    first = await bundles.sweep(controller, {})
    assert len(first) == 2
    assert await messages(controller) == whole + 2
    await gateway.jetstream.publish("$O.sllm_bundles.C.alive", b"part")
    second = await bundles.sweep(controller, first)
    assert list(second) == ["$O.sllm_bundles.C.alive"]
    assert await messages(controller) == whole + 2
    assert await bundles.fetch(node, DIGEST, len(DATA)) == DATA

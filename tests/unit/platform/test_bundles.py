"""Bundles in a real object store: whole or not at all, read part by part."""

import hashlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError

from sllm_runtime.platform import bundles
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.streams import BUNDLE_STREAM
from sllm_runtime.protocol.errors import BodyTooLarge, DigestMismatch, InvalidRequest, NotFound, Unavailable
from sllm_runtime.protocol.node import ReadBundle
from tests.fixtures.nats import GATEWAY, Nats

DATA = bytes(range(256)) * 5000  # 1.28 MB: several chunks and a rest
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


async def pieces(data: bytes = DATA, size: int = 70_001, fail_at: int | None = None) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        if fail_at is not None and start >= fail_at:
            raise ConnectionResetError("the uploader is gone")
        yield data[start : start + size]


async def buses(nats: Nats) -> tuple[Bus, Bus]:
    return await nats.streams(), await nats.bus(GATEWAY)


def reader(bus: Bus) -> bundles.Ask:
    return partial(bundles.part, bus)


async def messages(controller: Bus) -> int:
    info: StreamInfo = await controller.jetstream.stream_info(BUNDLE_STREAM)
    return info.state.messages


async def test_a_gateway_stores_a_node_fetches_the_controller_deletes(nats: Nats) -> None:
    controller, gateway = await buses(nats)
    assert not await bundles.exists(gateway, DIGEST)
    assert await bundles.store(gateway, DIGEST, pieces(), 10**7) == len(DATA)
    assert await bundles.exists(gateway, DIGEST)
    assert await bundles.size(controller, DIGEST) == len(DATA)
    assert await bundles.fetch(reader(gateway), DIGEST, len(DATA)) == DATA
    await bundles.delete(controller, DIGEST)
    await bundles.delete(controller, DIGEST)
    assert not await bundles.exists(controller, DIGEST)
    assert await messages(controller) == 0
    waits: list[float] = []

    async def pause(seconds: float) -> None:
        waits.append(seconds)

    with pytest.raises(NotFound, match="deploy the function again"):
        await bundles.fetch(reader(gateway), DIGEST, len(DATA), pause)
    assert all(waits)
    assert 1 < sum(waits) < 10


def lag(monkeypatch: pytest.MonkeyPatch, bus: Bus, way: str) -> None:
    """From now on a replica answers direct gets of ``bus`` by ``way`` that has nothing yet."""
    read = getattr(bus.jetstream, way)

    async def behind(*args: Any, direct: bool = False, **options: Any) -> Any:
        if direct:
            raise NotFoundError
        return await read(*args, direct=direct, **options)

    monkeypatch.setattr(bus.jetstream, way, behind)


async def test_a_replica_that_lags_is_not_believed(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader is asked what there is; a part that is not there yet is asked for again."""
    controller, gateway = await buses(nats)
    for bus in (controller, gateway):
        lag(monkeypatch, bus, "get_last_msg")
    await bundles.store(gateway, DIGEST, pieces(), 10**7)
    once = await messages(controller)
    assert await bundles.exists(gateway, DIGEST)
    assert await bundles.size(controller, DIGEST) == len(DATA)
    await bundles.store(gateway, DIGEST, pieces(), 10**7)
    assert await messages(controller) == once, "the one before was seen"

    waited = 0

    async def caught_up(_: float) -> None:
        nonlocal waited
        waited += 1
        if waited == 2:
            monkeypatch.undo()

    lag(monkeypatch, gateway, "get_msg")
    assert await bundles.fetch(reader(gateway), DIGEST, len(DATA), caught_up) == DATA
    assert waited == 2


async def test_the_same_twice_is_kept_once(nats: Nats) -> None:
    controller, gateway = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces(), 10**7)
    once = await messages(controller)
    await bundles.store(gateway, DIGEST, pieces(size=1000), 10**7)
    assert await messages(controller) == once
    assert await bundles.fetch(reader(gateway), DIGEST, len(DATA)) == DATA


async def test_an_upload_that_fails_leaves_nothing(nats: Nats) -> None:
    controller, gateway = await buses(nats)
    with pytest.raises(DigestMismatch, match="send it again"):
        await bundles.store(gateway, DIGEST, pieces(DATA + b"x"), 10**7)
    with pytest.raises(BodyTooLarge):
        await bundles.store(gateway, DIGEST, pieces(), len(DATA) - 1)
    with pytest.raises(ConnectionResetError):
        await bundles.store(gateway, DIGEST, pieces(fail_at=600_000), 10**7)
    assert not await bundles.exists(gateway, DIGEST)
    assert await messages(controller) == 0


async def test_no_more_is_stored_than_all_bundles_may_take(nats: Nats) -> None:
    controller, gateway = await buses(nats)
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
    _controller, gateway = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces(), 10**7)
    with pytest.raises(DigestMismatch):
        await bundles.fetch(reader(gateway), DIGEST, len(DATA) - 1)


async def test_an_empty_bundle(nats: Nats) -> None:
    _controller, gateway = await buses(nats)
    digest = f"sha256:{hashlib.sha256(b'').hexdigest()}"
    await bundles.store(gateway, digest, pieces(b""), 10)
    assert await bundles.fetch(reader(gateway), digest, 0) == b""


async def test_the_layout_is_that_of_every_object_store(nats: Nats) -> None:
    controller, gateway = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces(), 10**7)
    store = await controller.jetstream.object_store("sllm_bundles")
    assert (await store.get(DIGEST)).data == DATA


async def test_a_sweep_removes_what_a_dead_gateway_left_and_no_upload_that_goes_on(nats: Nats) -> None:
    controller, gateway = await buses(nats)
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
    assert await bundles.fetch(reader(gateway), DIGEST, len(DATA)) == DATA


@pytest.mark.parametrize(
    "asked", [ReadBundle(digest="*"), ReadBundle(digest="sha256:a", nuid="a.>"), ReadBundle(digest="")]
)
async def test_what_can_be_no_name_is_refused(nats: Nats, asked: ReadBundle) -> None:
    _, gateway = await buses(nats)
    with pytest.raises(InvalidRequest):
        await bundles.part(gateway, asked)

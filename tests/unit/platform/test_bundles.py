"""Bundles in a real object store: whole or not at all, read part by part."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from nats.errors import TimeoutError as NoAnswer
from nats.js.api import StreamInfo
from nats.js.errors import APIError, NotFoundError

from sllm_runtime.platform import bundles
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.streams import BUNDLE_STREAM, STORE_FAILED
from sllm_runtime.protocol.errors import BodyTooLarge, DigestMismatch, InvalidRequest, NotFound, StoreFull, Unavailable
from sllm_runtime.protocol.node import BundlePart, ReadBundle
from tests.fixtures.nats import GATEWAY, GATEWAY_2, Nats
from tests.fixtures.waiting import until

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


Sent = Callable[[], Awaitable[Any]]


def describing(monkeypatch: pytest.MonkeyPatch, bus: Bus, answer: Callable[[Sent], Awaitable[Any]]) -> None:
    """What is said of a bundle from now on is sent by ``answer``."""
    publish = bus.jetstream.publish

    async def through(subject: str, *args: Any, **options: Any) -> Any:
        send = partial(publish, subject, *args, **options)
        return await (answer(send) if ".M." in subject else send())

    monkeypatch.setattr(bus.jetstream, "publish", through)


async def lost(send: Sent) -> None:
    await send()
    raise NoAnswer


@pytest.mark.parametrize("stored_before", [False, True])
async def test_a_bundle_whose_last_answer_is_lost_is_whole(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, stored_before: bool
) -> None:
    """The description was stored all the same, in place of that of an earlier upload."""
    controller, gateway = await buses(nats)
    if stored_before:
        await bundles.store(gateway, DIGEST, pieces())
    describing(monkeypatch, gateway, lost)
    with pytest.raises(Unavailable, match="cannot be stored"):
        await bundles.store(gateway, DIGEST, pieces())
    assert await bundles.size(controller, DIGEST) == len(DATA)
    assert await bundles.fetch(reader(gateway), DIGEST, len(DATA)) == DATA
    await bundles.sweep(controller, await bundles.sweep(controller, {}))
    assert await messages(controller) == -(-len(DATA) // (256 * 1024)) + 1, "that of the earlier one is swept"
    assert await bundles.fetch(reader(gateway), DIGEST, len(DATA)) == DATA


async def test_a_bundle_whose_upload_is_cancelled_at_its_end_is_whole(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gateway = await buses(nats)
    described = asyncio.Event()

    async def silent(send: Sent) -> None:
        await send()
        described.set()
        await asyncio.Event().wait()

    describing(monkeypatch, gateway, silent)
    storing = asyncio.create_task(bundles.store(gateway, DIGEST, pieces()))
    await described.wait()
    storing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await storing
    assert await bundles.fetch(reader(gateway), DIGEST, len(DATA)) == DATA


async def test_parts_whose_description_never_came_are_swept(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, gateway = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces())
    once = await messages(controller)

    async def never(send: Sent) -> None:
        raise NoAnswer

    describing(monkeypatch, gateway, never)
    with pytest.raises(Unavailable):
        await bundles.store(gateway, DIGEST, pieces())
    assert await messages(controller) > once
    await bundles.sweep(controller, await bundles.sweep(controller, {}))
    assert await messages(controller) == once
    assert await bundles.fetch(reader(gateway), DIGEST, len(DATA)) == DATA


async def test_of_a_bundle_whose_description_is_refused_nothing_is_left(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, gateway = await buses(nats)

    async def refused(send: Sent) -> None:
        raise APIError(code=503, err_code=STORE_FAILED, description="maximum bytes exceeded")

    describing(monkeypatch, gateway, refused)
    with pytest.raises(StoreFull, match="maximum bytes exceeded"):
        await bundles.store(gateway, DIGEST, pieces())
    assert await messages(controller) == 0


@pytest.mark.parametrize("at", [len(DATA) // 2, len(DATA), "described"])
async def test_an_upload_that_was_swept_takes_no_place_of_a_whole_one(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, at: int | str
) -> None:
    """Its gateway was stopped for longer than two sweeps, and goes on."""
    controller, gateway = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces())

    async def swept() -> None:
        await bundles.sweep(controller, await bundles.sweep(controller, {}))

    async def stopped() -> AsyncIterator[bytes]:
        sent = 0
        async for piece in pieces():
            yield piece
            sent += len(piece)
            if isinstance(at, int) and sent - len(piece) < at <= sent:
                await swept()

    async def stopped_then(send: Sent) -> Any:
        await swept()
        return await send()

    if at == "described":
        describing(monkeypatch, gateway, stopped_then)
    with pytest.raises(Unavailable, match="send it again"):
        await bundles.store(gateway, DIGEST, stopped())
    monkeypatch.undo()
    assert await bundles.fetch(reader(gateway), DIGEST, len(DATA)) == DATA
    await swept()
    assert await messages(controller) == -(-len(DATA) // (256 * 1024)) + 1


async def test_a_bundle_without_its_parts_is_none_and_is_stored_again(nats: Nats) -> None:
    controller, gateway = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces())
    whole = await messages(controller)
    await controller.jetstream.purge_stream(BUNDLE_STREAM, subject="$O.sllm_bundles.C.>", keep=1)
    assert not await bundles.exists(gateway, DIGEST)
    assert await bundles.size(controller, DIGEST) is None
    await bundles.store(gateway, DIGEST, pieces())
    assert await bundles.size(controller, DIGEST) == len(DATA)
    assert await messages(controller) == whole


async def test_a_bundle_that_is_replaced_as_it_is_looked_for_is_there(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, gateway = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces())
    get, replaced = controller.jetstream.get_last_msg, 0

    async def then_replaced(*args: Any, **options: Any) -> Any:
        nonlocal replaced
        found = await get(*args, **options)
        if replaced < 2:
            replaced += 1
            await bundles.store(gateway, DIGEST, pieces())
        return found

    monkeypatch.setattr(controller.jetstream, "get_last_msg", then_replaced)
    assert await bundles.size(controller, DIGEST) == len(DATA)
    assert replaced == 2


async def test_a_bundle_is_removed_while_that_may_be_and_no_newer_one(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, gateway = await buses(nats)
    await bundles.store(gateway, DIGEST, pieces())
    await bundles.delete(controller, DIGEST, lambda: False)
    assert await bundles.exists(gateway, DIGEST)
    get = controller.jetstream.get_last_msg

    async def then_replaced(*args: Any, **options: Any) -> Any:
        found = await get(*args, **options)
        await bundles.store(gateway, DIGEST, pieces())
        return found

    monkeypatch.setattr(controller.jetstream, "get_last_msg", then_replaced)
    await bundles.delete(controller, DIGEST)
    monkeypatch.undo()
    assert await bundles.fetch(reader(gateway), DIGEST, len(DATA)) == DATA
    answers = iter([True, False])
    await bundles.delete(controller, DIGEST, lambda: next(answers))
    assert not await bundles.exists(gateway, DIGEST)
    await bundles.sweep(controller, await bundles.sweep(controller, {}))
    assert await messages(controller) == 0, "what it left is swept"


@pytest.mark.parametrize("together", [False, True])
async def test_uploads_at_once_store_no_more_than_all_bundles_may_take(nats: Nats, together: bool) -> None:
    """The second ends after the first, or both at the same time: then both may be refused."""
    controller, gateway = await buses(nats)
    second, most = await nats.bus(GATEWAY_2), len(DATA) + 300_000
    other, ready, go = DATA[::-1], 0, [asyncio.Event(), asyncio.Event()]

    async def held(data: bytes, number: int) -> AsyncIterator[bytes]:
        nonlocal ready
        async for piece in pieces(data):
            yield piece
            if not go[number].is_set():
                ready += 1
                await go[number].wait()

    storing = [
        asyncio.create_task(bundles.store(bus, f"sha256:{hashlib.sha256(data).hexdigest()}", held(data, n), most=most))
        for n, (bus, data) in enumerate(((gateway, DATA), (second, other)))
    ]
    await until(lambda: ready == 2, what="both have begun")
    go[0].set()
    if not together:
        assert await storing[0] == len(DATA)
    go[1].set()
    found = await asyncio.gather(*storing, return_exceptions=True)
    whole = [each for each in found if each == len(DATA)]
    assert all(isinstance(each, StoreFull) for each in found if each not in whole)
    assert len(whole) <= 1
    assert (await controller.jetstream.stream_info(BUNDLE_STREAM)).state.bytes <= most


async def test_a_long_upload_finds_out_on_its_way_that_others_took_the_room(nats: Nats) -> None:
    controller, gateway = await buses(nats)
    second, sent = await nats.bus(GATEWAY_2), 0

    async def long() -> AsyncIterator[bytes]:
        nonlocal sent
        for number in range(40):
            if number == 1:
                await bundles.store(second, DIGEST, pieces())
            sent += 256 * 1024
            yield bytes(256 * 1024)

    with pytest.raises(StoreFull, match="are left for it"):
        await bundles.store(gateway, f"sha256:{'0' * 64}", long(), most=40 * 256 * 1024 + 500_000)
    assert sent < 40 * 256 * 1024
    assert await bundles.fetch(reader(gateway), DIGEST, len(DATA)) == DATA
    assert (await controller.jetstream.stream_info(BUNDLE_STREAM)).state.bytes < 2 * len(DATA)


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


async def test_a_long_way_is_gone_for_several_parts_at_once_also_where_others_lie_between(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 MB took a node eighty times the way to a gateway and back."""
    monkeypatch.setattr(bundles, "_CHUNK", 10_000)
    _, gateway = await buses(nats)
    other = DATA[::-1]
    named = f"sha256:{hashlib.sha256(other).hexdigest()}"
    await asyncio.gather(
        bundles.store(gateway, DIGEST, pieces(), 10**7), bundles.store(gateway, named, pieces(other, 30_011), 10**7)
    )
    ways = under_way = most = 0

    async def ask(asked: ReadBundle) -> Any:
        nonlocal ways, under_way, most
        ways += not under_way
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        try:
            return await bundles.part(gateway, asked)
        finally:
            under_way -= 1

    assert await bundles.fetch(ask, DIGEST, len(DATA)) == DATA
    assert ways <= 128 // 3
    assert 4 <= most <= 16
    assert await bundles.fetch(ask, named, len(other)) == other


async def test_parts_between_others_are_not_read_many_times() -> None:
    """Eight uploads at once, whose parts follow each other in turns."""
    parts = {8 * number + 8: bytes([number]) * 1000 for number in range(80)}
    data = b"".join(parts.values())
    digest, asks = f"sha256:{hashlib.sha256(data).hexdigest()}", 0

    async def ask(asked: ReadBundle) -> BundlePart:
        nonlocal asks
        asks += 1
        await asyncio.sleep(0)
        number = next(number for number in parts if number > asked.after)
        return BundlePart(data=parts[number], nuid="n", number=number, parts=len(parts))

    assert await bundles.fetch(ask, digest, len(data)) == data
    assert asks <= 3.5 * len(parts), f"{asks} parts were sent for {len(parts)}"

"""Nodes read bundles through gateways, with the rights that each has on a real server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sllm_gateway.bundle_parts import BundleParts
from sllm_invoker import bundle_parts
from sllm_invoker.bundle_parts import BundleReader
from sllm_runtime.platform import bundles
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import DeadlineExceeded, NotFound, Unavailable
from sllm_runtime.protocol.node import BundlePart, ReadBundle
from tests.fixtures.nats import GATEWAY, NODE, NODE_2, Nats
from tests.fixtures.waiting import GIVE_UP_S

DATA = bytes(range(256)) * 3000
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


async def whole() -> AsyncIterator[bytes]:
    yield DATA


async def test_a_node_reads_a_bundle_through_a_gateway_that_comes_after_it_has_asked(nats: Nats) -> None:
    await nats.streams()
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    await bundles.store(gateway, DIGEST, whole())
    reading = asyncio.create_task(bundles.fetch(BundleReader(node, NODE).part, DIGEST, len(DATA)))
    parts = BundleParts(gateway)
    await parts.start()
    try:
        async with asyncio.timeout(GIVE_UP_S):
            assert await reading == DATA
        with pytest.raises(NotFound, match="deploy the function again"):
            await BundleReader(node, NODE).part(ReadBundle(digest="sha256:0"))
    finally:
        await parts.close()


async def test_without_a_gateway_it_is_not_waited_for_for_ever(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    await nats.streams()
    node = await nats.bus(NODE)
    monkeypatch.setattr(bundle_parts, "WITHIN_S", 0.1)
    with pytest.raises(Unavailable, match="no gateway gives bundle sha256:0"):
        await BundleReader(node, NODE).part(ReadBundle(digest="sha256:0"))


async def test_with_the_rights_of_before_a_node_reads_for_itself(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway's bus has them, and not that to ask a gateway. It finds out once, and not for each of three parts."""
    await nats.streams()
    gateway = await nats.bus(GATEWAY)
    await bundles.store(gateway, DIGEST, whole())
    monkeypatch.setattr(bundle_parts, "PART_S", 0.1)
    monkeypatch.setattr(bundle_parts, "SOON_S", 0.0)
    reader, asked = BundleReader(gateway, NODE), list[str]()
    call = gateway.call

    async def counted(subject: str, *args: Any, **options: Any) -> Any:
        asked.append(subject)
        return await call(subject, *args, **options)

    monkeypatch.setattr(gateway, "call", counted)
    assert await bundles.fetch(reader.part, DIGEST, len(DATA)) == DATA
    assert asked == [subjects.read_bundle(NODE)]


async def test_a_gateway_that_comes_back_is_heard_while_a_node_finds_out_that_it_may_not_read_for_itself(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nats.streams()
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    await bundles.store(gateway, DIGEST, whole())
    monkeypatch.setattr(bundle_parts, "SOON_S", 0.0)
    reader, tried = BundleReader(node, NODE), asyncio.Event()

    async def refused(asked: ReadBundle) -> BundlePart | None:
        tried.set()
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(reader, "_itself", refused)
    reading = asyncio.create_task(bundles.fetch(reader.part, DIGEST, len(DATA)))
    await tried.wait()
    parts = BundleParts(gateway)
    await parts.start()
    try:
        async with asyncio.timeout(GIVE_UP_S):
            assert await reading == DATA
    finally:
        await parts.close()


async def test_what_a_node_reads_for_itself_counts_whenever_it_comes(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries again where that failed, and what it has read as its time is over is not thrown away."""
    bus = await nats.bus(NODE)
    monkeypatch.setattr(bundle_parts, "SOON_S", 0.0)
    monkeypatch.setattr(bundle_parts, "AGAIN_S", 0.01)
    reader, part = BundleReader(bus, NODE), BundlePart(nuid="a", parts=1, data=b"x")
    tries, late = list[ReadBundle](), asyncio.Event()

    async def nobody(*_: Any, **__: Any) -> Any:
        if len(tries) == 2:
            monkeypatch.setattr(bundle_parts, "WITHIN_S", -1.0)
            late.set()
        raise DeadlineExceeded("no answer")

    async def itself(asked: ReadBundle) -> BundlePart | None:
        tries.append(asked)
        if len(tries) == 1:
            return None
        await late.wait()
        return part

    monkeypatch.setattr(bus, "call", nobody)
    monkeypatch.setattr(reader, "_itself", itself)
    assert await reader.part(ReadBundle(digest="sha256:0")) == part
    assert len(tries) == 2


async def test_a_node_whose_right_was_taken_asks_gateways_again(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    await nats.streams()
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    await bundles.store(gateway, DIGEST, whole())
    parts = BundleParts(gateway)
    await parts.start()
    reader = BundleReader(node, NODE)
    reader._alone = True
    monkeypatch.setattr(node.jetstream, "_timeout", 0.1)
    try:
        assert await bundles.fetch(reader.part, DIGEST, len(DATA)) == DATA
        assert not reader._alone
    finally:
        await parts.close()


@pytest.mark.parametrize(
    "to", [subjects.node_command(NODE_2, "stop"), f"{subjects.inbox(subjects.NODE, NODE_2)}.question"]
)
async def test_who_asks_for_another_node_is_not_answered(nats: Nats, to: str) -> None:
    """Not in its own inbox, nor where the other one listens."""
    gateway, node = await nats.bus(GATEWAY), await nats.bus(NODE)
    parts = BundleParts(gateway)
    await parts.start()
    heard: list[str] = []

    async def hear(message: object) -> None:
        heard.append(str(message))

    other = await nats.bus(NODE_2)
    await other.subscribe_raw(to, hear)
    await other.flush()
    try:
        asked = b"\x81\xa6digest\xa1a"
        await node.jetstream._nc.publish(subjects.read_bundle(NODE), asked, reply=to)
        await node.flush()
        with pytest.raises(NotFound):  # the one before has been looked at by then
            await node.call(subjects.read_bundle(NODE), ReadBundle(digest="a"), BundlePart, timeout_s=GIVE_UP_S)
        await other.flush()
        assert heard == []
    finally:
        await parts.close()

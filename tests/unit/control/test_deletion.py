"""Deleting a function: what others need of it stays."""

import asyncio
from typing import Any

import pytest

from sllm_runtime.control.deploy import remove_bundles
from sllm_runtime.platform import bundles
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import ctl
from tests.fixtures.waiting import until
from tests.unit.control.bench import Bench, manifest


async def test_a_bundle_stays_that_a_deployment_under_way_needs(bench: Bench) -> None:
    """Functions of one file have one bundle; of one whose model is still made ready there is no version yet."""
    gateway = bench.gateway
    await gateway.deploy(manifest("one"), b"of one file")
    bench.node.prepared.clear()
    deploying = asyncio.create_task(gateway.deploy(manifest("other", model="/models/tiny"), b"of one file"))
    await until(lambda: bench.node.prepares, what="its model is made ready")
    assert (await gateway.ask("delete", ctl.Delete(function="one", force=True))).note == "deleted"
    bench.node.prepared.set()
    version = (await deploying).version
    assert version is not None
    assert await bundles.exists(gateway.bus, version.bundle)


async def test_whether_a_bundle_is_needed_is_asked_when_its_turn_has_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is deleted after the other: meanwhile deployments begin, and end with a version."""
    loop, delete, needed, deleted = bench.controller.loop, bundles.delete, set[str](), list[str]()
    first, begun, ended = [await bench.gateway.upload(data) for data in (b"first", b"begun", b"ended")]

    async def slow(bus: Bus, digest: str, *may: Any) -> None:
        needed.add(begun)
        await bench.gateway.deploy(manifest(), b"ended")
        deleted.append(digest)
        await delete(bus, digest, *may)

    monkeypatch.setattr(bundles, "delete", slow)
    await remove_bundles(loop, loop._bus, [first, begun, ended], needed.__contains__)
    assert deleted == [first]


@pytest.mark.parametrize("meanwhile", ["deposed", "needed", "deployed"])
async def test_whether_a_bundle_may_go_is_asked_again_once_it_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """A leader that was stopped just there goes on while another one leads, or a deployment has begun or ended."""
    loop, info, needed = bench.controller.loop, bundles._info, set[str]()
    digest = await bench.gateway.upload(b"found")

    async def then(*args: Any, **options: Any) -> Any:
        found = await info(*args, **options)
        monkeypatch.setattr(bundles, "_info", info)
        if meanwhile == "deposed":
            monkeypatch.setattr(loop, "_may_act", lambda: False)
        elif meanwhile == "needed":
            needed.add(digest)
        else:
            await bench.gateway.deploy(manifest(), b"found")
        return found

    monkeypatch.setattr(bundles, "_info", then)
    await remove_bundles(loop, loop._bus, [digest], needed.__contains__)
    assert await bundles.size(bench.gateway.bus, digest) == len(b"found")

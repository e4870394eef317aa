"""Sweeps of the bundle store by the leading controller: real JetStream, real uploads, nothing that is needed goes."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from functools import partial

from sllm_runtime.control.daemon import Controller
from sllm_runtime.control.sweeping import SWEEP_S, Sweeps
from sllm_runtime.platform import bundles
from sllm_runtime.platform.streams import BUNDLE_STREAM
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.control.bench import Bench, Gateway, controller_of, manifest

TIMES = 3


def sweeps_of(controller: Controller) -> Sweeps:
    """Of this controller, swept when the test says so."""
    service = controller.service
    loop, deployments = controller.loop, service._deployments
    return Sweeps(loop, loop._nodes, deployments, service._bus)


async def test_what_nothing_needs_goes_and_all_else_stays(bench: Bench) -> None:
    gateway, sweeps = bench.gateway, sweeps_of(bench.controller)
    await gateway.deploy(manifest(), b"first")
    await gateway.deploy(manifest(), b"second")  # the first can be rolled back to
    forgotten = await gateway.upload(b"uploaded, never deployed")
    for part in range(2):
        await gateway.bus.jetstream.publish("$O.sllm_bundles.C.dead", b"part %d" % part)
    await sweeps.sweep()
    assert await bundles.exists(gateway.bus, forgotten), "it may be deployed in a moment"
    late = await gateway.upload(b"uploaded between two sweeps")
    await sweeps.sweep()
    names = await bundles.names(gateway.bus)
    assert names == {record.bundle for record in bench.controller.loop.view.versions.values()} | {late}
    info = await gateway.bus.jetstream.stream_info(BUNDLE_STREAM, subjects_filter="$O.sllm_bundles.C.>")
    assert len(info.state.subjects or {}) == len(names)
    await gateway.deploy(manifest(), b"uploaded between two sweeps")


async def test_a_deployment_under_way_keeps_its_bundle(bench: Bench) -> None:
    gateway, sweeps = bench.gateway, sweeps_of(bench.controller)
    bench.node.behave = lambda command: InstanceState.STARTING
    deploying = asyncio.create_task(gateway.deploy(manifest(), b"slow to start"))
    await until(lambda: bench.node.starts)
    for _ in range(TIMES):
        await sweeps.sweep()
    bench.node.put(bench.node.starts[0].instance, InstanceState.READY)
    deployed = await deploying
    assert deployed.version is not None
    assert await bundles.exists(gateway.bus, deployed.version.bundle)


async def test_an_upload_however_slow_is_left_alone(bench: Bench) -> None:
    """30 KB at a time, each just within the silence that is borne: swept all along, it arrives whole."""
    gateway, sweeps = bench.gateway, sweeps_of(bench.controller)
    data, piece, now = os.urandom(900_000), 30_000, 0.0
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal now
        for start in range(0, len(data), piece):
            now += bundles.STILL_S * 0.49
            if start % (3 * piece) == 0:  # much more often than every SWEEP_S, and just above STILL_S
                await sweeps.sweep()
            yield data[start : start + piece]

    assert await bundles.store(gateway.bus, digest, chunks(), clock=lambda: now) == len(data)
    assert await bundles.fetch(partial(bundles.part, gateway.bus), digest, len(data)) == data


async def test_a_deposed_controller_sweeps_nothing(nats: Nats) -> None:
    async with controller_of(nats) as old:
        gateway = Gateway(await nats.bus("gw"))
        digest = await gateway.upload(b"of a version that only the new one knows")
        sweeps = sweeps_of(old)
        await sweeps.sweep()
        async with controller_of(nats, "ctl2"):
            for _ in range(TIMES):
                await sweeps.sweep()
            assert await bundles.exists(gateway.bus, digest)


async def test_the_leader_sweeps_by_itself(bench: Bench) -> None:
    """Every SWEEP_S, on a clock that the test turns; a store that is away for a while ends nothing."""
    asked: list[float] = []
    turn: asyncio.Queue[None] = asyncio.Queue()

    async def pause(seconds: float) -> None:
        asked.append(seconds)
        await turn.get()

    loop, service = bench.controller.loop, bench.controller.service
    sweeps = Sweeps(loop, loop._nodes, service._deployments, service._bus, pause)
    digest = await bench.gateway.upload(b"forgotten")
    sweeps.start()
    try:
        for _ in range(TIMES):
            turn.put_nowait(None)
        await until(lambda: len(asked) == TIMES + 1)
    finally:
        await sweeps.close()
    assert set(asked) == {SWEEP_S}
    assert not await bundles.exists(bench.gateway.bus, digest)
    assert (await bench.gateway.ask("ping", ctl.Nothing())).note == "leading"

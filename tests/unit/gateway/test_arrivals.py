"""What came for all calls in one tick is written in one go."""

import asyncio

from sllm_gateway.arrivals import Arrivals
from sllm_gateway.call import Call, Marks, Order
from sllm_gateway.table import Version
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.records import Route
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.gateway.peer import manifest


def call_named(name: str) -> Call:
    route = Route(function="fn", version=1, manifest=manifest("fn"), active=True)
    order = Order(name, Version(route), "fn", True, b"{}", 1, 0.0)
    return Call(order, Marks(route, sent=0.0))


def broken(_now: float) -> bool:
    raise RuntimeError("no such connection")


async def test_an_answer_that_cannot_be_written_fails_its_own_call_alone() -> None:
    failed: list[tuple[Call, SllmError]] = []
    written: list[str] = []

    def write(now: float) -> bool:
        assert now == 7.0
        written.append("good")
        return True

    bad, good = call_named("bad"), call_named("good")
    bad.write_now, good.write_now = broken, write
    arrivals = Arrivals(lambda call, error: failed.append((call, error)), lambda: 7.0)
    for call in (bad, good, good):
        arrivals.add(call)
    assert not written, "what comes later in this tick goes with it"
    await asyncio.sleep(0)
    assert written == ["good", "good"]
    assert [(call.id, error.code) for call, error in failed] == [("bad", "internal")]


async def test_a_reader_that_must_wait_for_its_client_is_woken() -> None:
    call = call_named("lags")
    call.write_now = lambda _now: False
    waiting = asyncio.create_task(call.changed(float("inf")))
    await asyncio.sleep(0)
    Arrivals(lambda *_: None, lambda: 7.0).add(call)
    await asyncio.wait_for(waiting, GIVE_UP_S)

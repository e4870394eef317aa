"""What one controller has heard, and the next one does not take now, may have been done all the same."""

import asyncio

from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.http import API
from tests.fixtures.nats import Nats
from tests.unit.gateway.peer import manifest, world


async def test_a_rollback_that_one_heard_who_is_gone_and_the_next_does_not_take_may_be_done(nats: Nats) -> None:
    heard = asyncio.Event()

    async def rollback(request: ctl.Rollback) -> ctl.FunctionInfo:
        heard.set()  # it is stored; then the process dies
        await asyncio.sleep(60)
        raise AssertionError

    async def busy(request: ctl.Rollback) -> ctl.FunctionInfo:
        raise Unavailable("the state cannot be stored now: other decisions wait for it; try again")  # ``Loop._turn``

    async with world(nats) as w:
        await w.controller.serve("rollback", ctl.Rollback, rollback)
        await w.deploy(manifest("f"), version=2)
        asked = asyncio.create_task(w.http.post(f"{API}/functions/f/rollback", json={}))
        await asyncio.wait_for(heard.wait(), 5)
        await w.controller._subscriptions.pop().unsubscribe()
        await w.controller.serve("rollback", ctl.Rollback, busy)
        w.gateway._leader._ask_again()  # another one leads
        error = (await asked).json()["error"]
        assert error["retryable"] is False, error

"""What was asked of a controller that is gone is asked of the next."""

import asyncio

import pytest

from sllm_gateway.leader import Leader
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.errors import FunctionNotFound, Unavailable
from sllm_runtime.protocol.node import Ok
from sllm_runtime.protocol.records import Term
from tests.fixtures.nats import CONTROLLER, GATEWAY, Nats
from tests.fixtures.waiting import GIVE_UP_S, until


async def test_a_question_to_one_that_is_gone_is_asked_again(nats: Nats) -> None:
    controller, gateway = await nats.bus(CONTROLLER), await nats.bus(GATEWAY)
    asked: list[int] = []
    never = asyncio.Event()

    async def answer(_: ctl.Nothing) -> Ok:
        asked.append(len(asked))
        if len(asked) == 1:
            await never.wait()
        if len(asked) == 3:
            raise FunctionNotFound("no")
        return Ok(note=f"answer {len(asked)}")

    await controller.serve(subjects.ctl("ping"), ctl.Nothing, answer)
    leader = Leader(gateway)
    await leader.start()
    try:
        asking = asyncio.create_task(leader.ask("ping", ctl.Nothing(), Ok, timeout_s=GIVE_UP_S))
        await until(lambda: asked, what="the first one is asked")
        await controller.publish(subjects.LEADER, Term(term=2, controller="b"))
        assert (await asking).note == "answer 2"
        with pytest.raises(FunctionNotFound):
            await leader.ask("ping", ctl.Nothing(), Ok)
        with pytest.raises(Unavailable, match="nobody serves"):
            await leader.ask("nodes", ctl.Listing(), ctl.NodeList)
        for term in (2, 1, 2):
            await controller.publish(subjects.LEADER, Term(term=term, controller="a"))
        assert (await leader.ask("ping", ctl.Nothing(), Ok, timeout_s=GIVE_UP_S)).note == "answer 4"
        assert len(asked) == 4, "only a greater term is another leader"
    finally:
        await leader.close()


async def test_what_makes_an_end_says_when_it_is_asked_again(nats: Nats) -> None:
    """The leader that was asked first may have done it, and died before it answered."""
    controller, gateway = await nats.bus(CONTROLLER), await nats.bus(GATEWAY)
    asked: list[bool] = []
    never = asyncio.Event()

    async def answer(request: ctl.Delete) -> Ok:
        asked.append(request.again)
        if not request.again:
            await never.wait()
        return Ok(note="deleted")

    leader = Leader(gateway)
    await leader.start()
    try:
        asking = asyncio.create_task(
            leader.ask("delete", ctl.Delete(function="f"), Ok, timeout_s=GIVE_UP_S, wait_s=GIVE_UP_S)
        )
        await asyncio.sleep(0)  # nobody serves yet: that is no question that anybody has heard
        await controller.serve(subjects.ctl("delete"), ctl.Delete, answer)
        await until(lambda: asked, what="it is asked")
        await controller.publish(subjects.LEADER, Term(term=2, controller="b"))
        assert (await asking).note == "deleted"
        assert asked == [False, True]
    finally:
        await leader.close()

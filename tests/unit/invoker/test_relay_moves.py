"""What a relay says of calls that move: what can wait is not begun meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from sllm_invoker.relay import Relay
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.frames import Ack, CallHead, Feed, Hold, Open, Resend, ToNode
from tests.unit.invoker.test_beats import Line
from tests.unit.invoker.test_turns import Slots

HEAD = CallHead(
    call="c", epoch=1, instance="i", function="f", version=1, kind="fn", stream=True,
    body_bytes=0, timeout_s=600.0, idle_timeout_s=60.0, seed=0, credit=limits.WINDOW,
)  # fmt: skip


@pytest.mark.parametrize(
    ("held", "item", "times"),
    [
        (False, Ack("c", 1, 0, limits.WINDOW), 0),
        (False, Resend("c", 1, 0), 0),
        (False, Ack("c", 1, 0, limits.WINDOW, follow=True), 1),
        (False, Hold("c", 1), 1),
        (True, Ack("c", 1, 0, limits.WINDOW), 1),
        (True, Feed("c", 1, 0, 0, (), held=True), 2),
    ],
)
async def test_it_says_that_calls_move(held: bool, item: Ack | Feed | Hold | Resend, times: int) -> None:
    """Here when one is opened for that, or fed; away from here when its ids are followed, or it is to rest."""
    told: list[int] = []
    host, tasks = Slots(1), Tasks("test")
    relay = Relay(lambda _: host, lambda _: Line(), lambda: 0.0, tasks, moves=lambda: told.append(1))
    assert relay.open("g", Open(head=msgspec.structs.replace(HEAD, held=held))).status == "accepted"
    relay.on_message("g", ToNode((item,)))
    assert len(told) == times
    await tasks.close()

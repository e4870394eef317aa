"""What a gateway sends to nodes."""

import asyncio
from typing import Any, cast

from sllm_gateway.link import Link
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.outbox import encode
from sllm_runtime.protocol.frames import Ack, Feed
from sllm_runtime.protocol.limits import MOST_IDS
from sllm_runtime.protocol.subjects import node_calls


class Sent:
    """What a bus would be given to send."""

    def __init__(self) -> None:
        self.subjects: list[str] = []

    def publish_now(self, subject: str, message: Any) -> None:
        encode(message, subject)
        self.subjects.append(subject)


async def test_what_no_message_holds_keeps_nothing_from_other_nodes() -> None:
    sent = Sent()
    link = Link(cast(Bus, sent), "g1", lambda: 0.0)
    link.send("n1", Feed("call-1", 1, 0, 0, (2**40,) * MOST_IDS))
    link.send("n2", Ack("call-2", 1, 1, 0))
    await asyncio.sleep(0)
    assert sent.subjects == [node_calls("n2", "g1")]

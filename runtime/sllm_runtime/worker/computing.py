"""A process of an instance that takes no calls: it computes its part of what number 0 says, until that one is gone."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import InstanceLost, SllmError
from sllm_runtime.protocol.timeline import WEIGHTS
from sllm_runtime.protocol.worker import Assign, Stop, ToWorker
from sllm_runtime.worker.arriving import Report
from sllm_runtime.worker.joined import Joined
from sllm_runtime.worker.start import confine, failed

log = logging.getLogger(__name__)


async def serve(
    assign: Assign, fds: list[int], joined: Joined, report: Report, receive: Callable[[], list[bytes] | None]
) -> SllmError | None:
    """Compute until number 0 or the invoker is gone, or asks for it; what broke, if anything did.

    ``receive``: the invoker's messages, as ``BlockingWire.receive_all``. Both it and the computing have a thread of
    their own: whichever ends first ends this process.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[SllmError | None] = loop.create_future()

    def end(why: SllmError | None) -> None:
        if not ended.done():
            ended.set_result(why)

    def told(why: SllmError | None) -> None:
        loop.call_soon_threadsafe(end, why)

    def listen() -> None:
        _until_stopped(receive)
        told(None)

    def compute() -> None:
        error = _compute(assign, fds, joined, report)
        # Who has gone is seen by the invoker, and says it better: this one has but lost its connection.
        told(None if isinstance(error, InstanceLost) else error)

    for name, run in (("reader", listen), ("engine", compute)):
        threading.Thread(target=run, name=name, daemon=True).start()
    return await ended


def _until_stopped(receive: Callable[[], list[bytes] | None]) -> None:
    try:
        while (payloads := receive()) is not None:
            if any(isinstance(codec.unpack(ToWorker, each).body, Stop) for each in payloads):
                return
    except (OSError, SllmError) as error:
        log.warning("the invoker's socket: %s", error)


def _compute(assign: Assign, fds: list[int], joined: Joined, report: Report) -> SllmError:
    from sllm_runtime.worker import parts

    try:
        confine(assign)
        follower = parts.follower(assign, joined, fds[1], report)
    except Exception as error:  # a library's too: whoever waits for this process hears what it was
        failure = failed(error, WEIGHTS)
        joined.fail(failure)
        return failure
    return follower.run()

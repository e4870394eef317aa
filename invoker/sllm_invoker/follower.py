"""A process of an instance that takes no calls: listened to, and missed when it is gone.

What it says is of no use but to show that it lives, for the log, and for why it fails: its number 0 speaks for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sllm_invoker.logs import InstanceLog
from sllm_invoker.output import Output
from sllm_invoker.preparation import Seat
from sllm_invoker.sandbox import Exit, Sandbox
from sllm_invoker.verdicts import Verdict
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.clipping import NAME_BYTES, clip, clip_error
from sllm_runtime.protocol.errors import ProtocolError, SllmError, Unavailable
from sllm_runtime.protocol.worker import Assign, Failed, FromWorker, Heartbeat, Log, Stage, ToWorker

EOF_S: Final = 0.5
"""A dead worker's socket is read this long, should a child of it still hold it open."""
EXIT_S: Final = 1.0
"""A worker that closed its socket is given this long to end; then it is killed."""
CAUSE_S: Final = 30.0
"""It ends in order when number 0 is gone or has failed, and that one's own end has this long to be known."""


@dataclass(frozen=True)
class Follower:
    """``end`` is for its owner task. ``heard``: called whenever it says anything."""

    seat: Seat
    log: InstanceLog
    heard: Callable[[], None]
    output: Output

    @classmethod
    def of(cls, seat: Seat, log: InstanceLog, heard: Callable[[], None]) -> Follower:
        """With its output read from now on."""
        return cls(seat, log, heard, Output(seat.sandbox, log))

    def tell(self, assign: Assign, fds: Sequence[int]) -> None:
        """Say what it is. One that is gone is noticed by ``end``."""
        with contextlib.suppress(Unavailable):
            self.seat.sandbox.wire.send(codec.pack(ToWorker(assign)), fds)

    async def end(self, verdict: asyncio.Future[Verdict]) -> Exit | SllmError:
        """Why it fails, what no right one says, or how it ended. If that was in order, once the instance's ``verdict``
        is known, or should have been."""
        end = await self._listen()
        if isinstance(end, Exit):
            self.output.drain()
            if not end.code and not end.signal:
                await asyncio.wait((verdict,), timeout=CAUSE_S)
        return end

    async def _listen(self) -> Exit | SllmError:
        sandbox = self.seat.sandbox
        loop = asyncio.get_running_loop()
        sandbox.exited.add_done_callback(lambda _end: loop.call_later(EOF_S, sandbox.wire.close))
        while True:
            try:
                payload = await sandbox.wire.receive()
                if payload is None:
                    return await ended(sandbox)
                failure = self._take(payload)
            except SllmError as error:
                return error
            if failure is not None:
                return failure

    def _take(self, payload: bytes) -> SllmError | None:
        message = codec.unpack(FromWorker, payload)
        if message.version not in (limits.PROTOCOL_VERSION, limits.PROTOCOL_VERSION - 1):
            raise ProtocolError(f"the worker speaks version {message.version}, this node {limits.PROTOCOL_VERSION}")
        self.heard()
        match message.body:
            case Heartbeat() | Stage():
                return None
            case Log() as line:
                self.log.line(clip(line.stream, NAME_BYTES), line.text, level=clip(line.level, NAME_BYTES))
                return None
            case Failed() as failed:
                return clip_error(failed.error).to_error()
            case other:
                raise ProtocolError(f"{type(other).__name__} from a worker that takes no calls")


async def ended(sandbox: Sandbox) -> Exit:
    """How a worker ended whose socket did; it is killed if it does not."""
    try:
        async with asyncio.timeout(EXIT_S):
            return await asyncio.shield(sandbox.exited)
    except TimeoutError:
        sandbox.kill()
        return await asyncio.shield(sandbox.exited)

"""What all routes that make a call share: an id, a seed, an order, a beginning."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

from sllm_gateway.asgi import STATE, Receive, Scope, joined, read_body
from sllm_gateway.call import Call, Order
from sllm_gateway.calls import Calls
from sllm_gateway.keeping import Keeping
from sllm_gateway.ledger import Ledger
from sllm_gateway.lives import Lives
from sllm_gateway.lookup import Lookup
from sllm_gateway.metrics import Metrics
from sllm_gateway.openai.outputs import Header
from sllm_gateway.respond import Responder
from sllm_gateway.settings import GatewaySettings
from sllm_gateway.table import Version
from sllm_runtime.platform import trace
from sllm_runtime.protocol.calls import PREFIX, CallOrder
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.http import EVENT_STREAM
from sllm_runtime.protocol.limits import MAX_PART
from sllm_runtime.protocol.lives import TAG

_EVENTS: Final = EVENT_STREAM.encode()
_NEVER: Final = re.compile(rb"q=0(\.0{0,3})?")


class Caller:
    """The parts that a calling route needs. ``random`` gives n random bytes."""

    def __init__(
        self,
        lookup: Lookup,
        calls: Calls,
        responder: Responder,
        settings: GatewaySettings,
        metrics: Metrics,
        keeping: Keeping,
        lives: Lives,
        ledger: Ledger,
        clock: Callable[[], float],
        wall: Callable[[], float],
        random: Callable[[int], bytes],
    ) -> None:
        self.lookup = lookup
        self.calls = calls
        self.responder = responder
        self.settings = settings
        self.metrics = metrics
        self.keeping = keeping
        self._lives = lives
        self._ledger = ledger
        self.clock = clock
        self._wall = wall
        self._random = random

    async def new_id(self, scope: Scope) -> str:
        """An id for the call that this request will be; errors name it from now on. Raises ``Unavailable``."""
        await self._lives.recorded()
        call = f"{PREFIX}{self._lives.me.life[:TAG]}{self._random(9).hex()}"
        scope["sllm.call"] = call
        return call

    async def body(self, scope: Scope, receive: Receive) -> bytes:
        """The request's. Raises as ``read_body``."""
        return await read_body(scope, receive, self.settings.max_body, self.settings.body_timeout)

    def order(
        self,
        scope: Scope,
        version: Version,
        kind: Literal["fn", "chat", "completion"],
        body: bytes,
        *,
        call: str,
        stream: bool,
        accepted: float,
    ) -> Order:
        """What is asked for. The seed serves calls that name none."""
        return Order(
            id=call,
            version=version,
            kind=kind,
            stream=stream,
            body=body,
            seed=int.from_bytes(self._random(8)) >> 1,
            accepted=accepted,
            traceparent=trace.current(),
            tracestate=scope[STATE],
            created=self._wall(),
        )

    def admit(self, order: Order, asked: Callable[[bool], CallOrder]) -> Call:
        """Begin a call that is not kept; ``asked(durable)`` is what another gateway would be told of its stream."""
        with self.metrics.refusing(order.version.function):
            self.calls.require_open()
        call = self.calls.admit(order)
        if order.stream and call.resumption is not None:
            call.before_open = partial(self._lives_on, call)
            self._ledger.begin(call, asked(False))
        return call

    async def _lives_on(self, call: Call) -> None:
        """No instance is asked while this gateway does not know that it lives (``Lives.sure``). What the call is
        allowed ends it."""
        while not call.over:
            with contextlib.suppress(Unavailable):
                return await self._lives.sure()

    def asked(self, order: Order, durable: bool, header: Header | None = None) -> CallOrder:
        """The same, as a kept call's journal says it. ``header``: of an OpenAI answer."""
        return CallOrder(
            call=order.id,
            function=order.version.function,
            version=order.version.number,
            kind=order.kind,
            seed=order.seed,
            parts=-(-len(order.body) // MAX_PART),
            gateway=self.settings.gateway,
            life=self._lives.me.life,
            durable=durable,
            created=order.created,
            traceparent=order.traceparent,
            tracestate=order.tracestate,
            model=header.model if header is not None else "",
            streams=order.version.manifest.handler.streams,
        )


def wants_events(scope: Scope) -> bool:
    """Whether the caller accepts server-sent events: names them in ``Accept``, and not with ``q=0``."""
    for kind in joined(scope, b"accept").lower().split(b","):
        name, *parameters = (word.strip() for word in kind.split(b";"))
        if name == _EVENTS:
            return not any(_NEVER.fullmatch(each) for each in parameters)
    return False

"""Calls of several gateways that want the slots of the same instances: each gateway has its share of them."""

import asyncio
from collections import Counter

import pytest

from sllm_invoker.relay import Relay
from sllm_invoker.turns import KEPT_S, Turns
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.frames import Ack, CallHead, End, Frame, FrameKind, Open, ToNode
from tests.unit.invoker.test_beats import Instance, Line

STEP = 0.01
HOLD_S = 0.5
"""A gateway asks an instance that was busy again after so long at the latest (``queue.BUSY_MOST_S``)."""


class Slots(Instance):
    """It has so many, and says which calls end."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self._slots = slots

    @property
    def running(self) -> list[object]:
        return [call for call in self.calls if call.running]

    @property
    def free_slot(self) -> bool:  # type: ignore[override]
        return len(self.running) < self._slots


class Shared:
    """Instances of one version, each call of which takes ``call_s``. Gateways that have calls waiting all the time ask
    as ``SlotQueue`` does: at once when a call of theirs ends, otherwise after their hold."""

    def __init__(self, slots: int, call_s: float, instances: int = 1) -> None:
        self.now, self._call_s, self.number = 0.0, call_s, 0
        self.hosts = {f"i{number}": Slots(slots) for number in range(instances)}
        self.relay = Relay(self.hosts.get, lambda _: Line(), lambda: self.now, Tasks("test"), self.yielded)
        self.told: float | None = None
        self.ends: list[tuple[float, str, str, object]] = []
        self.heads: dict[str, str] = {}
        """The call that is next at each gateway."""
        self.held: dict[tuple[str, str], float] = {}
        self.began: Counter[str] = Counter()
        self.waited: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def ask(self, gateway: str, name: str) -> bool:
        call = self.heads.setdefault(gateway, f"{gateway}-{self.number}")
        head = CallHead(
            call=call, epoch=1, instance=name, function="f", version=1, kind="fn", stream=False,
            body_bytes=0, timeout_s=600.0, idle_timeout_s=60.0, seed=0, credit=limits.WINDOW,
        )  # fmt: skip
        if self.relay.open(gateway, Open(head=head)).status != "accepted":
            self.held[gateway, name] = self.now + HOLD_S
            return False
        self.held.pop((gateway, name), None)
        self.number += 1
        self.heads[gateway] = f"{gateway}-{self.number}"
        self.ends.append((self.now + self._call_s, gateway, name, self.hosts[name].calls[-1]))
        self.began[gateway] += 1
        self.waited[gateway] = max(self.waited.get(gateway, 0.0), self.now - self.last.get(gateway, 0.0))
        self.last[gateway] = self.now
        return True

    def yielded(self) -> None:
        """The node's report says so, a little later."""
        self.told = self.now + 2 * STEP if self.told is None else self.told

    def report(self) -> None:
        if self.told is not None and self.told <= self.now:
            self.told = None
            self.held = {each: until for each, until in self.held.items() if not self.hosts[each[1]].free_slot}

    async def run(self, seconds: float, *gateways: str) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP
            self.report()
            for at, gateway, name, call in [each for each in self.ends if each[0] <= self.now]:
                self.ends.remove((at, gateway, name, call))
                call.push([Frame(call.outbox.next_index, FrameKind.END, codec.pack(End()))], self.now)  # type: ignore[attr-defined]
                ack = Ack(call.head.call, 1, call.outbox.next_index, limits.WINDOW)  # type: ignore[attr-defined]
                call.outbox.take()  # type: ignore[attr-defined]
                self.relay.on_message(gateway, ToNode((ack,)))
                while gateway in gateways and self.ask(gateway, name):  # whose call has ended is told first
                    pass
            for gateway in gateways:
                for name in self.hosts:
                    if self.now >= self.held.get((gateway, name), 0.0):
                        while self.ask(gateway, name):
                            pass
        await asyncio.sleep(0)


@pytest.mark.parametrize(("slots", "instances"), [(1, 1), (3, 1), (32, 1), (1, 20)])
@pytest.mark.parametrize("call_s", [0.05, 1.0])
async def test_no_gateway_keeps_the_slots_while_calls_of_another_one_wait(
    slots: int, instances: int, call_s: float
) -> None:
    shared = Shared(slots, call_s, instances)
    await shared.run(3.0, "a")
    alone = shared.began["a"] / 3.0
    shared.began.clear()
    await shared.run(20.0, "a", "b")
    assert shared.began["b"] > 0, "all its callers wait while each slot goes back to who had it"
    assert 0.4 < shared.began["a"] / shared.began["b"] < 2.5, shared.began
    assert shared.began.total() / 20.0 > 0.7 * alone, "slots stay free for nobody"


async def test_a_gateway_that_has_gone_takes_no_turn() -> None:
    shared = Shared(1, 0.05)
    await shared.run(1.0, "a", "b")
    shared.began.clear()
    await shared.run(10.0, "a")
    assert shared.began["a"] > 0.9 * 10.0 / (0.05 + STEP)


def test_gateways_that_ask_no_more_do_not_keep_a_slot_for_each_other() -> None:
    turns, version = Turns(), ("f", 1)
    for other in ("b", "c", "d"):
        turns.refused(version, other, f"{other}-1", 0.0)

    def kept(now: float) -> bool:
        return turns.yields(version, "i1", "a", lambda gateway: int(gateway == "a"), now)

    assert kept(STEP)
    assert not all(kept(STEP * number) for number in range(2, int(3.5 * KEPT_S / STEP)))

"""The queue of slots: Hypothesis drives it with everything that can happen to it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sllm_gateway.queue import SlotQueue, Waiting
from sllm_runtime.protocol.records import RouteEntry
from tests.fixtures.examples import examples

INSTANCES = ("a", "b", "c")


class Machine(RuleBasedStateMachine):
    """``placed`` is what a fair observer knows: which call is where, and the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: SlotQueue[int] = SlotQueue()
        self.now = 0.0
        self.next = 0
        self.waiting: list[int] = []
        self.placed: dict[int, str] = {}
        self.refused_until: dict[str, float] = {}
        self.came: dict[str, float] = {}

    @rule(sizes=st.dictionaries(st.sampled_from(INSTANCES), st.integers(1, 3)))
    def route(self, sizes: dict[str, int]) -> None:
        self.queue.on_route([entry(name, size) for name, size in sizes.items()], self.now)
        self.came = {name: self.came.get(name, self.now) for name in sizes}
        assert self.queue.came == self.came
        self.refused_until = {name: until for name, until in self.refused_until.items() if name in sizes}
        self.match()

    @rule()
    def arrive(self) -> None:
        self.queue.push(self.next)
        self.waiting.append(self.next)
        self.next += 1
        self.match()

    @rule(seconds=st.floats(0.001, 1))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.match()

    @precondition(lambda self: self.placed)
    @rule(data=st.data(), how=st.sampled_from(["end", "busy", "gone"]))
    def leaves(self, data: st.DataObject, how: str) -> None:
        call = data.draw(st.sampled_from(sorted(self.placed)))
        instance = self.placed.pop(call)
        if how == "end":
            self.queue.accepted(instance)
            self.queue.release(instance)
            self.refused_until.pop(instance, None)
        else:
            (self.queue.busy if how == "busy" else self.queue.gone)(instance, self.now)
            if instance in self.queue.entries:
                self.refused_until[instance] = self.now + 0.0199
            self.queue.push_front(call)
            self.waiting.insert(0, call)
        self.match()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(call)
        assert not self.queue.remove(call)
        self.waiting.remove(call)

    def match(self) -> None:
        for call, entry in self.queue.match(self.now):
            assert call == self.waiting.pop(0), "first come, first served"
            assert self.refused_until.get(entry.instance, -1) <= self.now, "asked again too early"
            self.placed[call] = entry.instance

    @invariant()
    def nothing_is_lost(self) -> None:
        assert list(self.queue.waiting) == self.waiting

    @invariant()
    def the_running_are_counted(self) -> None:
        counts: dict[str, int] = {}
        for instance in self.placed.values():
            counts[instance] = counts.get(instance, 0) + 1
        assert self.queue.running == counts

    @invariant()
    def the_living_are_counted(self) -> None:
        gone = set(self.queue.gone_instances)
        assert self.queue.living == sum(name not in gone for name in self.queue.entries)

    @invariant()
    def nobody_waits_beside_a_free_slot_without_a_time_to_try(self) -> None:
        if not self.waiting:
            return
        free = [
            name for name, entry in self.queue.entries.items() if self.queue.running.get(name, 0) < entry.concurrency
        ]
        if free:
            again = self.queue.next_try(self.now)
            assert again is not None
            assert again > self.now


TestQueue = Machine.TestCase
TestQueue.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


def entry(name: str, size: int = 1, fingerprint: str = "") -> RouteEntry:
    return RouteEntry(instance=name, node="n", version=1, concurrency=size, fingerprint=fingerprint)


def test_the_least_loaded_instance_is_taken() -> None:
    queue: SlotQueue[str] = SlotQueue()
    queue.on_route([entry("a", 1), entry("b", 3)], 0.0)
    for call in "wxyz":
        queue.push(call)
    assert [(call, to.instance) for call, to in queue.match(0.0)] == [("w", "b"), ("x", "b"), ("y", "a"), ("z", "b")]


def test_holds_grow_and_an_accepted_call_or_a_report_ends_them() -> None:
    queue: SlotQueue[str] = SlotQueue()
    queue.on_route([entry("a")], 0.0)
    now, waits = 0.0, []
    for _ in range(8):
        queue.push_front("x")
        assert queue.match(now)
        queue.busy("a", now)
        queue.push_front("x")
        again = queue.next_try(now)
        assert again is not None
        waits.append(round(again - now, 3))
        queue.remove("x")
        now = again
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]
    assert queue.has_room("a")
    assert not queue.has_room("a")


def test_who_waits_tries_again_when_the_first_hold_ends() -> None:
    queue: SlotQueue[str] = SlotQueue()
    queue.on_route([entry("a"), entry("b")], 0.0)
    queue.push("x")
    queue.push("y")
    assert len(queue.match(0.0)) == 2
    queue.gone("a", 0.0)
    queue.busy("b", 0.0)
    assert queue.next_try(0.0) is None, "nobody waits"
    queue.push_front("y")
    assert queue.next_try(0.0) == pytest.approx(0.02), "not as late as the one that is gone"


def test_reserved_slots_are_not_for_who_waits() -> None:
    queue: SlotQueue[str] = SlotQueue()
    queue.on_route([entry("a", 3), entry("b", 1)], 0.0)
    for call in "xyz":
        queue.push(call)
    found = queue.match(0.0, {"a": 2, "b": 1})
    assert [(call, to.instance) for call, to in found] == [("x", "a")]
    assert [queue.may_ask(name, 0.0) for name in "abc"] == [True, True, False], "a call that moves may"
    queue.take("b")
    assert not queue.may_ask("b", 0.0)
    queue.busy("b", 0.0)
    again = queue.next_try(0.0)
    assert again is not None
    assert [queue.may_ask("b", now) for now in (0.0, again)] == [False, True]


def test_gone_instances_are_reported_until_the_route_drops_them() -> None:
    queue: SlotQueue[str] = SlotQueue()
    queue.on_route([entry("a"), entry("b")], 0.0)
    queue.gone("a", 0.0)
    assert queue.gone_instances == ("a",)
    assert queue.living == 1
    queue.gone("b", 0.0)
    assert queue.living == 0
    assert not queue.has_room("a"), "a report in flight does not bring it back"
    queue.on_route([], 1.0)
    assert not queue.gone_instances


class Lines(RuleBasedStateMachine):
    """``order`` is one line of all that wait, each with its class."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: Waiting[int] = Waiting()
        self.order: list[tuple[int, str]] = []
        self.came = 0

    @rule(numerics=st.sampled_from(["", "f", "g"]), front=st.booleans())
    def push(self, numerics: str, front: bool) -> None:
        self.came += 1
        (self.waiting.push_front if front else self.waiting.push)(self.came, numerics)
        self.order.insert(0 if front else len(self.order), (self.came, numerics))

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        call, numerics = data.draw(st.sampled_from(self.order))
        assert self.waiting.remove(call)
        assert not self.waiting.remove(call)
        self.order.remove((call, numerics))

    @precondition(lambda self: any(not numerics for _, numerics in self.order))
    @rule(data=st.data(), numerics=st.sampled_from(["f", "g"]))
    def bind(self, data: st.DataObject, numerics: str) -> None:
        call, _ = data.draw(st.sampled_from([each for each in self.order if not each[1]]))
        self.waiting.bind(call, numerics)
        self.order[self.order.index((call, ""))] = (call, numerics)

    @invariant()
    def they_are_in_order(self) -> None:
        assert list(self.waiting) == [call for call, _ in self.order]
        assert len(self.waiting) == len(self.order)

    @invariant()
    def the_next_is_the_first_of_those_that_are_not_left_out(self) -> None:
        for but in (set[str](), {"f"}, {"", "g"}, {"", "f", "g"}):
            assert self.waiting.next(but) == next((each for each in self.order if each[1] not in but), None)


TestLines = Lines.TestCase
TestLines.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)


def test_who_is_bound_to_a_class_waits_for_it_while_it_lives() -> None:
    queue: SlotQueue[str] = SlotQueue(lambda call: call[:-1])
    queue.on_route([entry("a", 1, "f"), entry("b", 2, "g"), entry("c", 3, "g")], 0.0)

    def matched() -> list[tuple[str, str]]:
        return [(call, to.instance) for call, to in queue.match(0.0)]

    for call in ("f1", "f2", "1", "f3"):
        queue.push(call)
    assert matched() == [("f1", "a"), ("1", "c")], "not at what is freest, and nobody waits behind it"
    assert list(queue.waiting) == ["f2", "f3"]
    queue.release("a")
    assert matched() == [("f2", "a")]
    queue.gone("a", 0.0)
    assert matched() == [("f3", "b")], "none of its class lives: whoever it is sent to says so"


def test_who_is_bound_while_it_waits_keeps_its_turn() -> None:
    bound: dict[str, str] = {}
    queue: SlotQueue[str] = SlotQueue(lambda call: bound.get(call, ""))
    queue.on_route([entry("a", 1, "f"), entry("b", 1, "g")], 0.0)
    bound["z"] = "f"
    for call in "vwxyz":
        queue.push(call)
    assert [(call, to.instance) for call, to in queue.match(0.0)] == [("v", "a"), ("w", "b")]
    bound["x"] = "f"
    queue.release("b")
    assert [(call, to.instance) for call, to in queue.match(0.0)] == [("y", "b")], "it passes x by"
    queue.release("a")
    assert [(call, to.instance) for call, to in queue.match(0.0)] == [("x", "a")], "it was there before z"
    assert list(queue.waiting) == ["z"]


@pytest.mark.parametrize("many", [100, 400])
def test_calls_that_go_back_go_through_none_of_those_that_wait(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has died under so many that are bound to a class which has no other slot."""
    asked: list[int] = []
    looked: list[str] = []

    def bound(call: int) -> str:
        asked.append(call)
        return "f"

    queue: SlotQueue[int] = SlotQueue(bound)
    free = queue._free

    def look(each: RouteEntry) -> int:
        looked.append(each.instance)
        return free(each)

    instances = [f"i{number}" for number in range(16)]
    queue.on_route([entry(name, 1, "f") for name in instances], 0.0)
    for name in instances:
        queue.take(name)
    monkeypatch.setattr(queue, "_free", look)
    for call in range(many):
        queue.push_front(call)
        assert not queue.match(0.0)
    assert len(asked) == many, "each of itself alone"
    assert not looked, "all are known to be taken"
    queue.release("i7")
    assert [to.instance for _, to in queue.match(0.0)] == ["i7"]
    assert len(looked) <= 3 * len(instances)

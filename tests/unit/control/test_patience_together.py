"""How long a start waits beside others that wait as well, or that start."""

from sllm_runtime.protocol.states import INSTANCE, InstanceState, final
from tests.unit.control.world import FakeNode, World, deployed, manifest


def test_a_start_of_low_priority_is_not_put_off_for_ever_by_more_urgent_ones_that_wait_in_turn() -> None:
    """One node with one accelerator, calls of 10 s at most, three functions of which each has callers all the time."""
    made = World(FakeNode("n1", 4.0, 1))
    made.hear_all()
    node, timeout = made.nodes["n1"], 10
    for name, priority in [("low", 0), *((f"high{number}", 5) for number in range(4))]:
        made.view = deployed(made.view, manifest(name, gpu="L4", timeout=timeout, priority=priority))
    waits = {name: 0.0 for name, _ in made.view.versions}
    longest = dict(waits)
    began: dict[str, float] = {}
    for _ in range(int(300 / 0.5)):
        made.turn(0.5)
        for name, status in tuple(node.instances.items()):
            if status.state is InstanceState.STARTING:
                node.set(name, InstanceState.READY, running=1)
                began[name] = made.now
            elif not final(INSTANCE, status.state) and made.now - began[name] >= 5.0:  # the next call comes at once
                began[name] = made.now
                if status.state is InstanceState.DRAINING:
                    node.set(name, InstanceState.STOPPED, running=0)
        made.hear_all()
        for name in waits:
            there = bool(made.live((name, 1)))
            made.wait_for((name, 1), int(not there))
            waits[name] = 0.0 if there else waits[name] + 0.5
            longest[name] = max(longest[name], waits[name])
    assert longest["low"] <= 5 * timeout, "each of five in turn, and 10 s at most"


def test_a_start_that_needs_more_is_not_put_off_for_ever_by_smaller_ones_that_start() -> None:
    """One node with two accelerators; four functions that want one, whose starts take as long as their calls, and one
    that wants both."""
    made = World(FakeNode("n1", 8.0, 2))
    made.hear_all()
    node, timeout, starts_s, call_s = made.nodes["n1"], 10, 4.0, 6.0
    for name in ("s1", "s2", "s3", "s4"):
        made.view = deployed(made.view, manifest(name, gpu="L4", timeout=timeout))
    made.view = deployed(made.view, manifest("big", gpu="L4:2", timeout=timeout))
    began: dict[str, float] = {}
    waits, longest = dict.fromkeys(made.view.versions, 0.0), dict.fromkeys(made.view.versions, 0.0)
    for tick in range(int(400 / 0.5)):
        made.turn(0.5)
        for name, status in tuple(node.instances.items()):
            began.setdefault(name, made.now)
            if status.state is InstanceState.STARTING and made.now - began[name] >= starts_s:
                node.set(name, InstanceState.READY, running=1)
                began[name] = made.now
            elif status.running and made.now - began[name] >= call_s:  # the next one comes at once
                began[name] = made.now
                if status.state is InstanceState.DRAINING:
                    node.set(name, InstanceState.STOPPED, running=0)
        made.hear_all()
        for key in waits:
            there = bool(made.live(key))
            made.wait_for(key, int(not there and (key[0] != "s4" or tick > 8)))
            waits[key] = 0.0 if there else waits[key] + 0.5
            longest[key] = max(longest[key], waits[key])
    assert longest["big", 1] <= 10 * timeout


def test_a_start_that_needs_two_places_is_not_put_off_by_short_calls_that_do_not_coincide() -> None:
    """Two accelerators, each with an instance that is called again before it has been idle for long: at no plan are
    both at work, and at none may either be ended as idle."""
    made = World(FakeNode("n1", 8.0, 2))
    made.hear_all()
    node, names = made.nodes["n1"], []
    for function in ("s1", "s2"):
        made.view = deployed(made.view, manifest(function, gpu="L4", timeout=10))
        made.wait_for((function, 1), 1)
        made.plan()
        (name,) = made.live((function, 1))
        names.append(name)
        made.wait_for((function, 1), 0)
        made.finish(name, InstanceState.READY)
    made.view = deployed(made.view, manifest("big", gpu="L4:2"))
    made.wait_for(("big", 1), 1)
    for tick in range(int(60 / 0.2)):
        for number, name in enumerate(names):
            status = node.instances[name]
            if not final(INSTANCE, status.state):
                works = tick % 2 == number and status.state is InstanceState.READY
                served = status.served + bool(status.running)
                state = InstanceState.STOPPED if status.state is InstanceState.DRAINING else status.state
                node.set(name, state, running=int(works), idle_s=0.0, served=served)
        made.hear_all()
        made.turn(0.2)
        if made.live(("big", 1)):
            break
    assert made.live(("big", 1)), made.view.why(("big", 1))
    assert tick * 0.2 <= 20, "twice as long as a call may take"

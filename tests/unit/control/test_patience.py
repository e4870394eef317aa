"""Starts that have waited too long get a node for themselves."""

from __future__ import annotations

from dataclasses import replace

from sllm_runtime.control.patience import LINGER_S, put_off
from sllm_runtime.control.placement import Request
from sllm_runtime.control.view import PutOff
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.world import FakeNode, World, deployed, manifest


def world(*nodes: FakeNode) -> World:
    made = World(*nodes)
    made.hear_all()
    return made


def running(made: World, name: str, **fields: object) -> str:
    """Deploys a function and has one instance of it at work."""
    made.view = deployed(made.view, manifest(name, **fields))
    made.wait_for((name, 1), 1)
    made.plan()
    made.hear_all()
    (instance,) = made.live((name, 1))
    made.finish(instance, InstanceState.READY)
    node = made.nodes[made.view.instances[instance].record.node]
    node.set(instance, InstanceState.READY, running=1)
    made.hear(node.name)
    made.wait_for((name, 1), 0)
    return instance


def busy_cluster() -> World:
    """Two nodes with one accelerator each, both at work on calls that may take 20 s."""
    made = world(FakeNode("n1", 4.0, 1), FakeNode("n2", 4.0, 1))
    for name in ("a", "b"):
        running(made, name, gpu="L4", timeout=20)
    made.view = deployed(made.view, manifest("late", gpu="L4"))
    made.wait_for(("late", 1), 1)
    return made


def test_a_node_is_kept_for_what_has_waited_as_long_as_calls_may_last() -> None:
    made = busy_cluster()
    made.turn(19.0)
    assert not made.view.kept
    assert all(instance.stop is None for instance in made.view.instances.values())
    made.turn(2.0)
    ((node, key),) = made.view.kept.items()
    assert key == ("late", 1)
    (stopped,) = [each for each in made.view.instances.values() if each.stop is not None]
    assert stopped.record.node == node
    assert stopped.stop is not None
    assert stopped.stop.grace_s == 20, "its calls may end first"
    assert "late, which has waited for 20 s" in stopped.stop.reason

    made.wait_for((stopped.key[0], 1), 5)  # callers of what was ended there come back
    made.nodes[node].set(stopped.record.instance, InstanceState.STOPPED)
    made.hear(node)
    made.plan()
    assert made.live(("late", 1)), "nobody else gets the place"
    assert not made.view.kept
    assert not made.view.put_off.keys() & {("late", 1)}


def test_no_more_ends_than_what_it_takes_the_place_of() -> None:
    made = world(FakeNode("n1", 8.0, 4))
    names = [running(made, name, gpu="L4", timeout=20) for name in "abcd"]
    made.view = deployed(made.view, manifest("late", gpu="L4"))
    made.wait_for(("late", 1), 1)
    made.turn(21.0)
    assert made.view.kept == {"n1": ("late", 1)}
    assert sum(made.view.instances[name].stop is not None for name in names) == 1


def test_nothing_is_kept_for_what_waits_beside_room() -> None:
    made = busy_cluster()
    made.turn(1.0)
    late = made.view.versions[("late", 1)]
    asked = Request(("late", 1), late.manifest)
    waited = replace(made.view, put_off={("late", 1): PutOff(made.now - 30.0, made.now)})
    assert not put_off(waited, asked, made.now, room=True).kept
    assert put_off(waited, asked, made.now).kept


def test_of_two_that_wait_the_first_one_gets_the_place() -> None:
    """Whatever they are called; an instance that it gets puts it behind the other one."""
    made = busy_cluster()
    made.view = deployed(made.view, manifest("early", gpu="L4"))
    made.turn(1.0)
    made.wait_for(("early", 1), 1)
    made.wait_for(("late", 1), 2)
    made.turn(1.0)
    for number, waits in enumerate(("late", "early")):
        (other, *_) = [each for each in made.view.instances.values() if each.key[0] in "ab" and not each.ended]
        made.wait_for(other.key, 0)
        node = made.nodes[other.record.node]
        node.set(other.record.instance, InstanceState.LOST)
        made.hear(node.name)
        made.plan()
        assert [len(made.live((name, 1))) for name in ("late", "early")] == [1, number], waits


def test_more_urgent_starts_come_before_longer_waits() -> None:
    made = busy_cluster()
    made.view = deployed(made.view, manifest("urgent", gpu="L4", priority=1))
    made.turn(1.0)
    made.wait_for(("urgent", 1), 1)
    (other, *_) = made.view.instances.values()
    made.nodes[other.record.node].set(other.record.instance, InstanceState.LOST)
    made.hear(other.record.node)
    made.plan()
    assert made.live(("urgent", 1))
    assert not made.live(("late", 1))


def test_what_is_no_longer_wanted_has_nothing_kept_for_it() -> None:
    made = busy_cluster()
    made.turn(21.0)
    assert made.view.kept
    made.wait_for(("late", 1), 0)
    made.plan()
    assert made.view.kept, "it may be asked for again at once"
    made.turn(LINGER_S + 0.1)
    assert not made.view.kept
    assert not made.view.put_off


def test_who_asks_again_and_again_has_waited_all_the_while() -> None:
    """A gateway's question ends after some seconds, and it asks again: nobody asks in between."""
    made = busy_cluster()
    for _ in range(5):
        made.turn(4.0)
        made.wait_for(("late", 1), 0)
        made.plan()
        made.turn(0.1)
        made.wait_for(("late", 1), 1)
    made.turn(1.0)
    assert made.view.kept


def test_another_node_is_kept_where_the_first_one_cannot_take_it_any_more() -> None:
    made = busy_cluster()
    made.turn(21.0)
    (first,) = made.view.kept
    made.nodes[first].draining = True
    made.hear(first)
    made.turn(0.5)
    (second,) = made.view.kept
    assert second != first

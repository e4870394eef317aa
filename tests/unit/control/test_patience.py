"""Starts that have waited too long get a node for themselves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.control.instances import stop
from sllm_runtime.control.patience import LINGER_S, NODES, waited
from sllm_runtime.control.placement import Request
from sllm_runtime.control.turns import Turns
from sllm_runtime.control.view import CARRIES, Key, PutOff, View, Waited
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.examples import examples
from tests.unit.control.world import FakeNode, World, deployed, manifest


def world(*nodes: FakeNode) -> World:
    made = World(*nodes)
    made.hear_all()
    return made


def running(made: World, name: str, capabilities: tuple[str, ...] = (), /, **fields: object) -> str:
    """Deploys a function and has one instance of it at work."""
    made.view = deployed(made.view, manifest(name, **fields))
    made.wait_for((name, 1), 1)
    made.plan()
    made.hear_all()
    (instance,) = made.live((name, 1))
    node = made.nodes[made.view.instances[instance].record.node]
    node.set(instance, InstanceState.READY, capabilities=capabilities)
    made.hear(node.name)
    node.set(instance, InstanceState.READY, running=1)
    made.hear(node.name)
    made.wait_for((name, 1), 0)
    return instance


def busy_cluster(more: int = 0) -> World:
    """Two nodes with one accelerator each, both at work on calls that may take 20 s, and so many ``more`` without
    any."""
    made = world(*(FakeNode(f"n{number}", 4.0, int(number < 3)) for number in range(1, 3 + more)))
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


def test_each_of_several_that_have_waited_gets_a_node() -> None:
    """At the same time: the last one waits for no longer than the first."""
    made = world(*(FakeNode(f"n{number}", 4.0, 2) for number in range(3)))
    names = [running(made, name, gpu="L4", timeout=20) for name in "abcdef"]
    made.view = deployed(made.view, manifest("late", gpu="L4", max_instances=5))
    made.wait_for(("late", 1), 3)
    made.turn(10.0)
    made.wait_for(("late", 1), 4)
    made.turn(11.0)
    assert set(made.view.kept.values()) == {("late", 1)}
    assert sum(made.view.instances[name].stop is not None for name in names) == 3
    made.turn(10.0)
    stops = [made.view.instances[name].stop for name in names]
    assert [stop.grace_s for stop in stops if stop is not None] == [20.0] * 4, "the fourth in its time"
    made.turn(30.0)
    assert [made.view.instances[name].stop for name in names] == stops, "no more than it lacks"


def full(nodes: int, gpus: int = 1, **fields: object) -> tuple[World, list[str]]:
    """So many nodes, each at work on one call that may take 20 s and has all of its accelerators. ``late`` wants one
    accelerator."""
    made = world(*(FakeNode(f"n{number}", 8.0, gpus) for number in range(nodes)))
    names = [running(made, f"f{number}", gpu=f"L4:{gpus}", timeout=20) for number in range(nodes)]
    made.view = deployed(made.view, manifest("late", gpu="L4", max_instances=20, **fields))
    return made, names


def stopped(made: World, names: list[str]) -> int:
    return sum(made.view.instances[name].stop is not None for name in names)


def test_a_plan_looks_for_one_place_to_keep_and_the_next_one_follows() -> None:
    """However many are due at once: to look for a place takes long, and nobody is answered meanwhile."""
    made, names = full(6)
    made.wait_for(("late", 1), 3)
    made.turn(19.0)
    made.now += 2.0
    made.hear_all()
    for number in (1, 2, 3):
        made.plan()
        assert (len(made.view.kept), stopped(made, names)) == (number, number)
        assert made.more is (number < 3)


@pytest.mark.parametrize(("nodes", "turns_taken"), [(2, 1), (2 * NODES, 3)])
def test_what_is_looked_for_to_be_kept_is_a_turn_of_its_version(nodes: int, turns_taken: int) -> None:
    """On many nodes it takes as long as several."""
    made = busy_cluster(nodes - 2)
    made.turn(1.0)
    late, since = made.view.versions[("late", 1)], made.now - 30.0
    view = replace(made.view, put_off={("late", 1): PutOff(since, made.now, waits=(Waited(since, made.now),))})
    turns: Turns[Key] = Turns(View(), frozenset(), most=turns_taken + 1, first=0)
    assert waited(view, Request(("late", 1), late.manifest), 1, made.now, turns).kept
    assert turns.places(("other", 1)) == 1


def test_no_version_has_more_than_half_of_the_nodes_kept_at_once() -> None:
    """Others have the rest meanwhile. Where one of them has given its place the next one is kept."""
    made, names = full(5)
    made.wait_for(("late", 1), 5)
    made.turn(21.0)
    assert (len(made.view.kept), stopped(made, names)) == (3, 3)
    assert not made.more
    first = next(name for name in names if made.view.instances[name].stop is not None)
    made.finish(first, InstanceState.STOPPED)
    made.wait_for(("late", 1), 5)
    made.turn(0.5)
    assert len(made.live(("late", 1))) == 1
    assert (len(made.view.kept), stopped(made, [name for name in names if name != first])) == (3, 3)


def test_nodes_that_do_not_live_are_none_of_which_half_are_kept() -> None:
    made = world(*(FakeNode(f"n{number}", 4.0, 1) for number in range(1, 5)))
    for node in ("n3", "n4"):
        made.nodes[node].alive = False
    made.turn(6.0)
    for name in ("a", "b"):
        running(made, name, gpu="L4", timeout=20)
    made.view = deployed(made.view, manifest("late", gpu="L4", max_instances=4))
    made.wait_for(("late", 1), 4)
    made.turn(24.0)
    assert len(made.view.kept) == 1


def test_of_an_even_number_of_nodes_half_are_kept() -> None:
    made, names = full(4)
    made.wait_for(("late", 1), 4)
    made.turn(21.0)
    assert (len(made.view.kept), stopped(made, names)) == (2, 2)


def test_one_large_instance_makes_room_for_several_and_no_node_is_chosen_for_what_it_cannot_give() -> None:
    made, names = full(3, gpus=4)
    made.wait_for(("late", 1), 4)
    made.turn(21.0)
    assert (len(made.view.kept), stopped(made, names)) == (1, 1), "it has places for all four"
    made.wait_for(("late", 1), 5)
    made.turn(21.0)
    assert (len(made.view.kept), stopped(made, names)) == (2, 2), "the fifth has its own"


def test_what_is_more_urgent_ends_last() -> None:
    made = world(FakeNode("n1", 4.0, 1), FakeNode("n2", 4.0, 1))
    names = [running(made, name, gpu="L4", timeout=20, priority=priority) for name, priority in (("a", 1), ("b", 0))]
    node = {name: made.view.instances[name].record.node for name in names}
    made.nodes[node[names[1]]].set(names[1], InstanceState.READY, running=5)
    made.view = deployed(made.view, manifest("late", gpu="L4"))
    made.wait_for(("late", 1), 1)
    made.turn(21.0)
    assert [*made.view.kept] == [node[names[1]]], "though it has more calls"


def test_of_those_on_one_node_the_more_urgent_stays() -> None:
    made = world(FakeNode("n1", 4.0, 2))
    names = [running(made, name, gpu="L4", timeout=20, priority=priority) for name, priority in (("a", 1), ("b", 0))]
    made.nodes["n1"].set(names[1], InstanceState.READY, running=5)
    made.view = deployed(made.view, manifest("late", gpu="L4"))
    made.wait_for(("late", 1), 1)
    made.turn(21.0)
    assert [name for name in names if made.view.instances[name].stop is not None] == names[1:], "with more calls"


def test_where_one_ends_in_any_case_no_other_is_ended() -> None:
    made = world(FakeNode("n1", 4.0, 1), FakeNode("n2", 4.0, 1))
    leaving, other = (running(made, name, gpu="L4", timeout=20) for name in "ab")
    node = made.view.instances[leaving].record.node
    made.nodes[node].set(leaving, InstanceState.READY, running=5)
    made.hear(node)
    made.view = stop(made.view, made.view.instances[leaving], "it is to end", 300.0)
    made.view = deployed(made.view, manifest("late", gpu="L4"))
    made.wait_for(("late", 1), 1)
    made.turn(21.0)
    assert made.view.kept == {node: ("late", 1)}, "however many calls that has"
    assert made.view.instances[other].stop is None


@pytest.mark.parametrize("carries", [True, False])
def test_a_call_that_outlives_the_grace_goes_on_elsewhere_if_it_can(carries: bool) -> None:
    made = world(FakeNode("n1", 4.0, 1))
    name = running(made, "a", (CARRIES,), gpu="L4", timeout=20, engine=True, model="/a", resumable=carries)
    made.view = deployed(made.view, manifest("late", gpu="L4"))
    made.wait_for(("late", 1), 1)
    made.turn(21.0)
    end = made.view.instances[name].stop
    assert end is not None
    assert end.resume is carries


def test_nothing_ends_where_another_node_has_room() -> None:
    """Some policies wait all the same, for the weights."""
    made = world(FakeNode("n1", 4.0, 1), FakeNode("n2", 4.0, 2))
    names = [running(made, name, gpu="L4", timeout=20) for name in "abc"]
    ended = next(name for name in names if made.view.instances[name].record.node == "n2")
    made.finish(ended, InstanceState.STOPPED)
    made.view = deployed(made.view, manifest("late", gpu="L4"))
    made.now += 30.0
    since, late = made.now - 30.0, made.view.versions[("late", 1)].manifest
    made.hear_all()
    view = replace(made.view, put_off={("late", 1): PutOff(since, made.now, waits=(Waited(since, made.now),))})
    view = waited(view, Request(("late", 1), late), 1, made.now, Turns(View(), frozenset()))
    assert view.kept == {"n2": ("late", 1)}
    assert view.instances is made.view.instances


def test_no_more_is_kept_than_is_waited_for() -> None:
    """Who has given up leaves the nodes of which most is left."""
    made, names = full(6)
    for name in names:
        node = made.view.instances[name].record.node
        made.nodes[node].set(name, InstanceState.READY, running=6 - int(node[1:]))
    made.wait_for(("late", 1), 3)
    made.turn(21.0)
    assert {*made.view.kept} == {"n3", "n4", "n5"}
    made.wait_for(("late", 1), 1)
    made.turn(0.5)
    assert len(made.view.kept) == 3, "who asks may ask again at once"
    made.turn(LINGER_S + 0.5)
    assert {*made.view.kept} == {"n5"}


def test_whoever_gets_one_and_wants_more_goes_on_waiting_for_that() -> None:
    made = world(FakeNode("n1", 4.0, 2), FakeNode("n2", 4.0, 2))
    names = [running(made, name, gpu="L4", timeout=20) for name in "abcd"]
    made.view = deployed(made.view, manifest("late", gpu="L4", max_instances=2))
    made.wait_for(("late", 1), 2)
    made.turn(15.0)
    made.nodes["n2"].set(next(n for n in names if made.view.instances[n].record.node == "n2"), InstanceState.LOST)
    made.turn(0.5)
    assert len(made.live(("late", 1))) == 1
    assert not made.view.kept
    made.turn(5.0)
    assert list(made.view.kept.values()) == [("late", 1)], "it has waited for 20 s as well"


def test_nothing_of_its_own_ends_for_one_more() -> None:
    made = world(FakeNode("n1", 4.0, 1), FakeNode("n2", 4.0, 1))
    running(made, "late", gpu="L4", timeout=20, max_instances=2)
    other = running(made, "other", gpu="L4", timeout=20)
    made.nodes[made.view.instances[other].record.node].set(other, InstanceState.READY, running=3)
    made.wait_for(("late", 1), 1)
    made.turn(21.0)
    assert [name for name, each in made.view.instances.items() if each.stop] == [other], "however few calls it has"


class Crowd:
    """A cluster that is full of calls, each of which is followed by another one; ``late`` wants instances as well."""

    def __init__(self, gpus: list[int], timeouts: list[int], seed: int) -> None:
        self.world = world(*(FakeNode(f"n{number}", 64.0, count) for number, count in enumerate(gpus)))
        self.rng, self.until = random.Random(seed), dict[str, float]()
        for number in range(sum(gpus)):
            fields = {"gpu": "L4", "timeout": timeouts[number % len(timeouts)], "priority": self.rng.randint(-1, 1)}
            running(self.world, f"f{number}", **fields)
            self.world.wait_for((f"f{number}", 1), 1)

    def step(self) -> None:
        """Half a second: calls end, the next ones begin, starts succeed."""
        for node in self.world.nodes.values():
            for name, status in tuple(node.instances.items()):
                timeout = self.world.view.versions[status.function, status.version].manifest.timeout
                if status.state is InstanceState.STARTING:
                    node.set(name, InstanceState.READY, running=1)
                elif status.state not in (InstanceState.READY, InstanceState.DRAINING):
                    continue
                if self.world.now < self.until.setdefault(name, self.world.now + self.rng.uniform(0.5, timeout)):
                    continue
                if status.state is InstanceState.DRAINING:
                    node.set(name, InstanceState.STOPPED, running=0)
                self.until[name] = self.world.now + self.rng.uniform(0.5, timeout)
        self.world.turn(0.5)


@settings(max_examples=examples(60), deadline=None)
@given(
    gpus=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    timeouts=st.lists(st.sampled_from([5, 8, 20]), min_size=1, max_size=4),
    each=st.integers(1, 2),
    wanted=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    later=st.sampled_from([0.5, 4.0]),
    seed=st.integers(0, 2**16),
)
def test_no_start_waits_for_longer_than_twice_the_longest_call_that_runs(
    gpus: list[int], timeouts: list[int], each: int, wanted: tuple[int, int], later: float, seed: int
) -> None:
    """As many of a version as half of the nodes have places for, and whatever comes back in the place of what was ended
    for them. Those beyond are served as well, once one of these nodes has given its places."""
    places = sorted(count // each for count in gpus if count >= each)
    most, within = sum(places), sum(places[: (len(places) + 1) // 2])
    crowd, began, ready = Crowd(gpus, timeouts, seed), list[float](), set[str]()
    made, longest = crowd.world, max(timeouts[: sum(gpus)])
    made.view = deployed(made.view, manifest("late", gpu=f"L4:{each}", max_instances=8, timeout=min(timeouts)))

    def starts() -> list[float]:
        return [at for at, name in made.started if name.startswith("late")]

    for count, waits_s in ((wanted[0], later), (sum(wanted), 8.0 * longest + 10.0)):
        began += [made.now] * (min(count, most) - len(began))
        until = made.now + waits_s
        while made.now < until and len(starts()) < min(sum(wanted), most):
            ready |= {instance.record.instance for instance in made.view.of(("late", 1)) if instance.ready}
            made.wait_for(("late", 1), len(began) - len(ready))
            crowd.step()
    assert len(starts()) == len(began)
    waited_s = [start - since for start, since in zip(starts(), began, strict=True)]
    assert all(each <= 2 * longest + 2.0 for each in waited_s[:within])


def test_nothing_is_kept_for_what_waits_beside_room() -> None:
    made = busy_cluster()
    made.turn(1.0)
    late = made.view.versions[("late", 1)]
    asked = Request(("late", 1), late.manifest)
    since = made.now - 30.0
    long = PutOff(since, made.now, waits=(Waited(since, made.now),))
    view = replace(made.view, put_off={("late", 1): long})
    assert not waited(view, asked, 0, made.now, Turns(View(), frozenset())).kept
    assert waited(view, asked, 1, made.now, Turns(View(), frozenset())).kept


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

"""What of a report, and of a view, counts as a change."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.control import draining, registry
from sllm_runtime.control.changes import touched, writes
from sllm_runtime.control.events import events
from sllm_runtime.control.loop import refused
from sllm_runtime.control.reports import news, observe, pressing, still
from sllm_runtime.control.traced import changed
from sllm_runtime.control.view import Refusal, View
from sllm_runtime.protocol.errors import NoCapacity
from sllm_runtime.protocol.node import InstanceStatus
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.scheduling.cluster import NOW, cluster, node
from tests.unit.control.world import FakeNode, World, deployed, manifest

IDLE = InstanceStatus(instance="i", function="f", version=1, state=InstanceState.READY, idle_s=1.0)


def test_a_node_that_is_only_still_there_is_no_news() -> None:
    before = node("a", instances=(IDLE,))
    later = msgspec.structs.replace(IDLE, idle_s=2.0)
    assert not news(before, msgspec.structs.replace(before, sequence=2, instances=(later,)))


def test_whatever_else_it_says_is_news() -> None:
    before = node("a", instances=(IDLE,))
    for said in (msgspec.structs.replace(IDLE, running=1), msgspec.structs.replace(IDLE, state=InstanceState.DRAINING)):
        assert news(before, msgspec.structs.replace(before, instances=(said,)))
    others = {"boot": "b", "free_cpu": 1.0, "pool_idle": 0, "draining": True, "instances": ()}
    for name, value in others.items():
        assert news(before, msgspec.structs.replace(before, **{name: value}))


def with_an_instance() -> tuple[World, str]:
    """A node that has just been told to start an instance, and that one's name."""
    world = World(FakeNode("n1", cpu=8.0, gpus=1))
    world.view = deployed(world.view, manifest("chat"))
    world.hear("n1")
    world.wait_for(("chat", 1), 1)
    world.plan()
    (name,) = world.live(("chat", 1))
    return world, name


def test_a_report_that_says_nothing_new_changes_when_its_node_was_heard_and_no_more() -> None:
    world, name = with_an_instance()
    world.nodes["n1"].set(name, InstanceState.READY)
    world.hear("n1")
    before = world.view
    world.nodes["n1"].set(name, InstanceState.READY, idle_s=3.0)
    after = still(before, world.nodes["n1"].report(), world.now + 1.0)
    assert after is not None
    assert after.nodes["n1"].heard == world.now + 1.0
    assert after.instances[name].idle_s(world.now + 2.0) == 4.0
    assert not list(writes(before, after, {}, {}))
    assert not events(before, after, 0.0)
    assert not touched(before, after) - {"chat"}


def test_what_a_release_took_is_told_beside_what_was_expected() -> None:
    gone = msgspec.structs.replace(IDLE, state=InstanceState.STOPPED)
    before = cluster(node("a", instances=(gone,)))
    before = replace(before, learned=before.learned.released(("f", 1), 0.5))
    said = node("a", sequence=2, instances=(msgspec.structs.replace(gone, release_s=2.0),))
    after = observe(before, said, NOW, 0.0)
    (event,) = events(before, after, 0.0)
    assert (event.kind, event.instance, event.node) == ("instance.released", "i", "a")
    assert event.fields == {"expected_s": "0.500000", "took_s": "2.000000"}


def test_what_a_start_took_is_told_beside_what_was_expected_of_it_term_by_term() -> None:
    world, name = with_an_instance()
    guess = world.view.instances[name].predicted
    assert guess is not None
    world.nodes["n1"].set(name, InstanceState.READY)
    before = world.view
    world.hear("n1")
    (event,) = (each for each in events(before, world.view, 0.0) if each.kind == "instance.ready")
    assert float(event.fields["expected_s"]) == pytest.approx(guess.seconds)
    said = dict(each.split("=") for each in event.fields["terms_s"].split(","))
    terms = {name: float(seconds) for name, seconds in said.items()}
    assert terms["sandbox"] == pytest.approx(guess.sandbox)
    waits = max(terms.pop("sandbox") + terms.pop("import"), terms.pop("queue") + terms.pop("read"))
    assert waits + sum(terms.values()) == pytest.approx(guess.seconds), "these are all"


@pytest.mark.parametrize(
    ("cordoned", "drain", "kind"),
    [(True, False, "node.cordoned"), (False, True, "node.draining"), (False, False, "node.uncordoned")],
)
def test_what_is_decided_about_a_node_is_an_event(cordoned: bool, drain: bool, kind: str) -> None:
    before = cluster(node("a"))
    if kind == "node.uncordoned":
        before = draining.cordon(before, "a", cordoned=True, drain=False)
    after = draining.cordon(before, "a", cordoned=cordoned, drain=drain)
    assert [(each.kind, each.node) for each in events(before, after, 0.0)] == [(kind, "a")]
    assert not events(after, draining.cordon(after, "a", cordoned=cordoned, drain=drain), 0.0)


def test_what_is_made_is_told_before_what_it_has_and_what_goes_after_it() -> None:
    empty, made = View(), deployed(View(), manifest("chat"))
    assert [each.kind for each in events(empty, made, 0.0)] == ["function.created", "version.active"]
    second = deployed(made, manifest("chat"), 2)
    gone = events(second, registry.remove(second, "chat"), 0.0)
    assert sorted((each.kind, each.version) for each in gone[:2]) == [("version.deleted", 1), ("version.deleted", 2)]
    assert [each.kind for each in gone[2:]] == ["function.deleted"]


def test_why_a_start_was_given_up_that_its_node_refused_is_told() -> None:
    world = World(FakeNode("n1", cpu=8.0, gpus=1))
    world.view = deployed(world.view, manifest("chat"))
    world.hear("n1")
    world.wait_for(("chat", 1), 1)
    (action, *_) = world.plan(deliver=False)
    after = refused(world.view, action, NoCapacity("n1 is full"), world.now)
    (event,) = events(world.view, after, 0.0)
    assert (event.kind, event.message) == ("instance.stopped", "n1 is full")


def test_a_report_that_something_may_follow_from_is_looked_at_whole() -> None:
    world = World(FakeNode("n1", cpu=8.0, gpus=1))
    first = world.nodes["n1"].report()
    assert still(world.view, first, world.now) is None, "a node that was not known"
    world.hear("n1")
    stale, fresh = msgspec.structs.replace(first, sequence=1), world.nodes["n1"].report()
    assert still(world.view, stale, world.now) is None, "an old one"
    assert still(world.view, msgspec.structs.replace(fresh, boot="another"), world.now) is None
    assert still(world.view, fresh, world.now) is not None
    assert still(replace(world.view, suspects={"i": 1}), fresh, world.now) is None, "it may clear a suspicion"


def test_calls_that_follow_each_other_are_no_news_but_are_learned_from() -> None:
    """As many run as before: nothing is to be decided."""
    world, name = with_an_instance()
    node = world.nodes["n1"]
    node.set(name, InstanceState.READY, running=1, served=1, worked_s=2.0)
    world.hear("n1")
    before = node.report()
    node.set(name, InstanceState.READY, running=1, served=3, worked_s=3.0)
    after = node.report()
    assert not news(before, after)
    assert still(world.view, after, world.now) is None
    world.now += 1.0
    view = observe(world.view, after, world.now, 0.0)
    assert view.learned.calls["chat", 1].seconds == (2.0, 0.5)
    assert view.instances[name].turn_since == world.now
    assert view.instances[name].busy_since == world.now - 1.0


def test_an_instance_that_a_node_had_and_does_not_name_is_looked_at_whole() -> None:
    world, name = with_an_instance()
    known = world.view.instances[name]
    world.hear("n1")
    status = world.nodes["n1"].report()
    quiet = replace(known, seen=None)
    node_ = world.view.nodes["n1"]
    assert node_.status is not None
    silent = replace(node_, status=msgspec.structs.replace(node_.status, instances=()))
    before = world.view.put_node(silent).put_instance(quiet)
    assert still(before, msgspec.structs.replace(status, instances=()), world.now) is not None, (
        "it has just been placed"
    )
    for gone in (replace(known, seen=IDLE), replace(known, seen=None, adopted=True)):
        view = before.put_instance(gone)
        assert still(view, msgspec.structs.replace(status, instances=()), world.now) is None


small = st.dictionaries(st.integers(0, 5), st.integers(1000, 1003))


@given(old=small, new=small, again=st.booleans())
def test_changed_keys_are_those_of_other_values(old: dict[int, int], new: dict[int, int], again: bool) -> None:
    objects = {number: str(number) for number in range(1000, 1004)}
    before = {key: objects[value] for key, value in old.items()}
    after = {**before, **{key: objects[value] for key, value in new.items() if not again or key in old}}
    if not again:
        after = {key: value for key, value in after.items() if key in new}
    plain = {key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)}
    found = list(changed(before, after))
    assert set(found) == plain
    assert len(found) == len(plain)


def test_calls_that_begin_and_end_press_only_while_somebody_waits() -> None:
    before = node("a", instances=(IDLE,))
    works = msgspec.structs.replace(before, instances=(msgspec.structs.replace(IDLE, running=1),))
    ended = msgspec.structs.replace(before, instances=(msgspec.structs.replace(IDLE, state=InstanceState.STOPPED),))
    assert not pressing(View(), before, works)
    assert pressing(View(), before, ended)
    assert pressing(View().put_waiting(("f", 1), "gw", 1), before, works)


def test_why_a_start_was_given_up_is_what_its_node_said_of_it_though_one_had_failed_there() -> None:
    world = World(FakeNode("n1", cpu=8.0, gpus=1))
    world.view = deployed(world.view, manifest("chat"))
    world.hear("n1")
    world.wait_for(("chat", 1), 1)
    (action, *_) = world.plan(deliver=False)
    before = Refusal(world.now + 60.0, "a start failed there: no module named nope", yields=world.now)
    view = replace(world.view, refused={(("chat", 1), "n1"): before})
    after = refused(view, action, NoCapacity("n1 is full"), world.now)
    (event,) = events(view, after, 0.0)
    assert (event.kind, event.message) == ("instance.stopped", "n1 is full")
    later = refused(view, action, NoCapacity("n1 is full"), world.now).refused[("chat", 1), "n1"]
    assert later.reason == before.reason, "that others come first is for what failed there"

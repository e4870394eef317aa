"""Which node each policy takes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from sllm_runtime.control import instances
from sllm_runtime.control.daemon import ControllerSettings
from sllm_runtime.control.placement import Evict, Place, Policy, Refuse, Wait
from sllm_runtime.control.reports import observe
from sllm_runtime.control.scheduling.policies import POLICIES, Availability, Locality, StartupTime
from sllm_runtime.control.view import View
from sllm_runtime.protocol.manifest import Parallelism
from sllm_runtime.protocol.node import InstanceStatus, PathLoad
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.scheduling.cluster import GB, NOW, cluster, function, idle, model, node, place, queued
from tests.unit.control.world import GIB

M = model("m", 2 * GB)


def test_the_nearest_tier_wins_while_nothing_waits_on_it() -> None:
    view = cluster(node("far"), node("ssd", models=(M.digest,)), node("dram", resident=(M.digest,)), models=(M,))
    view, _ = function(view, "chat", M)
    decision = place(StartupTime(), view, "chat")
    assert isinstance(decision, Place)
    assert decision.node == "dram"
    assert decision.estimate is not None
    assert (decision.estimate.tier, decision.estimate.read) == ("dram", 0.0)


def test_a_long_queue_on_the_disk_sends_it_elsewhere() -> None:
    near = node("near", models=(M.digest,))
    for waiting, winner in ((10 * GB, "near"), (30 * GB, "far")):  # 12 s and 32 s against 20 s from the object store
        view, _ = function(cluster(queued(near, "disk", waiting), node("far"), models=(M,)), "chat", M)
        decision = place(StartupTime(), view, "chat")
        assert isinstance(decision, Place)
        assert decision.node == winner


def test_what_starts_have_yet_to_ask_for_counts_as_queued() -> None:
    near = node("near", models=(M.digest,), coming=30 * GB)
    view, _ = function(cluster(near, node("far"), models=(M,)), "chat", M)
    decision = place(StartupTime(), view, "chat")
    assert isinstance(decision, Place)
    assert decision.node == "far"


def test_partitions_that_come_by_one_path_count_together_and_on_links_each_for_itself() -> None:
    parted = msgspec.structs.replace(model("parted", 8 * GB), partitions=(5 * GB, 3 * GB))
    link = PathLoad(path="link cuda:0", bandwidth=1e8, queued=0)
    near = node("near", gpus=2, models=(parted.digest, M.digest))
    view, _ = function(cluster(near, models=(parted, M)), "parted", parted)
    view, _ = function(view, "chat", M)
    first = place(StartupTime(), view, "parted")
    assert isinstance(first, Place)
    assert first.estimate is not None
    assert first.estimate.read == pytest.approx(8.0)
    record = idle(view, "parted", "near").instances["parted-on-near-0"]
    sent = replace(record, record=msgspec.structs.replace(record.record, state="PENDING"), seen=None, ready_at=None)
    behind = place(StartupTime(), view.put_instance(sent), "chat")
    assert isinstance(behind, Place)
    assert behind.estimate is not None
    assert behind.estimate.coming == pytest.approx(8.0)
    slow = msgspec.structs.replace(near, paths=(*near.paths, link))
    view, _ = function(cluster(slow, models=(parted,)), "parted", parted)
    linked = place(StartupTime(), view, "parted")
    assert isinstance(linked, Place)
    assert linked.estimate is not None
    assert linked.estimate.read == pytest.approx(50.0)


def test_what_was_sent_for_since_the_report_counts_as_queued() -> None:
    other = model("other", 5 * GB)
    nodes = [node(name, gpus=4, models=(M.digest, other.digest)) for name in ("a", "b")]
    view, _ = function(cluster(*nodes, models=(M, other)), "first", other)
    view, _ = function(view, "chat", M)
    first = place(StartupTime(), view, "first")
    assert isinstance(first, Place)
    started = idle(view, "first", first.node).instances[f"first-on-{first.node}-0"]
    record = msgspec.structs.replace(started.record, state="PENDING")
    view = view.put_instance(replace(started, record=record, seen=None, ready_at=None))
    second = place(StartupTime(), view, "chat")
    assert isinstance(second, Place)
    assert second.node != first.node
    assert second.estimate is not None
    assert second.estimate.coming == 0.0


@pytest.mark.parametrize("processes", [1, 2])
def test_what_was_sent_for_since_the_report_takes_the_sandbox_that_waits(processes: int) -> None:
    """``large`` has so much memory that it would be taken again were its sandbox still counted."""
    many = Parallelism(tensor=processes)
    large = node("large", gpus=2, memory=256 * GIB, free_memory=256 * GIB, pool_idle=processes)
    view, _ = function(cluster(large, node("small", gpus=2)), "first", parallelism=many)
    view, _ = function(view, "chat")
    first = place(StartupTime(), view, "first")
    assert isinstance(first, Place)
    assert (first.node, first.estimate is not None and first.estimate.warm) == ("large", True)
    there = idle(view, "first", "large").instances["first-on-large-0"]
    sent = msgspec.structs.replace(there.record, state="PENDING")
    view = view.put_instance(replace(there, record=sent, seen=None, ready_at=None))
    second = place(StartupTime(), view, "chat")
    assert isinstance(second, Place)
    assert second.node == "small", "on the other one nothing waits for it"
    seen = InstanceStatus(instance=sent.instance, function="first", version=1, state=InstanceState.STARTING)
    took = msgspec.structs.replace(large, pool_idle=1, sequence=2, instances=(seen,))
    third = place(StartupTime(), observe(view, took, NOW, 0.0), "chat")
    assert isinstance(third, Place)
    assert third.node == "large", "its report knows that start: what waits now is another one"


def test_an_idle_instance_ends_for_a_much_quicker_start() -> None:
    """20 s from the object store, or 2 s from the disk of a node whose accelerator an idle function holds."""
    view, _ = function(cluster(node("full", models=(M.digest,)), node("free"), models=(M,)), "chat", M)
    view = idle(function(view, "other")[0], "other", "full")
    assert isinstance(decision := place(StartupTime(), view, "chat"), Evict)
    assert decision.instances == ("other-on-full-0",)
    assert isinstance(decision := place(Availability(), view, "chat"), Place)
    assert decision.node == "free"


@pytest.mark.parametrize(
    ("served", "idle_s", "ends"), [(0, 0.9, False), (0, 1.0, True), (1, 0.2, False), (1, 0.25, True)]
)
def test_one_that_has_served_a_call_makes_room_sooner(served: int, idle_s: float, ends: bool) -> None:
    """The call that it was started for is not on its way any more."""
    view, _ = function(cluster(node("full", models=(M.digest,)), models=(M,)), "chat", M)
    view = idle(function(view, "other")[0], "other", "full", idle_s=idle_s)
    there = view.instances["other-on-full-0"]
    assert there.seen is not None
    view = view.put_instance(replace(there, seen=msgspec.structs.replace(there.seen, served=served)))
    for policy in (StartupTime(), Availability()):
        assert isinstance(place(policy, view, "chat"), Evict) is ends


def test_ending_it_costs_its_own_next_start_as_well() -> None:
    """What is idle would itself have to come from the object store again, for longer than is won."""
    slow = model("slow", 4 * GB)
    view, _ = function(cluster(node("full", models=(M.digest,)), node("free"), models=(M, slow)), "chat", M)
    view = idle(function(view, "other", slow)[0], "other", "full")
    assert isinstance(decision := place(StartupTime(), view, "chat"), Place)
    assert decision.node == "free"


def test_what_takes_long_to_give_back_what_it_holds_is_not_ended_for_less() -> None:
    view, _ = function(cluster(node("full", models=(M.digest,)), node("free"), models=(M,)), "chat", M)
    view = idle(function(view, "other")[0], "other", "full")
    assert isinstance(place(StartupTime(), view, "chat"), Evict)
    slow = replace(view, learned=view.learned.released(("other", 1), 30.0))
    assert isinstance(decision := place(StartupTime(), slow, "chat"), Place)
    assert decision.node == "free"


def test_it_waits_for_what_was_ended_for_it() -> None:
    view, _ = function(cluster(node("full", models=(M.digest,)), node("free"), models=(M,)), "chat", M)
    view = idle(function(view, "other")[0], "other", "full")
    ending = view.instances["other-on-full-0"]
    view = instances.stop(view, ending, "makes room", 1.0)
    assert isinstance(place(StartupTime(), view, "chat"), Wait)
    busy = view.instances["other-on-full-0"]
    assert busy.seen is not None
    view = view.put_instance(replace(busy, seen=msgspec.structs.replace(busy.seen, running=1)))
    assert isinstance(place(StartupTime(), view, "chat"), Place), "its call may take for ever"


def test_preferred_accelerators_come_before_time() -> None:
    view = cluster(node("slow"), node("near", kind="T4", models=(M.digest,)), models=(M,))
    view, _ = function(view, "chat", M)
    view = view.put_version(
        msgspec.structs.replace(
            view.versions[("chat", 1)],
            manifest=view.versions[("chat", 1)].manifest.model_copy(update={"gpu": ("L4", "T4")}),
        )
    )
    assert isinstance(decision := place(StartupTime(), view, "chat"), Place)
    assert decision.node == "slow"


@pytest.mark.parametrize(("kinds", "ends"), [(("L4", "T4"), False), (("T4", "L4"), True)])
def test_nothing_is_ended_for_less_wanted_accelerators_than_are_free(kinds: tuple[str, str], ends: bool) -> None:
    """However much sooner it would start there."""
    view = cluster(node("far"), node("near", kind="T4", models=(M.digest,)), models=(M,))
    view, _ = function(view, "chat", M)
    version = view.versions["chat", 1]
    view = view.put_version(
        msgspec.structs.replace(version, manifest=version.manifest.model_copy(update={"gpu": kinds}))
    )
    view = idle(function(view, "old")[0], "old", "near")
    decision = place(StartupTime(), view, "chat")
    assert isinstance(decision, Evict if ends else Place)


def test_locality_waits_where_the_weights_are() -> None:
    view, _ = function(cluster(node("full", models=(M.digest,)), node("free"), models=(M,)), "chat", M)
    view, _ = function(view, "other")
    view = idle(view, "other", "full", running=1)
    assert isinstance(place(Locality(), view, "chat"), Wait)
    assert isinstance(place(StartupTime(), view, "chat"), Place)


def test_locality_takes_another_node_where_those_with_the_weights_could_never_run_it() -> None:
    """It starts there, or what is idle ends there for it. Where one of them could it waits."""
    view, _ = function(cluster(node("bare", gpus=0, models=(M.digest,)), node("far"), models=(M,)), "chat", M)
    decision = place(Locality(), view, "chat")
    assert isinstance(decision, Place)
    assert decision.node == "far"
    full = idle(function(view, "old")[0], "old", "far")
    ends = place(Locality(), full, "chat")
    assert isinstance(ends, Evict)
    assert ends.instances == ("old-on-far-0",)
    near = observe(view, node("near", models=(M.digest,)), NOW, 0.0)
    waits = place(Locality(), idle(function(near, "works")[0], "works", "near", running=1), "chat")
    assert isinstance(waits, Wait)
    assert "1 x L4 (has none) on near" in str(waits.reason)


def test_every_policy_can_be_chosen() -> None:
    for name, policy in POLICIES.items():
        assert type(ControllerSettings.load({"SLLM_POLICY": name}).chosen_policy()) is policy


@pytest.mark.parametrize("name", sorted(POLICIES))
class TestEveryPolicy:
    @pytest.fixture
    def policy(self, name: str) -> Policy:
        return POLICIES[name]()

    def test_takes_only_what_is_free(self, policy: Policy) -> None:
        view, _ = function(cluster(node("full"), node("free")), "chat")
        view = idle(function(view, "other")[0], "other", "full", running=1)
        assert isinstance(decision := place(policy, view, "chat"), Place)
        assert (decision.node, decision.gpus) == ("free", (0,))

    def test_ends_the_idle_where_nothing_is_free(self, policy: Policy) -> None:
        view, _ = function(cluster(node("a")), "chat")
        view = idle(function(view, "other")[0], "other", "a")
        assert isinstance(decision := place(policy, view, "chat"), Evict)
        assert decision.instances == ("other-on-a-0",)

    def test_waits_where_all_work(self, policy: Policy) -> None:
        view, _ = function(cluster(node("a")), "chat")
        view = idle(function(view, "other")[0], "other", "a", running=1)
        assert isinstance(decision := place(policy, view, "chat"), Wait)
        assert "1 x L4" in str(decision.reason)

    def test_refuses_what_never_fits(self, policy: Policy) -> None:
        view, _ = function(cluster(node("a", gpus=0)), "chat")
        assert isinstance(place(policy, view, "chat"), Refuse)

    def test_leaves_silent_draining_and_cordoned_nodes_alone(self, policy: Policy) -> None:
        view, _ = function(cluster(node("a"), node("b", draining=True)), "chat")
        known = view.nodes["a"]
        view = view.put_node(replace(known, record=msgspec.structs.replace(known.record, cordoned=True)))
        assert isinstance(place(policy, view, "chat"), Wait)
        view = view.put_node(replace(known, heard=NOW - 100.0))
        assert isinstance(place(policy, view, "chat"), Wait)

    def test_answers_the_same_from_the_same_view(self, policy: Policy, name: str) -> None:
        view, _ = function(cluster(*(node(f"n{k}") for k in range(5))), "chat")
        assert place(policy, view, "chat") == place(POLICIES[name](), view, "chat") == place(policy, view, "chat")


def test_what_the_nodes_are_made_of_is_made_anew_only_where_it_changed() -> None:
    policy = StartupTime()
    view: View = function(cluster(node("a"), node("b")), "chat")[0]
    place(policy, view, "chat")
    before = dict(policy._servers.of(view))
    view = idle(view, "chat", "a")
    after = policy._servers.of(view)
    assert after["a"] is not before["a"]
    assert after["b"] is before["b"]


def test_locality_takes_the_node_that_is_kept_for_it_wherever_its_weights_are() -> None:
    """They lie where another function works without an end: it has waited long enough."""
    view, _ = function(cluster(node("near", models=(M.digest,)), node("kept"), models=(M,)), "chat", M)
    view, _ = function(view, "other")
    view = idle(view, "other", "near", running=1)
    assert isinstance(place(Locality(), view, "chat"), Wait)
    view = replace(view, kept={"kept": ("chat", 1)})
    decision = place(Locality(), view, "chat")
    assert isinstance(decision, Place)
    assert decision.node == "kept"
    ends = place(Locality(), idle(view, "other", "kept"), "chat")
    assert isinstance(ends, Evict)
    assert ends.instances == ("other-on-kept-0",)
    assert isinstance(place(Locality(), replace(view, kept={"kept": ("other", 1)}), "chat"), Wait)

"""CPUs that a node promises several times over (``cpu_overcommit``, 8 by default): what its report says, as the
scheduler reads it."""

import random
from dataclasses import replace

import pytest

from benchmarks.scheduler_cluster import started
from sllm_invoker.admission import Ledger
from sllm_runtime.control import registry
from sllm_runtime.control.minimums import crowded
from sllm_runtime.control.placement import Evict, Place, Wait
from sllm_runtime.control.plan import Context, plan
from sllm_runtime.control.scheduling.policies import POLICIES
from sllm_runtime.protocol.node import NodeStatus
from tests.unit.control.scheduling.cluster import GB, NOW, cluster, function, idle, model, node, place
from tests.unit.control.world import GIB, deployed, manifest, version

M = model("m", 2 * GB)


def overcommitted(name: str, cpu: float, gpus: int) -> NodeStatus:
    """The report of an idle node with the default overcommitment, as its invoker composes it."""
    ledger = Ledger(cpu=cpu, memory=64 * GIB, cpu_overcommit=8.0)
    fields = {field: getattr(ledger, field) for field in ("cpu", "free_cpu", "left_cpu") if hasattr(ledger, field)}
    return node(name, gpus=gpus, models=(M.digest,), **fields)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nothing_is_ended_for_what_its_node_could_never_run(policy: str) -> None:
    """``large`` asks for more CPUs than ``small`` has; the end of what is idle there gives it none of them."""
    nodes = (overcommitted("small", 4.0, 0), node("big", gpus=0, cpu=16.0, free_cpu=1.0))
    view = deployed(cluster(*nodes, models=(M,)), manifest("large", cpu=5.0)).put_waiting(("large", 1), "gw", 1)
    view = deployed(view, manifest("old", cpu=2.0))
    view = started(view, ("old", 1), Place("small", ()), "old-1", running=0, idle_s=100.0)
    assert isinstance(place(POLICIES[policy](), view, "large"), Wait)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nothing_is_ended_for_cpus_that_its_node_promises_several_times(policy: str) -> None:
    """Four starts for four free accelerators of a node with two cores, beside what is idle on the fifth."""
    view, _ = function(cluster(overcommitted("n", 2.0, 5), models=(M,)), "chat", M, max_instances=4)
    view = idle(function(view, "old")[0], "old", "n", 4, idle_s=10.0).put_waiting(("chat", 1), "gw", 4)
    made = plan(view, Context(now=NOW, wall=0.0, policy=POLICIES[policy](), rng=random.Random(1))).view
    assert made.instances["old-on-n-4"].stop is None, made.why(("chat", 1))
    assert len(made.of(("chat", 1))) == 4


def test_minimums_are_not_crowded_where_a_node_promises_its_cpus_several_times() -> None:
    view = deployed(cluster(overcommitted("n", 2.0, 0)), manifest("f", min_instances=3, max_instances=3))
    assert not crowded(view, ("f", 1))
    assert crowded(
        deployed(cluster(overcommitted("n", 0.5, 0)), manifest("f", min_instances=3, max_instances=3)), ("f", 1)
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_who_waits_since_a_node_is_kept_for_another_is_told_so(policy: str) -> None:
    """Not that no node is up and accepting work."""
    view = function(cluster(node("n", gpus=2)), "late")[0]
    view = replace(function(view, "other")[0], kept={"n": ("late", 1)}).put_waiting(("other", 1), "gw", 1)
    decision = place(POLICIES[policy](), view, "other")
    assert isinstance(decision, Wait)
    assert "up and accepting work" not in str(decision.reason)
    assert "n is kept for late" in str(decision.reason)


def test_a_deployment_leaves_minimums_to_the_function_that_is_deployed_alone() -> None:
    """While a second version of ``kept`` is on trial another function's start does not end all that it is served by."""
    view = function(cluster(node("n", gpus=2)), "kept", min_instances=1, max_instances=2)[0]
    view = idle(idle(view, "kept", "n", 0, idle_s=10.0), "kept", "n", 1, idle_s=10.0)
    view = deployed(view, manifest("big", gpu="L4:2")).put_waiting(("big", 1), "gw", 1)
    assert isinstance(place(POLICIES["startup-time"](), view, "big"), Wait)
    second = version(view.versions["kept", 1].manifest, 2)
    trial = registry.create(view, second, None).put_trial(("kept", 2), True)
    for policy in sorted(POLICIES):
        assert isinstance(place(POLICIES[policy](), trial, "big"), Wait), policy


def test_nothing_more_urgent_is_stopped_by_preemption() -> None:
    """A start of low priority waits: what it would stop is served before it, and would stop it in turn."""
    fields = {"engine": True, "model": "/m"}
    for priority, stopped in ((0, True), (5, False)):
        view = function(cluster(node("n", models=(M.digest,)), models=(M,)), "work", M, priority=priority, **fields)[0]
        view = idle(view, "work", "n", 0, running=1, carries=True)
        decision = place(POLICIES["preemption"](), function(view, "low", M)[0], "low")
        assert isinstance(decision, Evict) == stopped, decision

"""Running inference that makes way: moved (startup-time) or stopped (preemption)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from benchmarks.scheduler_cluster import GPUS, NOW, request, started
from benchmarks.scheduler_cluster import cluster as large
from sllm_runtime.control.placement import Evict, Migrate, Place, Policy, Wait
from sllm_runtime.control.plan import Context, SendStart, plan
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.moving import MOST_SERVERS, SETTLED_S, removable
from sllm_runtime.control.scheduling.rooms import CLOSE_S
from sllm_runtime.control.scheduling.servers import Server, server
from sllm_runtime.control.scheduling.startup import Preemption, StartupTime
from sllm_runtime.control.view import Instance, Key, View
from tests.fixtures.examples import examples
from tests.unit.control.scheduling.cluster import GB, cluster, function, idle, model, node, place

M, OTHER = model("m", 20 * GB), model("other", GB)
MOVES = StartupTime()


def crowded(*, carries: bool = True, kind: str = "L4") -> View:
    """The model lies in the memory of ``full``, whose one accelerator another function works on; ``free`` has room."""
    nodes = (node("full", resident=(M.digest, OTHER.digest)), node("free", kind=kind, resident=(OTHER.digest,)))
    view, _ = function(cluster(*nodes, models=(M, OTHER)), "chat", M)
    view, _ = function(view, "other", OTHER, engine=True, model="/other")
    return idle(view, "other", "full", running=1, carries=carries)


def test_what_runs_is_moved_for_a_much_quicker_start() -> None:
    decision = place(MOVES, crowded(), "chat")
    assert isinstance(decision, Migrate)
    assert decision.node == "full"
    (move,) = decision.moves
    assert (move.instance, move.node, move.by) == ("other-on-full-0", "free", ("chat", 1))
    assert decision.estimate.release == pytest.approx(move.seconds)
    assert decision.estimate.seconds < 1.0, "reading it from the object store takes 200 s"
    assert "moving other-on-full-0 to free" in decision.reason


@pytest.mark.parametrize(("policy", "made"), [(MOVES, Migrate), (Preemption(), Evict)])
def test_it_stays_where_giving_back_what_it_holds_takes_longer_than_is_won(policy: Policy, made: type) -> None:
    """200 s from the object store without it."""
    for seconds, decided in ((150.0, made), (250.0, Place)):
        view = crowded()
        view = replace(view, learned=view.learned.released(("other", 1), seconds))
        assert isinstance(place(policy, view, "chat"), decided)


def test_it_is_not_moved_without_leave() -> None:
    decision = place(StartupTime(moves=False), crowded(), "chat")
    assert isinstance(decision, Place)
    assert decision.node == "free"


def test_what_is_stopped_for_it_goes_on_elsewhere() -> None:
    decision = place(Preemption(), crowded(), "chat")
    assert isinstance(decision, Evict)
    assert (decision.instances, decision.at_once) == (("other-on-full-0",), True)


@pytest.mark.parametrize("policy", [MOVES, Preemption()], ids=["startup-time", "preemption"])
def test_calls_that_cannot_go_on_elsewhere_stay(policy: Policy) -> None:
    assert isinstance(place(policy, crowded(carries=False), "chat"), Place)
    view = crowded()
    running = view.instances["other-on-full-0"]
    once = running.manifest.model_copy(update={"resumable": False})
    assert isinstance(place(policy, view.put_instance(replace(running, manifest=once)), "chat"), Place)


@pytest.mark.parametrize("policy", [MOVES, Preemption()], ids=["startup-time", "preemption"])
def test_nothing_moves_twice_within_thirty_seconds(policy: Policy) -> None:
    view = crowded()
    running = view.instances["other-on-full-0"]
    young = replace(running, ready_at=NOW - SETTLED_S + 1.0)
    assert isinstance(place(policy, view.put_instance(young), "chat"), Place)
    old = replace(running, ready_at=NOW - SETTLED_S)
    assert not isinstance(place(policy, view.put_instance(old), "chat"), Place)


def test_it_moves_to_its_own_kind_of_accelerator_only() -> None:
    assert isinstance(place(MOVES, crowded(kind="L4"), "chat"), Migrate)
    view = crowded(kind="T4")
    both = view.versions[("other", 1)].manifest.model_copy(update={"gpu": ("L4", "T4")})
    running = view.instances["other-on-full-0"]
    view = view.put_instance(replace(running, manifest=both))
    assert isinstance(place(MOVES, view, "chat"), Wait), "other accelerators compute other bits"


def test_a_start_waits_for_the_moves_that_were_decided_for_it() -> None:
    view = crowded().put_waiting(("chat", 1), "gw", 1)
    context = Context(now=NOW, wall=0.0, policy=MOVES, rng=random.Random(1))
    made = plan(view, context)
    assert list(made.view.moves) == ["other-on-full-0"]
    assert "moving other-on-full-0 to free" in made.view.why(("chat", 1))
    again = plan(made.view, context)
    assert again.view.moves == made.view.moves
    assert again.view.why(("chat", 1)) == "waits for 1 instance(s) to go on elsewhere"
    (start,) = again.actions
    assert isinstance(start, SendStart)
    assert again.view.instances[start.instance].record.node == "free", "where its calls are to go on"


def test_a_preempted_instance_is_stopped_at_once_and_its_calls_may_go_on() -> None:
    view = crowded().put_waiting(("chat", 1), "gw", 1)
    made = plan(view, Context(now=NOW, wall=0.0, policy=Preemption(), rng=random.Random(1)))
    stop = made.view.instances["other-on-full-0"].stop
    assert stop is not None
    assert (stop.grace_s, stop.resume) == (0.0, True)


def test_a_start_takes_the_place_that_something_was_stopped_for() -> None:
    """Also where there is room elsewhere meanwhile, from which it would be slower."""
    context = Context(now=NOW, wall=0.0, policy=Preemption(), rng=random.Random(1))
    stopped = plan(crowded().put_waiting(("chat", 1), "gw", 1), context).view
    again = plan(stopped, context).view
    assert again.why(("chat", 1)) == "waits for instances to end on full"
    assert not [each for each in again.instances.values() if each.key == ("chat", 1)]


# --- against trying everything --------------------------------------------------------------------
def without(servers: Mapping[str, Server], view: View, gone: tuple[Instance, ...], name: str) -> tuple[int, int]:
    """Free memory and accelerators of a server when ``gone`` have left it."""
    left = servers[name]
    back = [i for i in gone if i.record.node == name]
    memory = left.free.memory + sum(request(view, i.key).need(view).memory for i in back)
    return memory, len(left.free.gpus) + sum(len(i.gpus) for i in back)


def brute_force(view: View, key: Key) -> float | None:
    """Seconds of the quickest start over all servers, every set of running instances, and every place for each."""
    servers = {name: server(view, n, n.status) for name, n in view.nodes.items() if n.status is not None}
    need, model = request(view, key).need(view), view.model_of(key)
    count = need.gpus[0][1]
    best: float | None = None
    for name, here in servers.items():
        start = estimate(here, key, model, view.learned).seconds
        there = [i for i in here.instances.values() if removable(view, i, NOW)]
        for size in range(len(there) + 1):
            for gone in itertools.combinations(there, size):
                memory, gpus = without(servers, view, gone, name)
                if need.memory > memory or count > gpus:
                    continue
                took = elsewhere(view, servers, gone, name)
                if took is not None and (best is None or start + took < best):
                    best = start + took
    return best


def elsewhere(view: View, servers: Mapping[str, Server], gone: tuple[Instance, ...], name: str) -> float | None:
    best: float | None = None
    others = [other for other in servers if other != name]
    for places in itertools.product(others, repeat=len(gone)):
        total, fits = 0.0, True
        for other in set(places):
            guests = [i for i, to in zip(gone, places, strict=True) if to == other]
            fits &= sum(len(i.gpus) for i in guests) <= len(servers[other].free.gpus)
        for instance, other in zip(gone, places, strict=True):
            model = view.model_of(instance.key)
            assert model is not None
            total += estimate(servers[other], instance.key, model, view.learned).seconds
            total += view.learned.resume_s(model.digest, instance.tokens(NOW))
            total += view.learned.release_s(instance.key)
        if fits and (best is None or total < best):
            best = total
    return best


@settings(max_examples=examples(1200), deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(2, 3), wide=st.booleans())
def test_the_policy_finds_what_trying_everything_finds(seed: int, nodes: int, wide: bool) -> None:
    """On clusters of up to three nodes, with starts of one and of four accelerators."""
    assert nodes <= MOST_SERVERS
    rng = random.Random(seed)
    view, keys = large(nodes, 5, rng)
    asked = keys[0]
    if wide:
        version = view.versions[asked]
        four = version.manifest.model_copy(update={"gpu": ("H100:4",)})
        view = view.put_version(msgspec.structs.replace(version, manifest=four))
    for number in range(rng.randrange(nodes * GPUS // 2, nodes * GPUS + 1)):
        key = rng.choice(keys[1:])
        spare = [(n, s) for n, s in view.nodes.items() if s.status and any(g.used_by is None for g in s.status.gpus)]
        name, there = rng.choice(spare[:1] if rng.random() < 0.7 else spare)
        assert there.status is not None
        gpu = next(g.index for g in there.status.gpus if g.used_by is None)
        view = started(view, key, Place(name, (gpu,)), f"i{number}", carries=rng.random() < 0.3)
    best = brute_force(view, asked)
    decision = StartupTime().place(replace(request(view, asked), patient=False), view, NOW, rng)
    waited = StartupTime().place(request(view, asked), view, NOW, rng)
    if best is None:
        assert isinstance(decision, Wait)
        return
    assert isinstance(decision, Place | Migrate)
    assert decision.estimate is not None
    event(f"{type(decision).__name__} {len(decision.moves) if isinstance(decision, Migrate) else 0}")
    assert best - 1e-6 <= decision.estimate.seconds <= best + 2 * CLOSE_S
    assert waited == decision or (isinstance(waited, Wait) and waited.seconds is not None), "it waits for a call's end"
    if isinstance(waited, Wait):
        assert any(view.instances[name].running for name in waited.claims), "something is going to change"
    assert waited.seconds is not None
    assert waited.seconds <= best + 2 * CLOSE_S, "only where that is quicker"

"""Running inference that makes way: moved (startup-time) or stopped (preemption)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from benchmarks.scheduler_cluster import GPUS, NOW, request, started
from benchmarks.scheduler_cluster import cluster as large
from sllm_runtime.control.fits import Need, choose_gpus, free, held, short
from sllm_runtime.control.placement import Evict, Migrate, Place, Policy, Refuse, Wait
from sllm_runtime.control.plan import Context, SendStart, plan
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.moving import MOST_SERVERS, SETTLED_S, Moving
from sllm_runtime.control.scheduling.rooms import CLOSE_S
from sllm_runtime.control.scheduling.servers import Server, server
from sllm_runtime.control.scheduling.startup import Preemption, StartupTime
from sllm_runtime.control.view import Instance, Key, Migration, Stop, View
from sllm_runtime.protocol.node import Gpu
from sllm_runtime.protocol.states import MigrationState
from tests.fixtures.examples import examples
from tests.unit.control.scheduling.cluster import GB, cluster, function, idle, model, node, place
from tests.unit.control.world import GIB

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


def test_that_is_stopped_which_gives_its_place_back_sooner() -> None:
    nodes = (node("full", resident=(M.digest,)), node("next", resident=(M.digest,)), node("free"))
    view, _ = function(cluster(*nodes, models=(M,)), "chat", M)
    for name, where, seconds in (("slow", "full", 100.0), ("quick", "next", 0.2)):
        view, _ = function(view, name, engine=True, model="/other")
        view = idle(view, name, where, running=1, carries=True)
        view = replace(view, learned=view.learned.released((name, 1), seconds))
    decision = place(Preemption(), view, "chat")
    assert isinstance(decision, Evict)
    assert decision.instances == ("quick-on-next-0",)


def test_what_is_stopped_for_it_goes_on_elsewhere() -> None:
    decision = place(Preemption(), crowded(), "chat")
    assert isinstance(decision, Evict)
    assert (decision.instances, decision.at_once) == (("other-on-full-0",), True)


def test_of_those_at_work_the_one_that_has_worked_least_is_stopped() -> None:
    nodes = (node("full", gpus=2, resident=(M.digest, OTHER.digest)), node("free", resident=(OTHER.digest,)))
    view, _ = function(cluster(*nodes, models=(M, OTHER)), "chat", M)
    view, _ = function(view, "other", OTHER, engine=True, model="/other")
    for gpu, seconds in enumerate((50.0, 20.0)):
        view = idle(view, "other", "full", gpu, running=1, carries=True)
        there = view.instances[f"other-on-full-{gpu}"]
        view = view.put_instance(replace(there, busy_since=NOW - seconds))
    decision = place(Preemption(), view, "chat")
    assert isinstance(decision, Evict)
    assert decision.instances == ("other-on-full-1",)


@pytest.mark.parametrize("policy", [MOVES, Preemption()], ids=["startup-time", "preemption"])
def test_calls_that_cannot_go_on_elsewhere_stay(policy: Policy) -> None:
    assert isinstance(place(policy, crowded(carries=False), "chat"), Place)
    view = crowded()
    running = view.instances["other-on-full-0"]
    once = running.manifest.model_copy(update={"resumable": False})
    assert isinstance(place(policy, view.put_instance(replace(running, manifest=once)), "chat"), Place)


@pytest.mark.parametrize(("priority", "stopped"), [(4, False), (5, True), (6, True)])
def test_nothing_more_urgent_is_stopped(priority: int, stopped: bool) -> None:
    view = crowded()
    for name, urgent in (("other", 5), ("chat", priority)):
        version = view.versions[name, 1]
        what = version.manifest.model_copy(update={"priority": urgent})
        view = view.put_version(msgspec.structs.replace(version, manifest=what))
    running = view.instances["other-on-full-0"]
    view = view.put_instance(replace(running, manifest=view.versions["other", 1].manifest))
    assert isinstance(place(Preemption(), view, "chat"), Evict if stopped else Place)


@pytest.mark.parametrize(
    ("policy", "adopted"),
    [(MOVES, True), (Preemption(), False), (Preemption(), True)],
    ids=["startup-time, of a controller before", "preemption", "preemption, of a controller before"],
)
def test_who_may_have_been_moved_just_now_stays(policy: Policy, adopted: bool) -> None:
    view = crowded()
    running = view.instances["other-on-full-0"]
    young = replace(running, ready_at=NOW - SETTLED_S + 1.0, adopted=adopted)
    assert isinstance(place(policy, view.put_instance(young), "chat"), Place)
    old = replace(running, ready_at=NOW - SETTLED_S, adopted=adopted)
    assert not isinstance(place(policy, view.put_instance(old), "chat"), Place)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_nothing_moves_twice_within_thirty_seconds(side: str) -> None:
    """But at once, if it has just begun and was never moved."""
    view = crowded()
    name = "other-on-full-0"
    view = view.put_instance(replace(view.instances[name], ready_at=NOW - 0.1))
    assert isinstance(place(MOVES, view, "chat"), Migrate)
    for state, ended, moves in (
        (MigrationState.MOVING, None, False),
        (MigrationState.DONE, NOW - SETTLED_S + 1.0, False),
        (MigrationState.DONE, NOW - SETTLED_S, True),
    ):
        known = Migration("gone", "full", state, NOW - 2 * SETTLED_S, ended=ended)
        known = replace(known, source=name) if side == "source" else replace(known, destination=name)
        decision = place(MOVES, replace(view, migrations={"gone": known}), "chat")
        assert isinstance(decision, Migrate if moves else Place), (state, ended)


def test_what_is_on_trial_stays() -> None:
    """Its deployment waits for what it does there."""
    assert isinstance(place(MOVES, crowded().put_trial(("other", 1), True), "chat"), Place)


def test_it_moves_to_its_own_kind_of_accelerator_only() -> None:
    assert isinstance(place(MOVES, crowded(kind="L4"), "chat"), Migrate)
    view = crowded(kind="T4")
    both = view.versions[("other", 1)].manifest.model_copy(update={"gpu": ("L4", "T4")})
    running = view.instances["other-on-full-0"]
    view = view.put_instance(replace(running, manifest=both))
    assert isinstance(place(MOVES, view, "chat"), Wait), "other accelerators compute other bits"


@pytest.mark.parametrize(("policy", "made"), [(MOVES, Migrate), (Preemption(), Evict)])
def test_nothing_makes_way_where_more_than_room_is_lacking(policy: Policy, made: type) -> None:
    """A label that no move gives back; it starts where that is, at once."""
    for labels, decided in (({"zone": "b"}, made), ({"zone": "a"}, Place)):
        view = crowded()
        version = view.versions["chat", 1]
        what = version.manifest.model_copy(update={"labels": {"zone": "b"}})
        view = view.put_version(msgspec.structs.replace(version, manifest=what))
        for name, there in (("full", labels), ("free", {"zone": "b"})):
            known = view.nodes[name]
            assert known.status is not None
            view = view.put_node(replace(known, status=msgspec.structs.replace(known.status, labels=there)))
        assert isinstance(place(policy, view, "chat"), decided), labels


def test_a_start_waits_for_the_moves_that_were_decided_for_it() -> None:
    view = crowded().put_waiting(("chat", 1), "gw", 1)
    context = Context(now=NOW, wall=0.0, policy=MOVES, rng=random.Random(1))
    made = plan(view, context)
    assert list(made.view.moves) == ["other-on-full-0"]
    assert "moving other-on-full-0 to free" in made.view.why(("chat", 1))
    again = plan(made.view, context)
    assert list(again.view.moves) == ["other-on-full-0"]
    assert again.view.why(("chat", 1)) == "waits for 1 instance(s) to go on elsewhere"
    (start,) = again.actions
    assert isinstance(start, SendStart)
    assert again.view.instances[start.instance].record.node == "free", "where its calls are to go on"


def test_the_place_of_a_move_is_promised_to_it_until_it_has_it() -> None:
    """Whoever comes after it in the same plan looks elsewhere, or waits: else its calls would find nothing there."""
    view = crowded().put_waiting(("chat", 1), "gw", 1)
    view, _ = function(view, "late")
    view = view.put_waiting(("late", 1), "gw", 1)
    context = Context(now=NOW, wall=0.0, policy=MOVES, rng=random.Random(1))
    made = plan(view, context).view
    assert made.moves["other-on-full-0"].gpus == (0,)
    assert not made.of(("late", 1)), "the one free accelerator is promised"
    assert "needs 1 x L4 (has none) on free" in made.why(("late", 1))
    again = plan(made, context).view
    assert [i.record.node for i in again.of(("other", 1))] == ["full", "free"], "the move has its place"
    assert again.moves["other-on-full-0"].placed
    assert not again.of(("late", 1))
    capacity = free(again, again.nodes["free"])
    assert capacity is not None
    assert capacity.memory == free_memory(again, "free") - request(again, ("other", 1)).need(again).memory, "once"


def free_memory(view: View, name: str) -> int:
    status = view.nodes[name].status
    assert status is not None
    return status.free_memory


def test_a_move_that_comes_to_nothing_has_nothing_promised_to_it() -> None:
    view = crowded().put_waiting(("chat", 1), "gw", 1)
    context = Context(now=NOW, wall=0.0, policy=MOVES, rng=random.Random(1))
    made = plan(view, context).view
    view = made.put_instance(replace(made.instances["other-on-full-0"], stop=Stop("it is deleted", 0.0)))
    view, _ = function(view, "late")
    after = plan(view.put_waiting(("late", 1), "gw", 1), context).view
    assert not after.moves
    assert [i.record.node for i in after.of(("late", 1))] == ["free"]


def test_two_that_move_get_accelerators_of_their_own() -> None:
    """One that asks for a large one does not find it taken by one that would do with a small one."""
    kinds = tuple(Gpu(index=index, kind="L4", memory=nbytes * GIB) for index, nbytes in enumerate((48, 24)))
    there = node("there", resident=(OTHER.digest,))
    nodes = (node("full", gpus=2, resident=(M.digest,)), msgspec.structs.replace(there, gpus=kinds))
    view, _ = function(cluster(*nodes, models=(M, OTHER)), "chat", M)
    wide = view.versions[("chat", 1)]
    two = wide.manifest.model_copy(update={"gpu": ("L4:2",)})
    view = view.put_version(msgspec.structs.replace(wide, manifest=two))
    view, _ = function(view, "small", OTHER, engine=True, model="/other", gpu_memory=GIB)
    view, _ = function(view, "large", OTHER, engine=True, model="/other", gpu_memory=40 * GIB)
    view = idle(idle(view, "small", "full", 0, running=1, carries=True), "large", "full", 1, running=1, carries=True)
    decision = place(MOVES, view, "chat")
    assert isinstance(decision, Migrate)
    assert {move.instance: move.gpus for move in decision.moves} == {"large-on-full-1": (0,), "small-on-full-0": (1,)}


def test_accelerators_of_each_kind_count_for_themselves() -> None:
    """Two that hold an L4 each may both use a T4: of the two free accelerators of the nearest server one is none for
    them."""
    near = msgspec.structs.replace(
        node("near", resident=(OTHER.digest,)),
        gpus=(Gpu(index=0, kind="T4", memory=24 * GIB), Gpu(index=1, kind="L4", memory=24 * GIB)),
    )
    nodes = (node("full", gpus=2, resident=(M.digest,)), near, node("far", models=(OTHER.digest,)))
    view, _ = function(cluster(*nodes, models=(M, OTHER)), "chat", M)
    view, _ = function(view, "other", OTHER, engine=True, model="/other")
    for key, kinds in ((("chat", 1), ("L4:2",)), (("other", 1), ("T4", "L4"))):
        version = view.versions[key]
        what = version.manifest.model_copy(update={"gpu": kinds})
        view = view.put_version(msgspec.structs.replace(version, manifest=what))
    view = idle(idle(view, "other", "full", 0, running=1, carries=True), "other", "full", 1, running=1, carries=True)
    decision = place(MOVES, view, "chat")
    assert isinstance(decision, Migrate)
    assert sorted((move.node, move.gpus) for move in decision.moves) == [("far", (0,)), ("near", (1,))]


def test_a_move_is_looked_for_beyond_servers_where_none_could_make_room() -> None:
    """On the five where it would start soonest what runs may have been moved just now."""
    young = [node(f"n{number}", resident=(M.digest, OTHER.digest)) for number in range(MOST_SERVERS + 1)]
    nodes = (*young, node("old", models=(M.digest,), resident=(OTHER.digest,)), node("free", resident=(OTHER.digest,)))
    view, _ = function(cluster(*nodes, models=(M, OTHER)), "chat", M)
    view, _ = function(view, "other", OTHER, engine=True, model="/other")
    for each in (*young, nodes[-2]):
        view = idle(view, "other", each.node, running=1, carries=True)
    for each in young:
        instance = view.instances[f"other-on-{each.node}-0"]
        view = view.put_instance(replace(instance, ready_at=NOW - SETTLED_S + 1.0, adopted=True))
    decision = place(MOVES, view, "chat")
    assert isinstance(decision, Migrate)
    assert decision.node == "old"


def test_a_move_is_looked_for_beyond_servers_from_which_moving_takes_too_long() -> None:
    """On the five where it would start soonest works what had to be read from the store elsewhere."""
    heavy = model("heavy", 30 * GB)
    there = [node(f"n{number}", resident=(M.digest, heavy.digest)) for number in range(MOST_SERVERS + 1)]
    nodes = (*there, node("last", models=(M.digest,), resident=(OTHER.digest,)), node("free", resident=(OTHER.digest,)))
    view, _ = function(cluster(*nodes, models=(M, OTHER, heavy)), "chat", M)
    view, _ = function(view, "other", OTHER, engine=True, model="/other")
    view, _ = function(view, "heavy", heavy, engine=True, model="/heavy")
    for each in there:
        view = idle(view, "heavy", each.node, running=1, carries=True)
    decision = place(MOVES, idle(view, "other", "last", running=1, carries=True), "chat")
    assert isinstance(decision, Migrate)
    assert decision.node == "last"


def test_where_to_go_in_more_time_is_looked_for_again() -> None:
    """What others lose by a start is counted server by server, so one that is looked at later may have more time."""
    view, servers = crowded(), Servers()
    moving = Moving.of(request(view, ("chat", 1)), view, servers, NOW, SETTLED_S)
    full = servers.of(view)["full"]
    assert not moving.going(full, 0.001)
    (going,) = moving.going(full, 10.0).values()
    assert [room.server.name for room in moving.rooms(going, full, 2, 10.0)] == ["free"]
    assert not moving.rooms(going, full, 3, 0.001)


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
Gpus: TypeAlias = Sequence[Gpu]


def brute_force(view: View, key: Key) -> float | None:
    """Seconds of the quickest start over all servers, every set of running instances, and every place for each."""
    servers = {name: server(view, n, n.status) for name, n in view.nodes.items() if n.status is not None}
    need, model = request(view, key).need(view), view.model_of(key)
    moving = Moving.of(request(view, key), view, Servers(), NOW, SETTLED_S)
    best: float | None = None
    for here in servers.values():
        if not open_to(need, here):
            continue
        start = estimate(here, key, model, view.learned).seconds
        there = moving.movable(here)
        for size in range(len(there) + 1):
            for gone in itertools.combinations(there, size):
                memory = here.free.memory + sum(request(view, i.key).need(view).memory for i in gone)
                gpus = [*here.free.gpus, *(gpu for i in gone for gpu in held(view, i))]
                if need.memory > memory or not shared_out([need], gpus):
                    continue
                took = elsewhere(view, servers, gone, here.name)
                if took is not None and (best is None or start + took < best):
                    best = start + took
    return best


def open_to(need: Need, there: Server) -> bool:
    """Whether it may be asked, room aside."""
    return not there.node.record.cordoned and need.labels.items() <= there.status.labels.items()


def shared_out(needs: Sequence[Need], gpus: Gpus) -> bool:
    """Whether each gets accelerators of its own."""
    if not needs:
        return True
    kind, count = needs[0].gpus[0]
    fitting = [gpu for gpu in gpus if kind in ("any", gpu.kind) and gpu.memory >= needs[0].gpu_memory]
    mine = itertools.combinations(fitting, count)
    return any(shared_out(needs[1:], [gpu for gpu in gpus if gpu not in taken]) for taken in mine)


def guest(view: View, instance: Instance) -> Need:
    """What it needs elsewhere: what it holds, of the same kind."""
    there = held(view, instance)
    (kind,) = {gpu.kind for gpu in there}
    return replace(request(view, instance.key).need(view), gpus=((kind, len(there)),))


def elsewhere(view: View, servers: Mapping[str, Server], gone: tuple[Instance, ...], name: str) -> float | None:
    best: float | None = None
    others = [other for other in servers if other != name]
    for places in itertools.product(others, repeat=len(gone)):
        total, fits = 0.0, True
        for other in set(places):
            guests = [guest(view, i) for i, to in zip(gone, places, strict=True) if to == other]
            fits &= all(open_to(need, servers[other]) for need in guests)
            fits = fits and shared_out(guests, servers[other].free.gpus)
        for instance, other in zip(gone, places, strict=True):
            model = view.model_of(instance.key)
            assert model is not None
            total += estimate(servers[other], instance.key, model, view.learned).seconds
            total += view.learned.resume_s(model.digest, instance.tokens(NOW))
            total += view.learned.release_s(instance.key)
        if fits and (best is None or total < best):
            best = total
    return best


KINDS: tuple[dict[str, object], ...] = (
    {"gpu": ("H100",)},
    {"gpu": ("L4",)},
    {"gpu": ("L4", "H100")},
    {"gpu": ("H100", "L4"), "gpu_memory": 40 * GIB},
    {"gpu": (), "gpu_memory": 20 * GIB},
    {"gpu": ("H100",), "labels": {"zone": "a"}},
)
"""Of what is moved: what it may use is more than what it may move to."""


def mixed(view: View, keys: Sequence[Key], rng: random.Random) -> View:
    """With accelerators of several kinds and sizes, nodes in two zones, and some of them cordoned."""
    for known in view.nodes.values():
        assert known.status is not None
        gpus = tuple(
            msgspec.structs.replace(gpu, kind=rng.choice(("H100", "H100", "L4")), memory=rng.choice((24, 80)) * GIB)
            for gpu in known.status.gpus[: rng.randrange(3, GPUS + 1)]
        )
        status = msgspec.structs.replace(known.status, gpus=gpus, labels={"zone": rng.choice("aab")})
        record = msgspec.structs.replace(known.record, cordoned=rng.random() < 0.15)
        view = view.put_node(replace(known, status=status, record=record))
    for number, key in enumerate(keys):
        version = view.versions[key]
        what = {"gpu": ("H100",)} if not number else rng.choice(KINDS)
        view = view.put_version(msgspec.structs.replace(version, manifest=version.manifest.model_copy(update=what)))
    return view


@settings(max_examples=examples(1500), deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(2, 3), wide=st.booleans(), alike=st.booleans())
def test_the_policy_finds_what_trying_everything_finds(seed: int, nodes: int, wide: bool, alike: bool) -> None:
    """On clusters of up to three nodes, with starts of one and of four accelerators."""
    assert nodes <= MOST_SERVERS
    rng = random.Random(seed)
    view, keys = large(nodes, 5, rng)
    asked = keys[0]
    if not alike:
        view = mixed(view, keys, rng)
    if wide:
        version = view.versions[asked]
        four = version.manifest.model_copy(update={"gpu": ("H100:4",)})
        view = view.put_version(msgspec.structs.replace(version, manifest=four))
    for number in range(rng.randrange(nodes * GPUS // 2, nodes * GPUS + 1)):
        key = rng.choice(keys[1:])
        need = request(view, key).need(view)
        free_now = [there for n in view.nodes.values() if (there := free(view, n)) and not short(need, there)]
        spare = [(there.node, chosen[1]) for there in free_now if (chosen := choose_gpus(need, there))]
        if spare:
            name, gpus = rng.choice(spare[:1] if rng.random() < 0.7 else spare)
            view = started(view, key, Place(name, gpus), f"i{number}", carries=rng.random() < 0.3)
    best = brute_force(view, asked)
    never = replace(view, learned=replace(view.learned, calls={}))  # nobody knows when a call ends
    decision = StartupTime().place(request(view, asked), never, NOW, rng)
    waited = StartupTime().place(request(view, asked), view, NOW, rng)
    if best is None:
        assert isinstance(decision, Wait | Refuse)
        return
    assert isinstance(decision, Place | Migrate)
    assert decision.estimate is not None
    if isinstance(decision, Migrate):
        for move in decision.moves:
            status = view.nodes[move.node].status
            assert status is not None
            kinds = [gpu.kind for gpu in status.gpus if gpu.index in move.gpus]
            assert kinds == [gpu.kind for gpu in held(view, view.instances[move.instance])]
    event(f"{type(decision).__name__} {len(decision.moves) if isinstance(decision, Migrate) else 0}")
    assert best - 1e-6 <= decision.estimate.seconds <= best + 2 * CLOSE_S
    assert waited == decision or (isinstance(waited, Wait) and waited.seconds is not None), "it waits for a call's end"
    if isinstance(waited, Wait):
        assert any(view.instances[name].running for name in waited.claims), "something is going to change"
    assert waited.seconds is not None
    assert waited.seconds <= best + 2 * CLOSE_S, "only where that is quicker"

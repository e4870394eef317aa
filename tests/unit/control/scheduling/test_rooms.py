"""The index and the search in it, against looking at every server."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scheduler_cluster import NOW, cluster, ended, request, started
from sllm_runtime.control.placement import Migrate, Place
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.learned import Learned
from sllm_runtime.control.scheduling.policies import StartupTime
from sllm_runtime.control.scheduling.rooms import CLOSE_S, Start, by_time
from sllm_runtime.control.scheduling.servers import Server, server
from sllm_runtime.control.view import Key, View
from sllm_runtime.protocol.loader import is_link, link_of
from sllm_runtime.protocol.node import PathLoad
from sllm_runtime.protocol.timeline import IMPORT, SANDBOX, SETUP, Span
from tests.fixtures.examples import examples


def made(view: View) -> list[Server]:
    """All servers, each made anew."""
    return [server(view, node, node.status) for node in view.nodes.values() if node.status is not None]


def soonest(view: View, key: Key) -> float | None:
    """The least estimate over all servers where it has the accelerators that it likes best of those that are free."""
    model, need = view.model_of(key), request(view, key).need(view)
    rooms = ((each, each.room(need)) for each in made(view) if each.node.open)
    device = bool(need.gpus)
    found = [
        (room[0], estimate(each, key, model, view.learned, device=device).seconds)
        for each, room in rooms
        if room is not None
    ]
    return min(found)[1] if found else None


def changed(view: View, rng: random.Random, number: int) -> View:
    """One thing that happens in a cluster."""
    name = rng.choice(list(view.nodes))
    node = view.nodes[name]
    assert node.status is not None
    what = rng.randrange(6)
    if what == 0:
        return view.put_node(replace(node, record=msgspec.structs.replace(node.record, cordoned=rng.random() < 0.5)))
    if what == 1:
        paths = tuple(
            msgspec.structs.replace(path, queued=rng.randrange(9) * 10**9)
            for path in node.status.paths
            if not is_link(path.path)
        )
        paths += (PathLoad(path=link_of("cuda:0"), bandwidth=rng.choice([0.0, 1e9, 5e9, 25e9]), queued=0),)
        return view.put_node(replace(node, status=msgspec.structs.replace(node.status, paths=paths)))
    if what == 2:
        digests = tuple(view.models)
        status = msgspec.structs.replace(
            node.status, models=tuple(rng.sample(digests, 3)), resident=tuple(rng.sample(digests, 1)), pool_idle=what
        )
        return view.put_node(replace(node, status=status))
    if what == 3:
        key = rng.choice(list(view.versions))
        return replace(view, learned=taught(view.learned, key, name, rng))
    if what == 4 and not node.status.instances:
        kind = rng.choice(["H100", "L4"])
        gpus = tuple(msgspec.structs.replace(gpu, kind=kind) for gpu in node.status.gpus)
        return view.put_node(replace(node, status=msgspec.structs.replace(node.status, gpus=gpus)))
    running = list(view.instances.values())
    return ended(view, rng.choice(running)) if running else view


def taught(learned: Learned, key: Key, node: str, rng: random.Random) -> Learned:
    """With one more start, and what it took beyond its parts."""
    spans = tuple(Span(name, 0.0, rng.random() * 500) for name in (SANDBOX, IMPORT, SETUP))
    tier = rng.choice(["none", "dram", "ssd", "remote"])
    learned = learned.after(key, node, rng.random() < 0.5, spans).led(key, tier, rng.random(), rng.random())
    return learned.missed(key, tier, rng.random() - rng.choice([0.3, 3.0]))


def choosy(view: View, keys: list[Key], rng: random.Random) -> View:
    """Some functions like other accelerators as well, or better, or want two."""
    for key in keys:
        version = view.versions[key]
        gpu = rng.choice([("H100",), ("L4", "H100"), ("H100:2", "L4"), ("any",), ()])
        manifest = version.manifest.model_copy(update={"gpu": gpu})
        view = view.put_version(msgspec.structs.replace(version, manifest=manifest))
    return view


@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 6))
def test_the_index_finds_what_looking_at_every_server_finds(seed: int, nodes: int) -> None:
    """Of each of 25 clusters that follow from each other, and the same as from an index that is made anew."""
    rng = random.Random(seed)
    view, keys = cluster(nodes, 8, rng)
    view = choosy(view, keys, rng)
    policy, moves = StartupTime(moves=False), StartupTime()
    for number in range(25):
        key = rng.choice(keys)
        best = soonest(view, key)
        asked = replace(request(view, key), patient=False)
        decision = policy.place(asked, view, NOW, rng)
        assert isinstance(decision, Place) == (best is not None)
        kept, fresh = (each.place(asked, view, NOW, rng) for each in (moves, StartupTime()))
        if isinstance(fresh, Place | Migrate) and fresh.estimate is not None:
            assert isinstance(kept, Place | Migrate)
            assert kept.estimate is not None
            assert abs(kept.estimate.seconds - fresh.estimate.seconds) <= 2 * CLOSE_S
        else:
            assert kept == fresh
        if isinstance(decision, Place) and best is not None:
            assert decision.estimate is not None
            assert best <= decision.estimate.seconds <= best + CLOSE_S
            view = started(view, key, decision, f"i{number}", carries=rng.random() < 0.5)
        for _ in range(rng.randrange(3)):
            view = changed(view, rng, number)


@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 30), release=st.sampled_from([0.0, 0.2]))
def test_servers_come_in_the_order_of_their_estimates(seed: int, nodes: int, release: float) -> None:
    rng = random.Random(seed)
    view, keys = cluster(nodes, 8, rng)
    servers = Servers()
    for number in range(5):
        key = rng.choice(keys)
        need = request(view, key).need(view)
        among = {name: each for name, each in servers.of(view).items() if rng.random() < 0.7}
        start = Start(key, need, view.model_of(key), view.learned, lambda each: each.open)
        plain = sorted((start.on(each, release).seconds, name) for name, each in among.items() if each.node.open)
        within = rng.choice([seconds for seconds, _ in plain] or [1.0]) if rng.random() < 0.7 else math.inf
        found = [(guess.seconds, each.name) for guess, each in by_time(start, servers, among, release, within)]
        assert found == [each for each in plain if each[0] < within]
        for _ in range(4):
            view = changed(view, rng, number)


def test_nodes_that_go_are_forgotten() -> None:
    view, _ = cluster(3, 4, random.Random(1))
    servers = Servers()
    assert set(servers.of(view)) == set(view.nodes)
    servers.by_wait("disk")
    left = {name: node for name, node in view.nodes.items() if name != "n0001"}
    assert set(servers.of(replace(view, nodes=left))) == set(left)
    assert {each.name for _, each in servers.by_wait("disk")[0]} == set(left)
    assert all(each.name in left for digest in view.models for each in servers.on_ssd(digest))

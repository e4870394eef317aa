"""The index and the search in it, against looking at every server."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scheduler_cluster import NOW, cluster, ended, request, started
from sllm_runtime.control.placement import Place
from sllm_runtime.control.scheduling.estimate import estimate
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.policies import StartupTime
from sllm_runtime.control.scheduling.rooms import CLOSE_S
from sllm_runtime.control.scheduling.servers import server
from sllm_runtime.control.view import Key, View


def soonest(view: View, key: Key) -> float | None:
    """The least estimate over all servers where it fits, each made anew."""
    model, need = view.model_of(key), request(view, key).need(view)
    made = [server(view, node, node.status) for node in view.nodes.values() if node.status is not None]
    fitting = [each for each in made if each.open and each.room(need) is not None]
    return min((estimate(each, key, model, view.learned).seconds for each in fitting), default=None)


def changed(view: View, rng: random.Random, number: int) -> View:
    """One thing that happens in a cluster."""
    name = rng.choice(list(view.nodes))
    node = view.nodes[name]
    assert node.status is not None
    what = rng.randrange(4)
    if what == 0:
        return view.put_node(replace(node, record=msgspec.structs.replace(node.record, cordoned=rng.random() < 0.5)))
    if what == 1:
        paths = tuple(msgspec.structs.replace(path, queued=rng.randrange(9) * 10**9) for path in node.status.paths)
        return view.put_node(replace(node, status=msgspec.structs.replace(node.status, paths=paths)))
    if what == 2:
        digests = tuple(view.models)
        status = msgspec.structs.replace(
            node.status, models=tuple(rng.sample(digests, 3)), resident=tuple(rng.sample(digests, 1)), pool_idle=what
        )
        return view.put_node(replace(node, status=status))
    running = list(view.instances.values())
    return ended(view, rng.choice(running)) if running else view


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 6))
def test_the_index_finds_what_looking_at_every_server_finds(seed: int, nodes: int) -> None:
    rng = random.Random(seed)
    view, keys = cluster(nodes, 8, rng)
    policy = StartupTime()
    for number in range(25):
        key = rng.choice(keys)
        best = soonest(view, key)
        decision = policy.place(request(view, key), view, NOW, rng)
        assert isinstance(decision, Place) == (best is not None)
        if isinstance(decision, Place) and best is not None:
            assert decision.estimate is not None
            assert best <= decision.estimate.seconds <= best + CLOSE_S
            view = started(view, key, decision, f"i{number}")
        for _ in range(rng.randrange(3)):
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

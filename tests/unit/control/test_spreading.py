"""Models are brought to where they should lie, by how often they are started."""

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.control import draining, popularity, replicas, spreading
from sllm_runtime.control.replicas import AT_ONCE, AT_ONCE_THERE, Disk, Wish, next_pulls
from sllm_runtime.control.reports import observe
from sllm_runtime.protocol import codec, ctl
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import LOST_AFTER_S, MAX_MESSAGE
from sllm_runtime.protocol.node import Storage
from sllm_runtime.protocol.records import ModelRecord, Popularity
from sllm_runtime.protocol.subjects import POPULARITY_KEY
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.control.bench import Bench, controller_of, manifest
from tests.unit.control.scripted_node import ScriptedNode, digest_of
from tests.unit.control.world import FakeNode, World

MIB = 2**20
SOURCE = "s3://bucket/m"
MODEL = digest_of(SOURCE)


async def known(bench: Bench, name: str, node: ScriptedNode) -> None:
    """The controller has heard what ``node`` has."""
    node.tell()

    def heard() -> bool:
        found = bench.controller.loop.view.nodes.get(name)
        status = found.status if found is not None else None
        return status is not None and (status.storage, status.remote) == (node.storage, node.remote)

    await until(heard, what=f"what {name} has is known")


async def started(bench: Bench, *, limit: int = 8 * MIB) -> None:
    """A function on a model that its node reads from a source has been started once."""
    bench.node.storage, bench.node.remote = Storage(ssd_limit=limit), (MODEL,)
    await known(bench, "n1", bench.node)
    await bench.gateway.deploy(manifest(model=SOURCE, engine=True))


def placed(told: ctl.Placements) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(each.model, each.wanted, each.there) for each in told.models]


async def test_what_is_started_is_brought_to_every_node_that_takes_it(bench: Bench, nats: Nats) -> None:
    async with ScriptedNode(await nats.bus("n2"), "n2") as other:
        other.storage, other.remote = Storage(ssd_limit=8 * MIB), (MODEL,)
        await known(bench, "n2", other)
        await started(bench)
        told: ctl.Placements = await bench.gateway.ask("placement", ctl.Placement(redo=True))
        assert [(each.model, each.wanted) for each in told.models] == [(MODEL, ("n1", "n2"))]
        assert told.models[0].popularity > 0.9

        async def there() -> bool:
            told: ctl.Placements = await bench.gateway.ask("placement", ctl.Placement())
            return placed(told) == [(MODEL, ("n1", "n2"), ("n1", "n2"))]

        await until(there, what="it lies where it should")
        assert bench.node.kept == other.kept == (MODEL,)
        assert bench.node.pulls == other.pulls == [MODEL]
        await bench.gateway.ask("placement", ctl.Placement(redo=True))
        assert bench.node.pulls == other.pulls == [MODEL], "what is there is not asked for"


async def test_others_have_their_turn_while_it_is_decided(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what nobody asked for is decided once, and told to nobody."""
    await started(bench)
    turns: asyncio.Queue[None] = asyncio.Queue()
    answered, decided = threading.Event(), list[list[Wish]]()

    def slow(wishes: list[Wish], there: list[Disk]) -> Mapping[str, frozenset[str]]:
        decided.append(wishes)
        assert answered.wait(GIVE_UP_S), "nobody else had a turn"
        return replicas.spread(wishes, there)

    async def pause(_seconds: float) -> None:
        await turns.get()

    monkeypatch.setattr(spreading, "spread", slow)
    loop = bench.controller.loop
    made = spreading.Spreading(loop, loop._ledger, loop._nodes, bench.controller.service._pulls, {}, pause)
    made.start()
    try:
        turns.put_nowait(None)
        await until(lambda: decided, what="it is decided")
        assert (await bench.gateway.ask("ping", ctl.Nothing())).note == "leading"
        answered.set()
        await until(lambda: bench.node.kept is not None, what="its node is told what it keeps")
        assert len(decided) == 1
    finally:
        answered.set()
        await made.close()


async def test_who_looks_at_it_again_and_again_has_it_decided_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = list[int]()

    def counted(wishes: list[Wish], there: list[Disk]) -> Mapping[str, frozenset[str]]:
        decided.append(there[0].limit)
        return replicas.spread(wishes, there)

    await started(bench)
    monkeypatch.setattr(spreading, "spread", counted)
    for limit in (8 * MIB, 9 * MIB):
        bench.node.storage = Storage(ssd_limit=limit)
        await known(bench, "n1", bench.node)
        await asyncio.gather(*(bench.gateway.ask("placement", ctl.Placement()) for _ in range(5)))
        await bench.gateway.ask("placement", ctl.Placement())
    assert decided == [8 * MIB, 9 * MIB]


async def test_a_node_without_room_is_told_so_and_not_asked(bench: Bench) -> None:
    await started(bench, limit=1000)
    await bench.gateway.ask("placement", ctl.Placement(redo=True))
    await until(lambda: bench.node.kept is not None, what="it is told what it keeps")
    assert (bench.node.kept, bench.node.pulls) == ((), [])


async def test_what_a_node_has_for_good_is_not_placed(bench: Bench) -> None:
    bench.node.storage = Storage(ssd_limit=8 * MIB)
    await bench.gateway.deploy(manifest(model=SOURCE, engine=True))
    told: ctl.Placements = await bench.gateway.ask("placement", ctl.Placement(redo=True))
    assert placed(told) == []
    assert bench.node.pulls == []


def test_which_nodes_take_models_and_what_lies_there() -> None:
    world = World(*(FakeNode(name, cpu=1.0, gpus=0) for name in ("cordoned", "drained", "full", "silent", "stopped")))
    told = {name: node.report() for name, node in world.nodes.items()}
    told["full"] = msgspec.structs.replace(
        told["full"], models=("owned", "part", "source", "whole"), remote=("source",), copied={"part": 9, "whole": 10}
    )
    told["stopped"] = msgspec.structs.replace(told["stopped"], draining=True)
    for name, status in told.items():
        heard = msgspec.structs.replace(status, storage=Storage(ssd_limit=100))
        world.view = observe(world.view, heard, world.now - (2 * LOST_AFTER_S if name == "silent" else 0.0), 0.0)
    for digest in ("owned", "part", "source", "whole"):
        world.view = world.view.put_model(ModelRecord(digest=digest, uri="s3://b", nbytes=10, partitions=(10,)))
    world.view = draining.cordon(world.view, "cordoned", cordoned=True, drain=False)
    world.view = draining.cordon(world.view, "drained", cordoned=False, drain=True)
    there = spreading.disks(world.view, world.now)
    assert there == [Disk("full", 100, holds=frozenset({"whole"}), owns=frozenset({"owned"}))]


async def test_one_that_fails_is_tried_again_the_next_time(bench: Bench) -> None:
    await started(bench)
    bench.node.problem = Full("the SSD tier has no room")
    await bench.gateway.ask("placement", ctl.Placement(redo=True))
    failed = bench.controller.service._spreading._failed
    await until(lambda: MODEL in failed, what="it has failed, and is left alone for a while")
    assert bench.node.pulls == [MODEL]
    bench.node.problem = None

    async def again() -> bool:
        await bench.gateway.ask("placement", ctl.Placement(redo=True))
        return MODEL in bench.node.copied

    await until(again, what="it is brought")
    await until(lambda: MODEL not in bench.controller.service._spreading._failed, what="that is forgotten")


async def test_one_that_does_not_come_holds_up_no_other(bench: Bench) -> None:
    other = digest_of("s3://bucket/other")
    bench.node.storage, bench.node.remote = Storage(ssd_limit=8 * MIB), (MODEL, other)
    await known(bench, "n1", bench.node)
    await bench.gateway.deploy(manifest("often", model=SOURCE, engine=True))
    await bench.gateway.deploy(manifest("chat", model=SOURCE, engine=True))
    await bench.gateway.deploy(manifest("other", model="s3://bucket/other", engine=True))
    bench.node.stuck.add(MODEL)
    await bench.gateway.ask("placement", ctl.Placement(redo=True))
    await until(lambda: other in bench.node.copied, what="the other one is brought")
    assert MODEL in bench.node.pulls
    assert MODEL not in bench.node.copied


async def test_those_beyond_what_is_brought_at_once_come_after_them(bench: Bench) -> None:
    """Without its being decided once more."""
    service, loop = bench.controller.service, bench.controller.loop
    await service._spreading.close()
    made = spreading.Spreading(loop, loop._ledger, loop._nodes, service._pulls, {})
    sources = [f"s3://bucket/{number}" for number in range(AT_ONCE_THERE + 2)]
    bench.node.storage, bench.node.remote = Storage(ssd_limit=8 * MIB), tuple(map(digest_of, sources))
    await known(bench, "n1", bench.node)
    for number, source in enumerate(sources):
        await bench.gateway.deploy(manifest(f"f{number}", model=source, engine=True))
    try:
        await made.redo()
        await until(lambda: bench.node.copied.keys() >= set(map(digest_of, sources)), what="all of them are brought")
    finally:
        await made.close()


async def test_what_has_become_popular_is_placed_though_nothing_lies_elsewhere_than_before(bench: Bench) -> None:
    other = digest_of("s3://bucket/other")
    bench.node.storage, bench.node.remote = Storage(ssd_limit=8 * MIB), (MODEL, other)
    await known(bench, "n1", bench.node)
    bench.node.stuck |= {MODEL, other}
    for name, source, wanted in (("chat", SOURCE, {MODEL}), ("other", "s3://bucket/other", {MODEL, other})):
        await bench.gateway.deploy(manifest(name, model=source, engine=True))
        told: ctl.Placements = await bench.gateway.ask("placement", ctl.Placement(redo=True))
        assert {each.model for each in told.models if each.wanted == ("n1",)} == wanted


@given(
    st.dictionaries(st.sampled_from("xyz"), st.frozensets(st.sampled_from("abcdefgh")), max_size=3),
    st.frozensets(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("xyz")), max_size=AT_ONCE),
    st.frozensets(st.sampled_from("abcdefgh"), max_size=2),
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 9)),
)
def test_what_is_brought_at_once_is_bounded_and_the_most_popular_comes_first(
    left: dict[str, frozenset[str]],
    going: frozenset[tuple[str, str]],
    resting: frozenset[str],
    popular: dict[str, float],
) -> None:
    found = next_pulls(left, going, resting, popular)
    assert len(set(found)) == len(found)
    assert not set(found) & going
    assert all(digest in left[node] and digest not in resting for digest, node in found)
    assert len(going) + len(found) <= max(AT_ONCE, len(going))
    on = Counter(node for _, node in (*going, *found))
    assert all(on[node] <= AT_ONCE_THERE for _, node in found)
    for node, digests in left.items():
        missed = {(each, node) for each in digests - resting} - going - set(found)
        assert not missed or on[node] >= AT_ONCE_THERE or len(going) + len(found) >= AT_ONCE, "nobody waits for nothing"
        mine = [popular.get(digest, 0.0) for digest, there in found if there == node]
        if mine and on[node] >= AT_ONCE_THERE:
            assert all(popular.get(digest, 0.0) <= min(mine) for digest, _ in missed)


def test_no_more_are_brought_at_once_however_many_nodes_there_are() -> None:
    left = {f"n{number}": frozenset("abc") for number in range(AT_ONCE)}
    assert len(next_pulls(left, set(), set(), {})) == AT_ONCE
    going = {("z", f"m{number}") for number in range(AT_ONCE - 1)}
    assert len(next_pulls(left, going, set(), {})) == 1


class Full(Unavailable):
    """An answer, and no silence."""

    code = "pool_exhausted"


async def test_the_next_controller_knows_how_popular_models_are(bench: Bench, nats: Nats) -> None:
    await started(bench)
    before: ctl.Placements = await bench.gateway.ask("placement", ctl.Placement(redo=True))
    stored = await bench.stored(POPULARITY_KEY, Popularity)
    assert stored.models == {MODEL: pytest.approx(before.models[0].popularity)}
    async with controller_of(nats, "ctl2") as other:
        await until(lambda: other.loop.view.nodes["n1"].status, what="the node is heard")
        assert placed(await other.service._spreading.shown()) in (
            [(MODEL, ("n1",), ())],
            [(MODEL, ("n1",), ("n1",))],
        )


def test_popularity_halves_every_hour_and_is_forgotten_at_last() -> None:
    once = popularity.after({}, {"a": 8.0, "b": 1.0}, 60.0)
    assert once == {"a": 8.0, "b": 1.0}
    assert popularity.after(once, {"b": 1.0}, popularity.HALF_LIFE_S) == {"a": 4.0, "b": 1.5}
    assert popularity.after(once, {}, 8 * popularity.HALF_LIFE_S) == {"a": pytest.approx(8 / 256)}
    assert popularity.after(once, {}, 100 * popularity.HALF_LIFE_S) == {}


def test_only_as_many_as_a_record_takes_are_remembered() -> None:
    many = {f"m{number:05}": float(1 + number) for number in range(popularity.MOST + 10)}
    kept = popularity.after(many, {}, 0.0)
    assert len(kept) == popularity.MOST
    assert min(kept.values()) == 11.0


async def test_as_many_models_are_shown_as_fit_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand small ones on ten nodes of a cloud."""
    digests = [f"sha256:{number:064x}" for number in range(spreading.SHOWN)]
    nodes = [FakeNode(f"i-{number:017x}", cpu=4.0, gpus=0) for number in range(10)]
    world = World(*nodes)
    for digest in digests:
        record = ModelRecord(digest=digest, uri=SOURCE, nbytes=MIB, partitions=(MIB,))
        world.view = world.view.put_model(record)
    for node in nodes:
        status = msgspec.structs.replace(
            node.report(),
            models=tuple(digests),
            remote=tuple(digests),
            copied=dict.fromkeys(digests, MIB),
            storage=Storage(ssd_limit=2 * len(digests) * MIB),
        )
        world.view = observe(world.view, status, world.now, 0.0)
    loop, none = cast(Any, SimpleNamespace(view=world.view)), cast(Any, None)
    made = spreading.Spreading(loop, none, none, none, dict.fromkeys(digests, 1.0))
    monkeypatch.setattr(spreading, "time", SimpleNamespace(monotonic=lambda: world.now))
    told = await made.shown()
    assert told.models
    assert len(told.models[0].wanted) == len(told.models[0].there) == len(nodes)
    assert len(codec.pack(ctl.Reply(value=msgspec.Raw(codec.pack(told))))) <= MAX_MESSAGE

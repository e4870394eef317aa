"""Where models lie: within limits, by popularity, and no more moved than has to be."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.control.replicas import Disk, Wish, spread, step

NAMES = [f"m{number}" for number in range(8)]
WISHES = st.lists(
    st.builds(
        Wish,
        digest=st.sampled_from(NAMES),
        nbytes=st.integers(1, 40),
        popularity=st.floats(0, 1000, allow_nan=False),
    ),
    max_size=8,
    unique_by=lambda wish: wish.digest,
)
SOME = st.frozensets(st.sampled_from(NAMES), max_size=4)
DISKS = st.lists(st.builds(Disk, node=st.sampled_from("abcdef"), limit=st.integers(0, 100), holds=SOME, owns=SOME),
                 max_size=6, unique_by=lambda disk: disk.node)  # fmt: skip


def replicas(placed: Mapping[str, frozenset[str]]) -> Counter[str]:
    return Counter(digest for digests in placed.values() for digest in digests)


def rank(wish: Wish) -> tuple[float, int, str]:
    """The more popular first; of those that are equally so the smaller ones, then by name."""
    return (-step(wish.popularity) if wish.popularity > 0 else inf, wish.nbytes, wish.digest)


def lying(disks: list[Disk], placed: Mapping[str, frozenset[str]]) -> list[Disk]:
    return [replace(disk, holds=placed[disk.node]) for disk in disks]


@given(WISHES, DISKS)
def test_no_limit_is_exceeded_and_nothing_lies_twice(wishes: list[Wish], disks: list[Disk]) -> None:
    sizes = {wish.digest: wish.nbytes for wish in wishes if wish.popularity > 0}
    placed = spread(wishes, disks)
    assert placed.keys() == {disk.node for disk in disks}
    for disk in disks:
        assert sum(sizes[digest] for digest in placed[disk.node]) <= disk.limit
        assert not placed[disk.node] & disk.owns


@given(WISHES, DISKS)
def test_the_more_popular_never_has_fewer(wishes: list[Wish], disks: list[Disk]) -> None:
    disks = [replace(disk, owns=frozenset()) for disk in disks]
    counts = replicas(spread(wishes, disks))
    for one in wishes:
        for other in wishes:
            if rank(one) <= rank(other) and one.nbytes <= other.nbytes:
                assert counts[one.digest] >= counts[other.digest], (one, other)


@given(WISHES, DISKS)
def test_what_lies_as_it_was_placed_stays(wishes: list[Wish], disks: list[Disk]) -> None:
    placed = spread(wishes, disks)
    assert spread(wishes, lying(disks, placed)) == placed


@settings(max_examples=50)
@given(WISHES, DISKS, st.data())
def test_small_moves_of_popularity_move_nothing(wishes: list[Wish], disks: list[Disk], data: st.DataObject) -> None:
    placed = spread(wishes, disks)
    moved = [
        replace(wish, popularity=data.draw(_within(wish.popularity))) if wish.popularity > 0 else wish
        for wish in wishes
    ]
    assert spread(moved, lying(disks, placed)) == placed


def _within(popularity: float) -> st.SearchStrategy[float]:
    """Popularities that are a little less or more, within a step."""
    near = st.floats(0.9 * popularity, 1.1 * popularity)
    return near.map(lambda other: other if other > 0 and step(other) == step(popularity) else popularity)


@given(WISHES, DISKS, st.sampled_from(NAMES))
def test_who_has_room_for_all_has_all_everywhere(wishes: list[Wish], disks: list[Disk], name: str) -> None:
    roomy = [replace(disk, limit=1000) for disk in disks]
    for disk in roomy:
        wanted = {wish.digest for wish in wishes if wish.popularity > 0} - disk.owns
        assert spread(wishes, roomy)[disk.node] == wanted


def test_each_has_one_before_any_has_two_and_then_the_most_popular_has_more() -> None:
    wishes = [Wish("rare", 10, 1.0), Wish("often", 10, 8.0), Wish("never", 10, 0.0)]
    disks = [Disk(node, 10) for node in "abc"]
    assert replicas(spread(wishes, disks)) == {"often": 2, "rare": 1}
    wider = [*disks, Disk("d", 10)]
    assert replicas(spread(wishes, wider)) == {"often": 3, "rare": 1}


def test_one_that_becomes_popular_takes_the_room_of_others_and_those_stay_where_they_are() -> None:
    disks = [Disk(node, 10) for node in "abcd"]
    before = spread([Wish("x", 10, 4.0), Wish("y", 10, 4.0)], disks)
    assert replicas(before) == {"x": 2, "y": 2}
    after = spread([Wish("x", 10, 64.0), Wish("y", 10, 4.0)], lying(disks, before))
    assert replicas(after) == {"x": 3, "y": 1}
    assert all(after[node] == before[node] for node in "abcd" if before[node] == {"x"})


def test_a_node_that_owns_a_model_is_a_replica_without_bytes() -> None:
    disks = [Disk("a", 10, owns=frozenset({"x"})), Disk("b", 10)]
    assert spread([Wish("x", 10, 1.0), Wish("y", 10, 1.0)], disks) == {"a": {"y"}, "b": {"x"}}


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 60), SOME), min_size=1, max_size=6), st.integers(1, 20))
def test_none_has_two_while_another_has_none(models: int, disks: list[tuple[int, frozenset[str]]], nbytes: int) -> None:
    """Models of one size, on disks whose limits are no multiples of it, wherever they lie now."""
    there = [Disk(f"n{number}", limit, holds) for number, (limit, holds) in enumerate(disks)]
    counts = replicas(spread([Wish(f"m{number}", nbytes, 1.0) for number in range(models)], there))
    assert len(counts) == min(models, sum(limit // nbytes for limit, _ in disks))
    assert len(counts) == models or set(counts.values()) <= {1}


def test_the_rest_of_each_disk_is_no_room() -> None:
    """Four disks of four models and a half have sixteen places, not eighteen: of twelve models each lies somewhere."""
    wishes = [Wish(f"m{number}", 10, 1.0) for number in range(12)]
    counts = replicas(spread(wishes, [Disk(node, 45) for node in "abcd"]))
    assert sorted(counts.values()) == [1] * 8 + [2] * 4


def test_what_lies_in_the_way_of_the_last_one_moves() -> None:
    disks = [Disk("a", 10, holds=frozenset({"x"})), Disk("b", 16)]
    wishes = [Wish("x", 6, 4.0), Wish("large", 10, 1.0), Wish("other", 10, 1.0)]
    assert spread(wishes[:2], disks) == {"a": {"x"}, "b": {"large"}}
    placed = spread(wishes, disks)
    assert placed == {"a": {"large"}, "b": {"x", "other"}}
    assert spread(wishes, lying(disks, placed)) == placed

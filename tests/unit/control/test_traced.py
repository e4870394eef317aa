"""What changed between two views is told from how one was made of the other: as a look at all of both tells it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.control import traced
from sllm_runtime.control.table import Table
from sllm_runtime.control.traced import Traced, changed
from sllm_runtime.protocol.records import InstanceRecord
from sllm_runtime.protocol.states import InstanceState

KEYS = st.sampled_from("abcde")


class Value:
    """Equal to every other one: what counts is which it is."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value)

    def __hash__(self) -> int:
        return 0


def by_looking(old: Mapping[str, Value], new: Mapping[str, Value]) -> set[str]:
    return {key for key in {*old, *new} if old.get(key) is not new.get(key)}


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.dictionaries(KEYS, st.sampled_from([Value(), Value()])), st.sets(KEYS)),
        max_size=30,
    ),
    st.integers(1, 8),
)
def test_the_keys_that_changed_are_those_that_a_look_at_all_finds(
    steps: list[tuple[int, dict[str, Value], set[str]]], most: int
) -> None:
    """Made from any one before, not only from the last; with a log that is soon full."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traced, "MOST_TRACED", most)
        made, wanted = [Traced[str, Value]()], [dict[str, Value]()]
        for which, come, gone in steps:
            before = which % len(made)
            made.append(made[before].after(come, gone))
            wanted.append({key: value for key, value in {**wanted[before], **come}.items() if key not in gone})
    assert [list(each.items()) for each in made] == [list(each.items()) for each in wanted]
    for old in made:
        for new in made:
            found = list(changed(old, new))
            assert len(found) == len(set(found))
            assert set(found) == by_looking(old, new)
            assert set(changed(dict(old), new)) == set(changed(old, dict(new))) == set(found)


def test_what_follows_from_it_is_known_without_a_look_at_all() -> None:
    first = Traced({str(number): Value() for number in range(100)})
    last = first.after({"7": Value()}).after({"new": Value()}, ["3", "never there"]).after({"7": Value()})
    assert list(last.since(first) or ()) == ["7", "new", "3"]
    assert list(changed(first, last)) == ["7", "new", "3"]
    beside = first.after({"8": Value()})
    assert beside.since(first) is None
    assert beside.since(last) is None
    assert first.since(last) is None
    assert list(beside.after({"9": Value()}).since(beside) or ()) == ["9"]


def test_a_log_has_an_end() -> None:
    made = first = Traced[int, int]()
    for number in range(3 * traced.MOST_TRACED):
        made = made.after({number % 3: number})
        assert len(made._log) <= traced.MOST_TRACED + 1
    assert made.since(first) is None
    assert set(changed(first, made)) == {0, 1, 2}


class Placed:
    """An instance that has its record alone."""

    def __init__(self, name: str, node: str, function: str) -> None:
        self.record = InstanceRecord(instance=name, function=function, version=1, node=node, state=InstanceState.READY)


INSTANCES = [
    Placed(f"{node}{function}{number}", node, function) for node in "nm" for function in "fg" for number in "01"
]


@given(st.lists(st.tuples(st.integers(0, 30), st.sets(st.sampled_from(INSTANCES)), st.booleans()), max_size=20))
def test_a_table_has_those_of_a_node_and_of_a_version(steps: list[tuple[int, set[Placed], bool]]) -> None:
    """However it came to have them; a group without any is none."""
    made, wanted = [Table[Placed]()], [dict[str, Placed]()]
    for which, some, come in steps:
        before = which % len(made)
        there = wanted[before]
        if come:
            made.append(made[before].put(*some))
            wanted.append(there | {each.record.instance: each for each in some})
        else:
            names = {each.record.instance for each in some} & there.keys()
            made.append(made[before].without(names))
            wanted.append({name: each for name, each in there.items() if name not in names})
    for table, there in zip(made, wanted, strict=True):
        assert dict(table) == there
        assert set(table.nodes) == {each.record.node for each in there.values()}
        for node in "nm":
            assert dict(table.on(node)) == {name: each for name, each in there.items() if each.record.node == node}
        for function in "fg":
            of_it = {name: each for name, each in there.items() if each.record.function == function}
            assert dict(table.of((function, 1))) == of_it
    for old in made:
        for new in made:
            differ = {node for node in "nm" if dict(old.on(node)) != dict(new.on(node))}
            assert differ <= set(changed(old.nodes, new.nodes))

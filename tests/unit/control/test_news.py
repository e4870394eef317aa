"""What of a report, and of a view, counts as a change."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.control.reports import news
from sllm_runtime.control.table import changed
from sllm_runtime.protocol.node import InstanceStatus
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.scheduling.cluster import node

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

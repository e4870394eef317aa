"""What a worker makes of the part of an instance that it is given."""

from __future__ import annotations

import os
import socket
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.protocol.errors import InvalidArgument, OutOfMemory, ProtocolError
from sllm_runtime.protocol.manifest import Handler, Manifest
from sllm_runtime.protocol.worker import Assign, Member
from sllm_runtime.worker.joined import Joined
from sllm_runtime.worker.parts import layers_of, ranges
from tests.fixtures.waiting import GIVE_UP_S


@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_share_all_layers_out_evenly(count: int, stages: int) -> None:
    if stages > count:
        with pytest.raises(InvalidArgument, match=f"{count} layers cannot be shared out over {stages} stages"):
            layers_of(count, stages, 0)
        return
    found = [layers_of(count, stages, number) for number in range(stages)]
    assert (found[0].low, found[-1].high) == (0, count)
    assert all(one.high == other.low for one, other in pairwise(found))
    sizes = {each.high - each.low for each in found}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@given(st.lists(st.integers(0, 40)))
def test_ranges_hold_each_block_once(blocks: list[int]) -> None:
    found = ranges(blocks)
    assert [block for first, last in found for block in range(first, last + 1)] == sorted(set(blocks))
    assert all(one[1] + 1 < other[0] for one, other in pairwise(found)), "those that touch are one"


def assigned(member: Member) -> Assign:
    handler = Handler(entry="user:fn", kind="generator", streams=True)
    manifest = Manifest(name="fn", handler=handler, startup_timeout=GIVE_UP_S)
    return Assign(instance="fn-1", function="fn", version=1, manifest=manifest, bundle="", member=member)


def test_sockets_that_are_not_as_many_as_the_part_has_are_refused_and_closed() -> None:
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    with pytest.raises(ProtocolError, match="3 descriptors came"):
        Joined.of(assigned(Member(number=1, stages=2)), fds)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_one_process_has_nobody_to_be_joined_to() -> None:
    fds = [1, 2]
    assert Joined.of(assigned(Member()), fds) is None
    assert fds == [1, 2]


@pytest.mark.parametrize("kind", ["stages", "ranks"])
def test_who_cannot_begin_tells_the_other_why(kind: str) -> None:
    """Also where it has not come to the meeting yet."""
    members = [Member(number=number, **{kind: 2}) for number in (0, 1)]
    first, second = (list(pair) for pair in zip(socket.socketpair(), socket.socketpair(), strict=True))
    if kind == "stages":  # what goes to the one behind comes from before
        second.reverse()
    joined = []
    for member, sockets in zip(members, (first, second), strict=True):
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)] + [each.detach() for each in sockets]
        made = Joined.of(assigned(member), fds)
        assert made is not None
        assert len(fds) == 2, "its own stay"
        for fd in fds:
            os.close(fd)
        joined.append(made)
    head, other = joined
    other.fail(OutOfMemory("it needs more"))
    with pytest.raises(OutOfMemory, match="it needs more"):
        head.edges[0].receive(GIVE_UP_S)
    head.fail(OutOfMemory("so does this"))

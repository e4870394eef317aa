"""Ranks that gather over shared memory, each in a thread: the same bits everywhere, and one that is gone."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
import torch

from sllm_runtime.protocol.errors import InstanceLost, ProtocolError
from sllm_runtime.worker.engine.ours.parallel.meeting import Peers
from sllm_runtime.worker.engine.ours.parallel.shared import SLOT_BYTES, SharedGroup
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.worker.engine.ranks_met import met


def shared(rank: int, peers: Peers) -> SharedGroup:
    return SharedGroup(rank, peers, patience_s=GIVE_UP_S)


def part(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (33, 17), (3, SLOT_BYTES // 4 + 5)], ids=["row", "odd", "pieces"])
def test_a_sum_has_the_same_bits_in_every_rank(shape: tuple[int, int], dtype: torch.dtype) -> None:
    with met(shared, 3) as (_, everywhere):
        expected = part(0, *shape, dtype=dtype).to(torch.float32)
        for rank in (1, 2):
            expected += part(rank, *shape, dtype=dtype)
        for _ in range(3):  # slots are used again
            totals = everywhere(lambda group: group.total(part(group.rank, *shape, dtype=dtype)))
            assert all(torch.equal(total, expected.to(dtype)) for total in totals)


def test_columns_stand_side_by_side() -> None:
    widths = (3, 5, 4)
    with met(shared, 3) as (_, everywhere):
        joined = everywhere(lambda group: group.columns(part(group.rank, 7, widths[group.rank]), widths))
    expected = torch.cat([part(rank, 7, width) for rank, width in enumerate(widths)], 1)
    assert all(torch.equal(each, expected) for each in joined)


def test_one_that_is_gone_is_named_and_the_others_hear_of_it() -> None:
    with met(shared, 3) as (groups, everywhere):
        groups[1].close()

        def lost(group: SharedGroup) -> str:
            with contextlib.closing(group), pytest.raises(InstanceLost) as caught:
                group.total(part(group.rank, 2, 2))
            return caught.value.message

        zero, one, two = everywhere(lost)
        assert one == "the ranks of this instance have parted"
        assert "is gone" in zero
        assert "is gone" in two


def test_one_that_never_comes_or_brings_something_else_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(InstanceLost, match="rank 1 of 2 says nothing"):
        SharedGroup(0, {1: ours}, patience_s=0.1)
    ours, theirs = socket.socketpair()
    with theirs:
        fd = os.memfd_create("small")
        try:
            socket.send_fds(theirs, [b"\1"], [fd])
        finally:
            os.close(fd)
        with pytest.raises(ProtocolError, match="no sealed memfd"):
            SharedGroup(0, {1: ours}, patience_s=GIVE_UP_S)

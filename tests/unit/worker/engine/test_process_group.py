"""Ranks that gather through torch.distributed, each in a thread: what they meet by, and what is left when they part."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
import torch

from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.worker.engine.ours.parallel.group import ProcessGroup
from sllm_runtime.worker.engine.ours.parallel.meeting import Peers, exchanged
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.worker.engine.ranks_met import met


def through_gloo(rank: int, peers: Peers) -> ProcessGroup:
    return ProcessGroup("gloo", rank, peers, patience_s=GIVE_UP_S)


def part(rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))


def test_sums_are_made_in_the_order_of_ranks_and_one_that_parted_is_named() -> None:
    with met(through_gloo, 3) as (groups, everywhere):
        expected = part(0) + part(1) + part(2)
        for _ in range(2):
            assert all(torch.equal(each, expected) for each in everywhere(lambda group: group.total(part(group.rank))))
        wide = everywhere(lambda group: group.columns(part(group.rank)[:, : group.rank + 1], (1, 2, 3)))
        assert all(torch.equal(each, torch.cat([part(at)[:, : at + 1] for at in range(3)], 1)) for each in wide)
        groups[1].close()
        groups[1].close()

        def gone(group: ProcessGroup) -> str:
            with contextlib.closing(group), pytest.raises(InstanceLost) as caught:
                group.total(part(group.rank))
            return caught.value.message

        zero, one, two = everywhere(gone)
        assert one == "the ranks of this instance have parted"
        assert "gone" in zero
        assert "gone" in two


def test_one_that_does_not_come_is_named() -> None:
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(InstanceLost, match="rank 1 of 2 says nothing"):
        ProcessGroup("gloo", 0, {1: ours}, patience_s=0.1)
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(InstanceLost, match="rank 0 of 2 is gone"):
        ProcessGroup("gloo", 1, {0: ours}, patience_s=GIVE_UP_S)


def test_one_that_goes_once_it_has_come_is_named() -> None:
    """Before the library has joined them: its own deadline ends the wait."""
    ours, theirs = socket.socketpair()
    with theirs:
        fd = os.memfd_create("theirs")
        socket.send_fds(theirs, [b"\1"], [fd])
        os.close(fd)
    with pytest.raises(InstanceLost, match="rank 1 of 2 is gone"):
        ProcessGroup("gloo", 0, {1: ours}, patience_s=0.2)


def test_what_comes_without_a_descriptor_is_no_meeting_and_nothing_is_kept() -> None:
    (ours, theirs), (mine, other) = socket.socketpair(), socket.socketpair()
    own = os.memfd_create("own")
    with ours, theirs, mine, other:
        socket.send_fds(theirs, [b"\1"], [own])
        other.sendall(b"\1")
        with pytest.raises(InstanceLost, match="rank 2 of 3 is gone"):
            exchanged({1: ours, 2: mine}, own)
    os.close(own)

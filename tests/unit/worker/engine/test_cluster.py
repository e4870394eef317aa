"""Ranks leave the network together: they are in one namespace, with a loopback and nothing else."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
from typing import Any

import pytest

from sllm_invoker.wiring import wired
from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.protocol.manifest import Handler, Manifest
from sllm_runtime.protocol.worker import Assign, Member
from sllm_runtime.worker import cluster, isolation
from tests.fixtures.nursery import Nursery
from tests.fixtures.waiting import GIVE_UP_S

pytestmark = pytest.mark.timeout(300)  # the first waits for the imports of another process


def told(nursery: Nursery, *, network: bool) -> list[dict[str, Any]]:
    """What two ranks say of the network that they are in."""
    members = tuple(Member(number=number, ranks=2) for number in range(2))
    pipes = [os.pipe() for _ in members]
    with wired(members) as edges:
        for number, (own, pipe) in enumerate(zip(edges, pipes, strict=True)):
            part = "tests.fixtures.engine_parts:clustered"
            nursery.fork(part, (*own, pipe[1]), rank=number, ranks=2, network=network)
            os.close(pipe[1])
    found = []
    for reader, _ in pipes:
        assert select.select([reader], [], [], GIVE_UP_S)[0]
        found.append(json.loads(os.read(reader, 4096)))
        os.close(reader)
    return found


def test_ranks_talk_over_a_loopback_that_is_theirs_alone(nursery: Nursery) -> None:
    if isolation.leave() is isolation.Leave.NEVER:
        pytest.skip("the kernel permits no network namespaces here (they need root or a user namespace)")
    first, second = told(nursery, network=False)
    assert first["space"] == second["space"] != os.stat("/proc/self/ns/net").st_ino
    assert first["beyond"] == second["beyond"] == errno.ENETUNREACH
    assert first["said"] == "over loopback"


def test_who_may_have_the_network_stays_in_it(nursery: Nursery) -> None:
    first, second = told(nursery, network=True)
    assert first["space"] == second["space"] == os.stat("/proc/self/ns/net").st_ino


def test_a_rank_0_that_is_gone_is_named() -> None:
    handler = Handler(entry="user:fn", kind="function", streams=False)
    made = Manifest(name="fn", handler=handler)
    member = Member(number=1, ranks=2)
    assign = Assign(instance="fn-1", function="fn", version=1, manifest=made, bundle="", member=member, cluster=True)
    (stream, far), (sums, other) = socket.socketpair(), socket.socketpair()
    with stream, far, sums:
        other.close()
        with pytest.raises(InstanceLost, match="rank 0 of 2 is gone"):
            cluster.leave_network(assign, [stream.fileno(), sums.fileno()])

"""Ranks leave the network together: they are in one namespace, with a loopback and nothing else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
from typing import Any

import msgspec
import pytest

from sllm_invoker.wiring import wired
from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import InstanceLost, StartFailed
from sllm_runtime.protocol.manifest import Handler, Manifest
from sllm_runtime.protocol.worker import Assign, Failed, FromWorker, Hello, Member, ToWorker
from sllm_runtime.worker import cluster, isolation
from sllm_runtime.worker.engine.ours.parallel.meeting import TOLD
from sllm_runtime.worker.main import Warming, Worker
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


def assigned(member: Member) -> Assign:
    handler = Handler(entry="user:fn", kind="function", streams=False)
    made = Manifest(name="fn", handler=handler)
    cluster = member.ranks > 1
    return Assign(instance="fn-1", function="fn", version=1, manifest=made, bundle="", member=member, cluster=cluster)


def test_a_rank_0_that_is_gone_is_named() -> None:
    assign = assigned(Member(number=1, ranks=2))
    (stream, far), (sums, other) = socket.socketpair(), socket.socketpair()
    with stream, far, sums:
        other.close()
        with pytest.raises(InstanceLost, match="rank 0 of 2 is gone"):
            cluster.leave_network(assign, [stream.fileno(), sums.fileno()])


@pytest.fixture
def used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network namespaces that this user may have."""
    monkeypatch.setattr(isolation, "leave_network", lambda: False)
    monkeypatch.setattr(isolation, "enter_network", lambda _fd: False)


@pytest.mark.usefixtures("used_up")
@pytest.mark.parametrize("can", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_who_does_not_leave_the_network_starts_only_where_nobody_can(number: int, can: bool) -> None:
    """Or it would run with the node's, whatever its manifest says. Number 1 is told of rank 0's."""
    assign = assigned(Member(number=number, ranks=number + 1))
    (stream, far), (sums, other) = socket.socketpair(), socket.socketpair()
    with stream, far, sums, other:
        socket.send_fds(other, [TOLD], [0])
        with pytest.raises(StartFailed, match="cannot leave the node's") if can else contextlib.nullcontext():
            cluster.leave_network(assign, [stream.fileno(), sums.fileno()], can=can)


@pytest.mark.usefixtures("used_up")
def test_a_worker_that_does_not_leave_the_network_says_so_and_ends() -> None:
    ours, theirs = map(BlockingWire, socket.socketpair())
    ours.send(codec.pack(ToWorker(msgspec.structs.replace(assigned(Member()), fds=0))))
    assert Worker(theirs).run(0.0, Warming((), isolation.Leave.FOR_NOW)) == 1
    theirs.close()
    said = [codec.unpack(FromWorker, payload).body for payload in iter(ours.receive, None)]
    ours.close()
    hello, failed = said
    assert isinstance(hello, Hello)
    assert isinstance(failed, Failed)
    assert failed.error.code == "start_failed"

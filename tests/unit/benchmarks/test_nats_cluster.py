"""The three servers of ``nats_cluster`` that are of no use where one is missing."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import cast

import pytest

from benchmarks.chaos_faults import Field, Victim, strike
from benchmarks.chaos_schedule import Fault, Kind
from benchmarks.nats_cluster import NAMES, NatsCluster
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed


def test_where_one_does_not_start_none_is_left(tmp_path: Path) -> None:
    servers = NatsCluster(tmp_path)
    port = int(servers.urls[NAMES[1]].rpartition(":")[2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(ProgramFailed, match=f"{NAMES[1]} has ended"), servers:
            pytest.fail("it has come up")
    assert not servers.pids()


def test_a_server_that_chaos_has_killed_is_there_again_before_the_next_fault(tmp_path: Path) -> None:
    """Of three one at a time is struck: with two away nothing is stored."""
    killed = Fault(Kind("nats", "killed"), 0.0, 0.0, 0.0)
    with NatsCluster(tmp_path) as nats:
        place = Field(cast(Platform, None), "f", nats)
        for victim in place.victims("nats") * 2:
            old = nats.pids()[victim.name.removeprefix("nats-")]
            assert strike(Victim(victim.name, old), killed) is not False
            place.mend()
            assert set(nats.pids()) == {*NAMES}, f"{victim.name} is away"
            assert old not in nats.pids().values()

"""The three servers of ``nats_cluster`` that are of no use where one is missing."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks.nats_cluster import NAMES, NatsCluster
from benchmarks.programs import ProgramFailed


def test_where_one_does_not_start_none_is_left(tmp_path: Path) -> None:
    servers = NatsCluster(tmp_path)
    port = int(servers.urls[NAMES[1]].rpartition(":")[2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(ProgramFailed, match=f"{NAMES[1]} has ended"), servers:
            pytest.fail("it has come up")
    assert not servers.pids()

"""One of three NATS servers dies in each step of a move: not a token of the call is lost, repeated or different."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil
import pytest

from benchmarks.nats_cluster import NatsCluster
from tests.fixtures.held import STEPS, Flow, flowing

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


class Place(NamedTuple):
    """A platform and the servers that it lies on."""

    flow: Flow
    nats: NatsCluster


@pytest.fixture(scope="module")
def place(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("platform")
    with NatsCluster(directory / "nats") as nats, flowing(directory, coder, env=nats.env) as flow:
        yield Place(flow, nats)


def server_of(nats: NatsCluster, pid: int) -> str:
    """The one that a process is connected to."""
    ports = {urlsplit(url).port: name for name, url in nats.urls.items()}
    far = [each.raddr.port for each in psutil.Process(pid).net_connections() if each.raddr]
    (found,) = {ports[port] for port in far if port in ports}
    return found


@pytest.mark.leaves_behind("processes")  # the server that is started again
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("victim", ["leader", "gateway-server"])
def test_a_server_dies(place: Place, step: str, victim: str) -> None:
    """The one that leads the state's stream, or the one that the call's gateway speaks to."""
    flow, nats = place
    with flow.move(step) as met:
        name = nats.leader() if victim == "leader" else server_of(nats, met.gateway)
        nats.kill(name)
        assert flow.rest(met) == met.right
    nats.start(name)

"""Containers of one model share its weights; what is left of containers whose loaderd, monitor, invoker or engine is
killed or breaks: nothing."""

import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from sllm_invoker.containers.engine import Engine
from sllm_loaderd.chunk import MEMFD_NAME
from sllm_runtime.protocol.http import API
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import sllm_json
from tests.fixtures.containers import ECHO, LIMITS, SMALL, call, ids, listed, rendezvous, traces
from tests.fixtures.deployed import client_of, deploy, live, wait, wait_gone, worker_of

pytestmark = [pytest.mark.container, pytest.mark.slow, pytest.mark.timeout(1500)]

ASK = {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0}
LONG = {**ASK, "max_tokens": 400}
PAGE = os.sysconf("SC_PAGE_SIZE")
PRESENT, FRAME = 1 << 63, (1 << 55) - 1


class Breakable:
    """The engine's program as the node finds it: the real one, or one that refuses everything."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self.directory = directory
        self._broken = directory / "broken"
        program = directory / engine.kind
        directory.mkdir()
        program.write_text(
            f"#!/bin/sh\n[ -e {self._broken} ] && echo its store is locked >&2 && exit 125\n"
            f'exec {engine.program} "$@"\n'
        )
        program.chmod(0o755)

    def break_(self) -> None:
        self._broken.touch()

    def repair(self) -> None:
        self._broken.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def breakable(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Breakable:
    return Breakable(engine, tmp_path_factory.mktemp("engine") / "bin")


@pytest.fixture(scope="module")
def cluster(
    image: str, engine: Engine, breakable: Breakable, coder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    path = f"{breakable.directory}:{os.environ['PATH']}"
    env = {**LIMITS, "SLLM_SANDBOX": engine.kind, "SLLM_IMAGE": image, "PATH": path}
    with Cluster(tmp_path_factory.mktemp("platform"), env=env) as running:
        for name in ("coder", "twin"):
            deploy(running, str(coder / "function.py"), name=name, keep_alive=3600)
        yield running


def completes(cluster: Cluster, name: str, ask: dict[str, object] = ASK) -> list[str]:
    with client_of(cluster) as client:
        return list(client.stream(name, ask))


# --- weights --------------------------------------------------------------------------------------
Page = tuple[str, int]
"""A memory file's inode, and a page's number in it."""


def mappings(pid: int) -> Iterator[tuple[int, int, int, str, dict[str, int]]]:
    """Of weights: beginning, end, offset in the file, inode, and the bytes that smaps tells of."""
    head: tuple[int, int, int, str] | None = None
    told: dict[str, int] = {}
    for line in [*Path(f"/proc/{pid}/smaps").read_text().splitlines(), "0-0 end"]:
        words = line.split()
        if words[0].endswith(":"):
            if words[-1] == "kB":
                told[words[0][:-1]] = int(words[1]) * 1024
            continue
        if head is not None:
            yield (*head, told)
        told, head = {}, None
        if f"/memfd:{MEMFD_NAME} " in line:
            start, _, end = words[0].partition("-")
            head = (int(start, 16), int(end, 16), int(words[2], 16), words[4])


def total(pid: int, kind: str, files: frozenset[str]) -> int:
    """Bytes of these files (inodes) that the process has mapped, counted so."""
    return sum(told.get(kind, 0) for _, _, _, inode, told in mappings(pid) if inode in files)


def files_of(pid: int) -> frozenset[str]:
    return frozenset(inode for _, _, _, inode, _ in mappings(pid))


def frames(pid: int) -> dict[Page, int]:
    """The physical page under each page of weights that this process has mapped; 0 where the kernel hides which."""
    found = {}
    with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
        for start, end, offset, inode, _ in mappings(pid):
            pagemap.seek(start // PAGE * 8)
            entries = struct.unpack(f"{(end - start) // PAGE}Q", pagemap.read((end - start) // PAGE * 8))
            pages = ((offset // PAGE + number, entry) for number, entry in enumerate(entries))
            found.update({(inode, number): entry & FRAME for number, entry in pages if entry & PRESENT})
    return found


def test_two_containers_of_one_model_share_the_pages_of_its_weights(cluster: Cluster) -> None:
    assert completes(cluster, "coder") == completes(cluster, "twin")
    one, other = worker_of(cluster, "coder"), worker_of(cluster, "twin")
    nbytes = sum(path.stat().st_size for path in (cluster.data / "nodes").rglob("partition_*.bin"))
    files = files_of(one)  # loaderd has those of its whole pool
    there = total(one, "Rss", files)
    assert there > 0.9 * nbytes > 0, "all of it is mapped"
    for pid in (one, other):
        assert total(pid, "Pss", files) <= 0.55 * there, "each counts for half of it at most"
        assert total(pid, "Private_Dirty", files) == 0
    # With loaderd, who has all of the files mapped, also what lies behind the weights, they lie in memory once.
    loaderd = cluster.pid("loaderd")
    assert sum(total(pid, "Pss", files) for pid in (one, other, loaderd)) <= 1.05 * total(loaderd, "Rss", files)


def test_they_are_the_same_page_frames(cluster: Cluster) -> None:
    assert completes(cluster, "coder") == completes(cluster, "twin")
    one, other = frames(worker_of(cluster, "coder")), frames(worker_of(cluster, "twin"))
    shared = one.keys() & other.keys()
    assert len(shared) > 0.9 * len(one) > 0
    if not any(one.values()):
        pytest.skip("the kernel hides page frames from this user (/proc/PID/pagemap)")
    assert {page: one[page] for page in shared} == {page: other[page] for page in shared}


# --- what is killed -------------------------------------------------------------------------------
def test_a_killed_loaderd_takes_no_container_with_it(cluster: Cluster, engine: Engine, coder: Path) -> None:
    right, before = completes(cluster, "coder", LONG), live(cluster, "coder")
    with client_of(cluster) as client:
        stream = client.stream("coder", LONG)
        begun = [next(stream)]
        old = cluster.kill("loaderd")
        assert begun + list(stream) == right
    cluster.wait_restarted("loaderd", old)
    assert completes(cluster, "coder", LONG) == right
    assert live(cluster, "coder") == before
    deploy(cluster, str(coder / "function.py"), name="after")  # its weights come from the new one
    assert completes(cluster, "after", LONG) == right
    with client_of(cluster) as client:
        client.request("DELETE", f"{API}/functions/after")
    wait(lambda: rendezvous(cluster) == listed(cluster, engine), "what has ended is gone")


def test_a_container_whose_monitor_is_killed_works_on_and_leaves_nothing(cluster: Cluster, engine: Engine) -> None:
    deploy(cluster, str(ECHO), name="watched", keep_alive=3600, **SMALL)
    pid = worker_of(cluster, "watched")
    ((name, number),) = [(name, each) for name, each in ids(cluster, engine).items() if each in group(pid)]
    monitor = cluster.data / "nodes" / "n1" / "invoker" / "sandboxes" / name / "monitor"
    if not monitor.exists():
        pytest.skip(f"{engine.kind} has no monitor for each container")
    assert traces({number})
    os.kill(int(monitor.read_text()), signal.SIGKILL)
    assert call(cluster, "watched", text="still") == {"text": "still", "length": 5}
    with client_of(cluster) as client:
        client.request("DELETE", f"{API}/functions/watched")
    wait_gone({pid})
    wait(lambda: name not in listed(cluster, engine) | rendezvous(cluster), "the container is removed")
    wait(lambda: not traces({number}), lambda: f"nothing is left of it: {traces({number})}")


def group(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def test_an_engine_that_breaks_is_a_condition_of_its_node_until_it_works(
    cluster: Cluster, breakable: Breakable
) -> None:
    def condition() -> str:
        (node,) = sllm_json(cluster.env, "node", "list")["nodes"]
        return str(node["condition"])

    right = completes(cluster, "coder")
    assert condition() == ""
    breakable.break_()
    try:
        deploy(cluster, str(ECHO), name="last", keep_alive=3600, **SMALL)  # takes the warm one; another cannot be made
        wait(lambda: "its store is locked" in condition(), "the node says what is the matter")
        assert sllm_json(cluster.env, "node", "describe", "n1")["condition"] == condition()
        assert completes(cluster, "coder") == right, "what runs goes on"
        assert call(cluster, "last", text="a") == {"text": "a", "length": 1}
        explained = sllm_json(cluster.env, "explain", "last")
        assert "its store is locked" in explained["candidates"][0]["why"]
    finally:
        breakable.repair()
    wait(lambda: condition() == "", "it works again")
    deploy(cluster, str(ECHO), name="first", **SMALL)
    assert call(cluster, "first", text="b") == {"text": "b", "length": 1}


def test_a_killed_invoker_leaves_nothing_behind(cluster: Cluster, engine: Engine) -> None:
    right = completes(cluster, "coder")
    before = ids(cluster, engine)
    assert len(before) >= 3  # two at work, one warm
    cluster.wait_restarted("invoker", cluster.kill("invoker"))
    wait(lambda: not before.keys() & listed(cluster, engine), "the containers of its former life are gone")
    wait(lambda: not traces(set(before.values())), lambda: f"nothing is left: {traces(set(before.values()))}")
    assert completes(cluster, "coder") == right
    assert not before.keys() & rendezvous(cluster)

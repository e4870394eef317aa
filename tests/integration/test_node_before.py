"""A node of an earlier version, its fork server and workers included, under a controller and a gateway of today."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.programs import ROOT
from sllm_runtime.platform.process import start_time
from sllm_runtime.protocol.http import API, InstanceView
from sllm_runtime.worker.engine.ours.model.host import VARIABLES
from tests.fixtures.cluster import QUICK, Cluster
from tests.fixtures.deployed import deploy, wait, worker_of
from tests.fixtures.existing_nats import server
from tests.fixtures.moving import AT, ask, deploy_gated, moved, other, read_while, settled, whole
from tests.fixtures.streams import Stream
from tests.fixtures.waiting import GIVE_UP_S

BEFORE = "feff89b"
"""The commit that is the version before: the first whose machines join a cluster by themselves."""
SAME_BITS = "a97a673"
"""A later one, since which engines compute the same bits: only between such do running calls move."""
PARTS = ("runtime", "invoker", "loaderd", "gateway", "sdk")


def interpreter(directory: Path, commit: str = BEFORE) -> Path:
    """A Python that imports our packages of that commit, and everybody else's as this one does."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit, *PARTS], capture_output=True, check=False)
    if archive.returncode:
        why = archive.stderr.decode().strip()
        pytest.fail(f"the version before cannot be had, commit {commit}: {why}; `git fetch --unshallow` brings it")
    tree = directory / "tree"
    tree.mkdir()
    subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
    venv.create(directory / "python", symlinks=True)
    (site,) = (directory / "python").glob("lib/python*/site-packages")
    places = [str(tree / part) for part in PARTS] + [sysconfig.get_path("purelib")]
    (site / "before.pth").write_text("\n".join(places))
    python = directory / "python" / "bin" / "python"
    asked = "import sllm_invoker, sllm_loaderd, sllm_runtime as r; print(sllm_invoker.__file__, r.__file__)"
    said = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True, cwd=directory).stdout
    assert all(Path(place).is_relative_to(tree) for place in said.split()), said
    return python


@contextmanager
def node(python: Path, directory: Path, env: dict[str, str], name: str = "before") -> Iterator[None]:
    """``sllm up --node`` of that Python."""
    argv = [str(python), "-m", "sllm_runtime.platform", "up", "--node", "--json", "--with-parent"]
    bits = {each: os.environ[each] for each in VARIABLES if each in os.environ}  # as the other node has them
    given = {"PATH": os.environ["PATH"], "TMPDIR": str(directory), **bits, **QUICK, **env, "SLLM_NODE": name}
    with (directory / "node.log").open("wb") as log:
        process = subprocess.Popen(
            [*argv, "--data", str(directory / "node")], env=given, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=log,
        )  # fmt: skip
    pids: dict[str, int] = {}
    try:
        line = Cluster.first_line(process)
        assert line, (directory / "node.log").read_text()
        pids = json.loads(line)["pids"]
        yield
    finally:
        process.terminate()
        process.wait(GIVE_UP_S)
        if process.stdout is not None:
            process.stdout.close()
    assert all(start_time(pid) is None for pid in pids.values()), pids


def test_a_node_of_the_version_before_serves_and_its_calls_outlive_a_worker(coder: Path, tmp_path: Path) -> None:
    """A function that streams, and one of the engine, whose worker is killed in the middle of a call."""
    python = interpreter(tmp_path)
    with (
        server(tmp_path) as url,
        Cluster(tmp_path, nodes=0, env={"SLLM_NATS_URL": url}) as cluster,
        node(python, tmp_path, {"SLLM_NATS_URL": url}),
    ):
        wait(lambda: cluster.http.get(f"{API}/nodes").json()["nodes"], "the node is known")
        deploy(cluster, "slow_stream", name="paced", memory="64MiB")
        with Stream(cluster, "paced", {"count": 20, "pause": 0.001}) as stream:
            assert list(stream.values()) == list(range(20))
        times = {"keep_alive": 300, "idle_timeout": 600, "timeout": 1200}
        deploy(cluster, "gated_coder::fn", name="coder", model=str(coder / "model"), **times)
        gate = tmp_path / "gate"
        gate.touch()
        with Stream(cluster, "coder", {"gate": str(gate), "at": AT}) as stream:
            right = list(stream.values())
        gate.unlink()
        pieces = []
        with Stream(cluster, "coder", {"gate": str(gate), "at": AT}) as stream:
            for piece in stream.values():
                pieces.append(piece)
                if len(pieces) == AT:
                    os.kill(worker_of(cluster, "coder"), signal.SIGKILL)
                    gate.touch()
            assert stream.error is None
            assert stream.done
        assert pieces == right


@pytest.mark.slow
@pytest.mark.parametrize(("commit", "moves"), [(SAME_BITS, ["DONE", "DONE"]), (BEFORE, ["ABANDONED"])])
def test_running_calls_move_to_a_node_of_the_version_before_and_back(
    commit: str, moves: list[str], coder: Path, tmp_path: Path
) -> None:
    """As they do while machines are replaced one after the other, also where the new release is taken back. One whose
    engine computes other bits is no place for them: they stay."""
    python = interpreter(tmp_path, commit)
    with (
        server(tmp_path) as url,
        Cluster(tmp_path, nodes=1, env={"SLLM_NATS_URL": url}) as cluster,
        node(python, tmp_path, {"SLLM_NATS_URL": url}, "n2"),
    ):
        wait(lambda: len(cluster.http.get(f"{API}/nodes").json()["nodes"]) == 2, "both nodes are known")
        deploy_gated(cluster, coder)
        right = whole(cluster, tmp_path / "open")
        for number, ends in enumerate(moves):
            source, before = settled(cluster), moved(cluster)
            states: list[str] = []

            def act(source: InstanceView = source, states: list[str] = states) -> None:
                states.append(ask(cluster, source)["state"])

            assert read_while(cluster, tmp_path / f"gate{number}", act) == right
            assert states == [ends]
            assert moved(cluster) == before + (ends == "DONE")
            assert settled(cluster).node == (other(source.node) if ends == "DONE" else source.node)

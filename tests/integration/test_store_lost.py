"""NATS comes back without what it had stored, or with what it had last week; nodes and gateways have lived on."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.cluster import Cluster
from tests.fixtures.command import here, sllm_json
from tests.fixtures.deployed import wait
from tests.fixtures.suspended import suspend, suspended
from tests.fixtures.waiting import GIVE_UP_S

FUNCTION = """
from sllm import model_function

@model_function(memory="256MiB")
def answers(prompt: str) -> str:
    return prompt + "!"
"""


SAYS = """
from sllm import model_function

@model_function(name="{name}", memory="256MiB", keep_alive=300)
def says() -> str:
    return "{says}"
"""


@pytest.mark.parametrize("how", ["begins anew", "is set back"])
def test_nodes_and_gateways_follow_the_controller_of_a_store_that(tmp_path: Path, how: str) -> None:
    with Cluster(tmp_path) as cluster:
        store, copy = cluster.data / "nats" / "jetstream", tmp_path / "copy"
        nats = cluster.pid("nats")
        with suspended(nats):
            shutil.copytree(store, copy)
        for _ in range(2):  # as it gets in the life of any cluster: each controller has a term of its own
            cluster.wait_restarted("controller", cluster.kill("controller"))
            wait(lambda: cluster.http.get("/readyz").status_code == 200, "a controller leads")
        suspend(nats)
        shutil.rmtree(store)
        if how == "is set back":
            shutil.copytree(copy, store)
        os.kill(nats, signal.SIGKILL)
        cluster.wait_restarted("nats", nats)
        wait(lambda: cluster.http.get("/readyz").status_code == 200, "a controller leads")
        file = tmp_path / "function.py"
        file.write_text(FUNCTION)
        argv = [sys.executable, "-m", "sllm", "fn", "deploy", str(file)]
        env = cluster.env
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=2 * GIVE_UP_S)
        assert done.returncode == 0, done.stderr + cluster.logs()
        assert cluster.http.post("/fn/answers", json={"prompt": "so"}).text == '"so!"'
        assert "sllm_controller_leads 1.0" in cluster.http.get("/metrics").text.splitlines()


def test_a_backup_that_is_put_back_is_obeyed_by_nodes_and_gateways_that_live_on(tmp_path: Path) -> None:
    """What was deployed since is unknown again, also where it runs; its numbers are given to other versions."""
    with Cluster(tmp_path) as cluster:
        deployed(cluster, tmp_path, "kept", "one")
        assert said(cluster, "kept") == "one"
        store, backup = cluster.data / "nats" / "jetstream", tmp_path / "backup"
        with suspended(cluster.pid("nats")):  # what a snapshot of the file system would hold
            shutil.copytree(store, backup)
        deployed(cluster, tmp_path, "kept", "two")
        deployed(cluster, tmp_path, "since", "later")
        assert [said(cluster, name) for name in ("kept", "since")] == ["two", "later"]
        nats = cluster.pid("nats")
        suspend(nats)
        shutil.rmtree(store)
        shutil.copytree(backup, store)
        os.kill(nats, signal.SIGKILL)
        cluster.wait_restarted("nats", nats)
        wait(lambda: cluster.http.post("/fn/since").status_code == 404, "what came since is unknown")
        wait(lambda: said(cluster, "kept") == "one", "the version of then is called")

        def versions() -> list[tuple[str, int]]:
            found = sllm_json(cluster.env, "node", "describe", "n1")["here"]
            return [(each["function"], each["version"]) for each in found if each["state"] == "READY"]

        wait(lambda: versions() == [("kept", 1)], "instances of versions that nobody knows have ended")
        deployed(cluster, tmp_path, "kept", "three")
        deployed(cluster, tmp_path, "since", "again")
        assert [said(cluster, name) for name in ("kept", "since")] == ["three", "again"]


def deployed(cluster: Cluster, directory: Path, name: str, says: str) -> None:
    file = directory / f"{name}.py"
    file.write_text(SAYS.format(name=name, says=says))
    here(cluster.env, "fn", "deploy", str(file), "--json")


def said(cluster: Cluster, name: str) -> Any:
    return cluster.http.post(f"/fn/{name}").json()

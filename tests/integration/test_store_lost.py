"""NATS comes back without what it had stored, or with what it had last week; nodes and gateways have lived on."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import wait
from tests.fixtures.waiting import GIVE_UP_S

FUNCTION = """
from sllm import model_function

@model_function(memory="256MiB")
def answers(prompt: str) -> str:
    return prompt + "!"
"""


@pytest.mark.parametrize("how", ["begins anew", "is set back"])
def test_nodes_and_gateways_follow_the_controller_of_a_store_that(tmp_path: Path, how: str) -> None:
    with Cluster(tmp_path) as cluster:
        store, copy = cluster.data / "nats" / "jetstream", tmp_path / "copy"
        nats = cluster.pid("nats")
        os.kill(nats, signal.SIGSTOP)
        shutil.copytree(store, copy)
        os.kill(nats, signal.SIGCONT)
        for _ in range(2):  # as it gets in the life of any cluster: each controller has a term of its own
            cluster.wait_restarted("controller", cluster.kill("controller"))
            wait(lambda: cluster.http.get("/readyz").status_code == 200, "a controller leads")
        os.kill(nats, signal.SIGSTOP)
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

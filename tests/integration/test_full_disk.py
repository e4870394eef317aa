"""A platform whose disk gets full, and has space again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import wait
from tests.fixtures.small_disk import fill, small_disk  # noqa: F401 - a fixture is used by being here
from tests.fixtures.waiting import GIVE_UP_S

WITHIN_S = GIVE_UP_S
FUNCTION = """
from sllm import model_function

@model_function(memory="256MiB")
def answers(prompt: str) -> str:
    return prompt + {suffix!r}
"""


def _deploy(cluster: Cluster, file: Path, suffix: str) -> subprocess.CompletedProcess[str]:
    file.write_text(FUNCTION.format(suffix=suffix))
    argv = [sys.executable, "-m", "sllm", "fn", "deploy", str(file)]
    return subprocess.run(argv, env=cluster.env, capture_output=True, text=True, check=False, timeout=WITHIN_S)


def _call(cluster: Cluster) -> str:
    return cluster.http.post("/fn/answers", json={"prompt": "so"}).text


def test_nothing_is_started_on_a_full_disk(tmp_path: Path, small_disk: Path) -> None:  # noqa: F811
    fill(small_disk)
    argv = [sys.executable, "-m", "sllm_runtime.platform", "up", "--detach", "--port", "0", "--data", str(small_disk)]
    env = {**os.environ, "SLLM_HOME": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert done.returncode == 5
    assert f"the disk of {small_disk} is full: 0 B free" in done.stderr
    assert os.listdir(small_disk) == ["fill"]


def test_a_full_disk_is_named_and_the_platform_goes_on_when_there_is_space(
    tmp_path: Path,
    small_disk: Path,  # noqa: F811
) -> None:
    file, home = tmp_path / "function.py", tmp_path / "home"
    running = Cluster(small_disk, env={"SLLM_HOME": str(home)})
    running.home = home  # with what sllm up says, which its full disk would have no room for
    with running as cluster:
        first = _deploy(cluster, file, "!")
        assert first.returncode == 0, first.stderr
        filled = fill(small_disk)
        refused = _deploy(cluster, file, "?")
        assert refused.returncode == 5
        assert "is full: 0 B free" in refused.stderr
        answer = cluster.http.get("/readyz")
        assert answer.status_code == 503
        assert "is full: 0 B free" in answer.json()["problem"]
        assert "so!" in _call(cluster), "what is ready goes on"
        seen = f"NATS cannot write to the disk of {cluster.data / 'nats'}"
        wait(lambda: seen in (home / "up.err").read_text(), "sllm up has seen it")
        filled.unlink()
        said: list[str] = []

        def deployed() -> bool:
            again = _deploy(cluster, file, "?")
            said.append(again.stderr)
            return not again.returncode

        wait(deployed, lambda: f"it is deployed: {said[-1]}")
        assert "so?" in _call(cluster)
        assert cluster.http.get("/readyz").status_code == 200
        told = f"nats was started again: the disk of {cluster.data / 'nats'} was full and has space again"
        with cluster.http.stream("GET", "/api/v1/events", params={"follow": "true"}, timeout=WITHIN_S) as events:
            for line in events.iter_lines():  # asked for again and again, each question's reader would stay a while
                if told in line:
                    break
            else:
                raise AssertionError("the events have ended")


def test_a_daemon_that_dies_while_the_disk_is_full_is_started_again(
    tmp_path: Path,
    small_disk: Path,  # noqa: F811
) -> None:
    file, home = tmp_path / "function.py", tmp_path / "home"
    running = Cluster(small_disk, env={"SLLM_HOME": str(home)})
    running.home = home
    with running as cluster:
        first = _deploy(cluster, file, "!")
        assert first.returncode == 0, first.stderr
        assert "so!" in _call(cluster)
        assert cluster.process is not None
        gateway = cluster.pid("gateway")
        filled = fill(small_disk)
        os.kill(gateway, signal.SIGKILL)
        wait(lambda: "ended with signal 9" in (home / "up.err").read_text(), "its end was seen")
        time.sleep(5)
        assert cluster.process.poll() is None, (home / "up.err").read_text()
        filled.unlink()
        wait(lambda: _answers(cluster), "the gateway is there again")


def _answers(cluster: Cluster) -> bool:
    try:
        return "so!" in _call(cluster)
    except httpx.TransportError:
        return False

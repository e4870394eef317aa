"""The command line against a real platform: what a person types, and what Ctrl-C leaves."""

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sllm import Client, Function
from tests.fixtures import command
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import SLLM, WAITS_FOR_ANSWERS, Done, document
from tests.fixtures.deployed import deploy, wait
from tests.fixtures.streams import Stream
from tests.fixtures.waiting import GIVE_UP_S

ROOT = Path(__file__).parents[2]
SLOW_SETUP = """
import time
from pathlib import Path
from sllm import model_function

@model_function(memory="256MiB")
class Slow:
    def setup(self) -> None:
        while not Path(GATE).exists():
            time.sleep(0.01)

    def __call__(self) -> str:
        return "ready"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cli")) as found:
        yield found


def sllm(cluster: Cluster, *words: str) -> Done:
    """As a program of its own, from the top of the repository."""
    argv = [*SLLM, *words]
    return subprocess.run(argv, cwd=ROOT, env=cluster.env, capture_output=True, text=True, timeout=90, check=False)


def here(cluster: Cluster, *words: str) -> Done:
    """The same in this process."""
    with contextlib.chdir(ROOT):
        return command.here(cluster.env, *words, expect=None)


def test_the_life_of_a_function(cluster: Cluster) -> None:
    """Found by the profile that `sllm up` wrote: no URL and no token is given."""
    assert document(sllm(cluster, "fn", "deploy", "functions/echo", "--json"))["version"] == 1
    assert document(here(cluster, "fn", "deploy", "functions/echo/function.py::echo", "--json"))["unchanged"] is True
    assert document(sllm(cluster, "fn", "invoke", "echo", "text=12", "times=2", "--json"))["text"] == "12 12"
    refused = here(cluster, "fn", "invoke", "echo", "times=2", "--json")
    assert (refused.returncode, json.loads(refused.stderr)["error"]["field"]) == (2, "text")
    assert [each["name"] for each in document(here(cluster, "fn", "list", "--json"))["functions"]] == ["echo"]
    assert document(here(cluster, "fn", "history", "echo", "--json"))[0]["active"] is True
    assert document(here(cluster, "node", "list", "--json"))["nodes"][0]["alive"] is True
    assert document(here(cluster, "fn", "delete", "echo", "--json"))["deleted"] is True
    assert here(cluster, "fn", "describe", "echo").returncode == 3


def test_what_runs_is_shown_while_it_runs(cluster: Cluster, coder: Path, tmp_path: Path) -> None:
    """By `sllm top`, `call list` and `explain`, of what the platform really counts and tells."""
    pace = tmp_path / "pace"
    pace.write_text("all 0.05")
    deploy(cluster, "flowing_coder", name="coder", model=str(coder / "model"), keep_alive=300)
    with Stream(cluster, "coder", {"max_tokens": 2000, "pace": str(pace)}) as stream:
        values = stream.values()
        assert next(values)
        seen: list[dict[str, Any]] = []

        def flows() -> bool:
            seen.append(document(here(cluster, "top", "--once", "--json")))
            return bool(seen[-1]["rates"].get("tokens coder"))

        wait(flows, lambda: f"tokens come: {seen[-1]}")
        told = seen[-1]
        assert told["counts"]["tokens coder"] > 0
        assert [(each["node"], each["alive"]) for each in told["nodes"]] == [("n1", True)]
        (instance,) = next(each for each in told["functions"] if each["name"] == "coder")["instances"]
        assert (instance["state"], instance["node"]) == ("READY", "n1")
        (call,) = document(here(cluster, "call", "list", "--function", "coder", "--json"))["calls"]
        assert (call["id"], call["state"], call["kept"]) == (stream.call, "RUNNING", False)
        assert call["instance"] == instance["instance"]
        assert call["tokens"] > 0
        explained = document(here(cluster, "explain", stream.call, "--json"))
        assert (explained["call"], explained["state"]) == (stream.call, "RUNNING")
        assert [each["instance"] for each in explained["starts"]] == [explained["instance"]] == [call["instance"]]
        for words, shown in ((("top",), "1 READY"), (("call", "list"), stream.call), (("explain", "coder"), "n1")):
            assert shown in here(cluster, *words).stdout, words
        document(here(cluster, "call", "cancel", stream.call, "--json"))
        assert stream.error is None
        list(values)
        assert stream.error is not None
        assert stream.error["code"] == "cancelled"


def test_what_a_function_raises_is_in_its_log(cluster: Cluster) -> None:
    file = "tests/fixtures/functions/raises.py"
    name = document(here(cluster, "fn", "deploy", file, "--json"))["function"]["name"]
    failed = here(cluster, "fn", "invoke", name, "text=oh", "-v")
    assert failed.returncode == 1
    assert "ValueError: oh" in failed.stderr
    wait(lambda: "raise ValueError(text)" in here(cluster, "fn", "logs", name).stdout, "the log has the traceback")
    assert "Traceback" in here(cluster, "fn", "logs", name).stdout
    with started(cluster, "fn", "logs", name, "-f") as process:
        assert first_byte(process)
        assert interrupt(process)[0] == 130


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str]:
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=GIVE_UP_S)
    return process.returncode, errors


@contextlib.contextmanager
def started(cluster: Cluster, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs; it is dead afterwards."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*WAITS_FOR_ANSWERS, *words], cwd=ROOT, env=cluster.env, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_byte(process: subprocess.Popen[str]) -> bytes:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], GIVE_UP_S)[0], "nothing was printed"
    return os.read(process.stdout.fileno(), 1)


def test_ctrl_c_ends_the_work_of_a_call(cluster: Cluster) -> None:
    document(here(cluster, "fn", "deploy", "functions/counter", "--json"))
    with started(cluster, "fn", "invoke", "counter", "to=100000", "interval=0.05") as process:
        assert first_byte(process) == b"1"
        status, errors = interrupt(process)
    assert status == 130
    assert "is cancelled" in errors
    with Client(cluster.url, cluster.token) as client:
        assert list(Function.lookup("counter", client=client).stream(to=3)) == [1, 2, 3]


def test_ctrl_c_of_a_deployment_undoes_it(cluster: Cluster, tmp_path: Path) -> None:
    gate, folder = tmp_path / "gate", tmp_path / "slow"
    folder.mkdir()
    (folder / "function.py").write_text(SLOW_SETUP.replace("GATE", repr(str(gate))))
    with started(cluster, "fn", "deploy", str(folder)) as process:
        # HTTP knows of it once a version is there, whose start waits for us.
        with Client(cluster.url, cluster.token) as client:
            wait(lambda: any(node["instances"] for node in _starting(client)), cluster.logs)
        status, errors = interrupt(process)
    assert status == 130
    assert "slow is not deployed: what was begun is undone" in errors
    assert here(cluster, "fn", "describe", "slow").returncode == 3
    gate.touch()
    assert document(here(cluster, "fn", "deploy", str(folder), "--json"))["version"] == 1
    assert document(here(cluster, "fn", "invoke", "slow", "--json")) == "ready"


def _starting(client: Client) -> list[dict[str, Any]]:
    functions = client.request("GET", "/api/v1/functions")["functions"]
    return [view for view in functions if view["name"] == "slow"]

"""Starts that fail: 503 with stage and reason for everybody who waits, few attempts, and a platform that stays well."""

import asyncio
import contextlib
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sllm_loaderd.client import LoaderControl
from sllm_runtime.protocol.errors import OutOfMemory, SllmError, StartFailed, StartTimeout
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import commands, deploy, descendants, events, live, wait, wait_cold, workers
from tests.fixtures.streams import Stream
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import GIVE_UP_S

MODEL = Path(__file__).parents[2] / "functions" / "coder" / "model"
WAITERS = 5
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform")) as running:
        wait(lambda: idle_sandboxes(running), "a warm sandbox waits")
        yield running


def idle_sandboxes(cluster: Cluster) -> int:
    return sum(node["pool_idle"] for node in cluster.http.get("/api/v1/nodes").json()["nodes"])


def attempts(cluster: Cluster, name: str) -> int:
    """Starts that were begun for a function so far, from the controller's events."""
    return len(events(cluster, name, "instance.pending"))


# --- at deployment --------------------------------------------------------------------------------
AT_DEPLOYMENT = [
    ("dies_in_setup", StartFailed, "setup", "exit code 9"),
    ("exit_in_setup", StartFailed, "setup", "SystemExit: 3"),
    ("hangs_in_setup", StartTimeout, "setup", "within {} s"),
    ("oom", OutOfMemory, "setup", "memory"),
]


@pytest.mark.parametrize(("target", "kind", "stage", "says"), AT_DEPLOYMENT)
def test_a_first_version_that_cannot_start_leaves_nothing(
    cluster: Cluster, target: str, kind: type[SllmError], stage: str, says: str
) -> None:
    name = target.replace("_", "-")
    for patience in (2, 16, 60):
        before = attempts(cluster, name)
        with pytest.raises(kind) as caught:
            deploy(cluster, target, startup_timeout=patience if kind is StartTimeout else GIVE_UP_S)
        assert attempts(cluster, name) == before + 1
        if caught.value.stage == stage:
            break  # where the machine stands still its time may be over before
    assert (type(caught.value), caught.value.stage) == (kind, stage)
    assert says.format(patience) in caught.value.message
    assert cluster.http.post(f"/fn/{name}").status_code == 404
    assert name not in cluster.http.get("/api/v1/functions").text
    wait(lambda: not workers(name), "its worker is gone")


def test_an_import_that_fails_on_the_node(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is there for who deploys, and not in the bundle."""
    (tmp_path / "no_such_module_anywhere.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StartFailed) as caught:
        deploy(cluster, "import_error")
    assert caught.value.stage == "import"
    assert "ModuleNotFoundError: No module named 'no_such_module_anywhere'" in caught.value.message
    assert attempts(cluster, "import-error") == 1
    assert cluster.http.post("/fn/import-error").status_code == 404


def test_what_it_said_before_it_died_is_in_the_log(cluster: Cluster) -> None:
    with pytest.raises(StartFailed):
        deploy(cluster, "dies_in_setup", name="last-words")
    wait(lambda: "last words" in cluster.http.get("/api/v1/functions/last-words/logs").text, "the log has its end")


# --- a version that has the route, and starts no more ---------------------------------------------
BROKEN = {
    "import": ("start_failed", "import", "no_such_module_anywhere"),
    "raise": ("start_failed", "setup", "OSError: the licence server said no"),
    "exit": ("start_failed", "setup", "SystemExit: 3"),
    "die": ("start_failed", "setup", "exit code 9"),
    "hang": ("start_timeout", "setup", "within 2 s"),
    "memory": ("out_of_memory", "setup", "memory"),
}


def starts_at_most(seconds: float) -> int:
    """How many starts that fail the back-off permits in this time: at 0, 1, 3, 7 ... seconds."""
    return 1 + int(math.log2(1 + seconds))


def deploy_again(cluster: Cluster, name: str, behaviour: Path, **options: Any) -> None:
    """``turns_bad``; once more where the machine stood still for all the time that its start has."""

    def done() -> bool:
        with contextlib.suppress(StartTimeout):
            deploy(cluster, "turns_bad", name=name, env={"BEHAVIOUR": str(behaviour)}, **options)
            return True
        return False

    wait(done, f"{name} is deployed")


@pytest.mark.parametrize("behaviour", sorted(BROKEN))
def test_all_waiters_get_the_reason_of_one_start(cluster: Cluster, tmp_path: Path, behaviour: str) -> None:
    """Callers at once: one start. Callers in the back-off: none, and the same answer at once. Then it works again."""
    code, stage, says = BROKEN[behaviour]
    name, file = f"turns-{behaviour}", tmp_path / "behaviour"
    file.write_text("well")
    patience = {"startup_timeout": 2 if behaviour == "hang" else GIVE_UP_S}
    deploy_again(cluster, name, file, **patience)
    wait_cold(cluster, name)
    before = attempts(cluster, name)
    file.write_text(behaviour)
    began = time.monotonic()
    with ThreadPoolExecutor(WAITERS) as pool:
        answers = list(pool.map(lambda _: cluster.http.post(f"/fn/{name}", json={}), range(WAITERS)))
    assert [answer.status_code for answer in answers] == [503] * WAITERS
    errors = [answer.json()["error"] for answer in answers]
    ((said, at),) = {(error["code"], error["stage"]) for error in errors}
    # Where the machine stands still the time of one that hangs may be over before its setup begins.
    assert (said, at) == (code, at if behaviour == "hang" else stage)
    assert all(says in error["message"] for error in errors)
    assert len({error["call_id"] for error in errors}) == WAITERS
    assert 1 <= attempts(cluster, name) - before <= starts_at_most(time.monotonic() - began)
    answer = cluster.http.post(f"/fn/{name}", json={})
    assert answer.status_code == 503
    assert answer.json()["error"]["stage"] == stage or behaviour == "hang"
    assert float(answer.headers["Retry-After"]) >= 1
    assert attempts(cluster, name) - before <= starts_at_most(time.monotonic() - began)
    file.write_text("well")
    wait(lambda: cluster.http.post(f"/fn/{name}", json={}).status_code == 200, "it works again")
    assert attempts(cluster, name) - before <= 1 + starts_at_most(time.monotonic() - began)


def test_a_stream_gets_a_late_failure_as_an_event(cluster: Cluster, tmp_path: Path) -> None:
    """The headers have gone after a second; the failure comes after three."""
    file = tmp_path / "behaviour"
    for patience in (3, 12, 48):
        file.write_text("well")
        deploy_again(cluster, "late", file, startup_timeout=patience)
        wait_cold(cluster, "late")
        file.write_text("hang")
        with Stream(cluster, "late") as stream:
            assert list(stream.values()) == []
        if stream.status == 200:
            break  # where the machine stands still, both are due at once
    assert stream.status == 200
    assert stream.error is not None
    assert stream.error["code"] == "start_timeout"
    assert not stream.done


def test_no_start_storm_while_callers_keep_coming(cluster: Cluster, tmp_path: Path) -> None:
    """Three seconds of callers who never stop: starts at 0, 1 and 3 seconds, no more (the back-off doubles)."""
    file = tmp_path / "behaviour"
    file.write_text("well")
    deploy(cluster, "turns_bad", name="storm", env={"BEHAVIOUR": str(file)}, startup_timeout=GIVE_UP_S)
    wait_cold(cluster, "storm")
    before = attempts(cluster, "storm")
    file.write_text("raise")

    def insist(until: float) -> int:
        count = 0
        while time.monotonic() < until:
            assert cluster.http.post("/fn/storm", json={}).status_code == 503
            count += 1
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        counts = list(pool.map(insist, [began + 2.9] * 3))
    started = attempts(cluster, "storm") - before
    assert 1 <= started <= 1 + starts_at_most(time.monotonic() - began)
    assert sum(counts) > started, "callers were answered from the record"


# --- checkpoints ----------------------------------------------------------------------------------
@pytest.fixture
def completion(cluster: Cluster) -> str:
    """A function over the demo model, called once and cold again; the text that is right."""
    deploy(cluster, str(MODEL.parent / "function.py"), name="coder", keep_alive=0)
    text = complete(cluster).json()
    wait_cold(cluster, "coder")
    return "".join(text)


def complete(cluster: Cluster) -> httpx.Response:
    return cluster.http.post("/fn/coder", json={"prompt": "def ", "max_tokens": 16})


def stored(cluster: Cluster, name: str) -> Path:
    """A file of the model in the node's store."""
    (found,) = cluster.data.glob(f"nodes/n1/loaderd/models/*/{name}")
    return found


async def evicted(cluster: Cluster) -> bool:
    """Drop all models from the node's memory, unless a sandbox has something."""
    async with LoaderControl(cluster.data / "nodes" / "n1" / "loaderd.sock") as loader:
        if (await loader.status()).pool.held:
            return False
        for model in await loader.models():
            await loader.evict(model)
        return True


def flip(file: Path) -> None:
    """Change one byte in the middle."""
    with file.open("r+b") as data:
        data.seek(file.stat().st_size // 2)
        (byte,) = data.read(1)
        data.seek(-1, 1)
        data.write(bytes([byte ^ 1]))


def truncate(file: Path) -> None:
    with file.open("r+b") as data:
        data.truncate(file.stat().st_size - 4096)


DAMAGE = [
    (flip, "partition_0.bin", "corrupt_checkpoint"),
    pytest.param(truncate, "partition_0.bin", "corrupt_checkpoint", marks=pytest.mark.slow),
    pytest.param(flip, "tokenizer.json", "corrupt_checkpoint", marks=pytest.mark.slow),
    (flip, "index.json", "start_failed"),
]


@pytest.mark.parametrize(("damage", "name", "code"), DAMAGE)
def test_a_damaged_checkpoint_is_refused_before_a_function_sees_it(
    cluster: Cluster, completion: str, damage: Callable[[Path], None], name: str, code: str
) -> None:
    """Damaged on the node's disk, and no copy in memory: it was evicted, or the invoker would bring it back to the next
    loaderd. Repaired, it works again."""
    whole = stored(cluster, name).read_bytes()
    wait(lambda: asyncio.run(evicted(cluster)), "nothing is in memory")
    old = cluster.kill("loaderd")
    damage(stored(cluster, name))
    cluster.wait_restarted("loaderd", old)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: complete(cluster), range(3)))
    assert [answer.status_code for answer in answers] == [503] * 3, [answer.text for answer in answers]
    errors = [answer.json()["error"] for answer in answers]
    assert {(error["code"], error["stage"]) for error in errors} == {(code, "weights")}, errors
    assert all(name in error["message"] for error in errors)
    assert live(cluster, "coder") == []
    stored(cluster, name).write_bytes(whole)
    wait(lambda: complete(cluster).status_code == 200, "it works again")
    assert "".join(complete(cluster).json()) == completion
    wait_cold(cluster, "coder")


def loaderd_killed(cluster: Cluster) -> None:
    """The session that the worker was given leads nowhere."""
    cluster.wait_restarted("loaderd", cluster.kill("loaderd"))


def fork_server_killed(cluster: Cluster) -> None:
    """Its workers end with it."""
    below, titles = descendants(cluster.pid("invoker")), commands()
    servers = [pid for pid in below & titles.keys() if titles[pid][0].startswith("sllm-zygote")]
    assert servers
    for pid in servers:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("misfortune", [loaderd_killed, fork_server_killed])
def test_a_start_that_loses_a_process_of_the_node_is_made_again(
    cluster: Cluster, completion: str, misfortune: Callable[[Cluster], None]
) -> None:
    """As its worker has yet to begin. Its caller sees nothing of that."""
    wait_cold(cluster, "coder")
    wait(lambda: idle_sandboxes(cluster), "a warm sandbox waits")
    before = attempts(cluster, "coder")
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as still:
        for pid in workers():
            still.enter_context(suspended(pid))
        answer = pool.submit(complete, cluster)
        wait(lambda: live(cluster, "coder"), "it starts")
        (instance,) = live(cluster, "coder")
        log = cluster.data / "logs" / "loaderd-n1.log"
        wait(lambda: f"sandbox {instance} may load" in log.read_text(), "it has a session, and a sandbox long since")
        misfortune(cluster)
        still.close()
        found = answer.result(GIVE_UP_S)
    assert found.status_code == 200, found.text
    assert "".join(found.json()) == completion
    assert attempts(cluster, "coder") > before + 1, "the first one came to nothing"
    wait_cold(cluster, "coder")


def test_a_source_that_is_damaged_is_refused_at_deployment(cluster: Cluster, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(MODEL, broken)
    truncate(broken / "model.safetensors")
    before = cluster.http.get("/api/v1/models").json()
    with pytest.raises(SllmError) as caught:
        deploy(cluster, str(MODEL.parent / "function.py"), name="broken", model=str(broken))
    assert caught.value.code == "invalid_checkpoint"
    assert "model.safetensors" in caught.value.message
    assert cluster.http.get("/api/v1/models").json() == before
    assert cluster.http.post("/fn/broken").status_code == 404


def test_after_all_this_the_platform_is_well(cluster: Cluster) -> None:
    wait(lambda: not workers("turns"), "no worker of a failed start is left")
    wait(lambda: idle_sandboxes(cluster), "a warm sandbox waits")
    for component in ("gateway-g1", "controller", "invoker-n1", "loaderd-n1"):
        assert "Traceback" not in (cluster.data / "logs" / f"{component}.log").read_text(), component


def test_a_start_belongs_to_the_trace_of_the_call_that_it_is_for(cluster: Cluster) -> None:
    """What the module reads when it is imported, and what the invoker logs of the start."""
    deploy(cluster, "traced::module", keep_alive=0)
    wait_cold(cluster, "module")
    told = cluster.http.post("/fn/module", headers={"traceparent": TRACE}, timeout=GIVE_UP_S)
    assert told.json() == TRACE
    (log,) = (cluster.data / "logs").glob("*invoker*.log")
    of_it = [line for line in log.read_text().splitlines() if f"trace={TRACE.split('-')[1]}" in line]
    assert any("begins" in line for line in of_it), of_it

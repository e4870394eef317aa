"""``sllm up`` and ``sllm down`` with every real daemon."""

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.local import Layout
from sllm_runtime.platform.nats_server import free_port
from sllm_runtime.platform.running import read_running
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol.ctl import Listing, NodeList
from sllm_runtime.protocol.errors import DeadlineExceeded, Unavailable
from sllm_runtime.protocol.subjects import ctl
from tests.fixtures.cluster import QUICK, STOP_S, Cluster
from tests.fixtures.deployed import descendants, wait, wait_gone
from tests.fixtures.suspended import suspend
from tests.fixtures.waiting import GIVE_UP_S, until

UP = [sys.executable, "-m", "sllm_runtime.platform"]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for the tests that leave a platform as whole as they find it."""
    with Cluster(tmp_path_factory.mktemp("up")) as started:
        yield started


def run(*words: str, env: dict[str, str], expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*UP, *words], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == expect, (done.stdout, done.stderr)
    return done


def test_everything_is_there_when_up_says_so_and_gone_when_it_ends(tmp_path: Path) -> None:
    """It ends by SIGTERM, as every ``Cluster`` does."""
    with Cluster(tmp_path) as cluster:
        assert set(cluster.running().pids) == {"nats", "controller", "gateway-g1", "invoker-n1", "loaderd-n1"}
        assert httpx.get(f"{cluster.url}/readyz").status_code == 200
        answer = cluster.http.post("/fn/nobody")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "function_not_found")
        assert httpx.post(f"{cluster.url}/fn/nobody").status_code == 401
        assert set(profiles(cluster)) == {"default"}
        family = descendants(cluster.document["pid"])
        assert cluster.stop() == 0
    wait_gone(family)
    assert not (tmp_path / "run" / "up.json").exists()
    assert profiles(cluster) == {}


def profiles(cluster: Cluster) -> dict[str, str]:
    """URLs by the names of the profiles in its home."""
    stored = tomllib.loads((cluster.home / "profiles.toml").read_text()).get("profiles", {})
    return {name: each["url"] for name, each in stored.items()}


def test_secrets_are_readable_by_their_owner_alone(platform: Cluster) -> None:
    stored = platform.home / "profiles.toml"
    files = [stored, platform.data / "token", platform.data / "nats" / "nats.conf"]
    files += (platform.data / "nats" / "identities").iterdir()
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    default = tomllib.loads(stored.read_text())["profiles"]["default"]
    assert default == {"url": platform.url, "token": platform.token}
    for pid in {platform.document["pid"], *platform.running().pids.values()}:
        told = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert platform.token.encode() not in told


def test_a_second_platform_is_detached_leaves_the_profile_of_the_first_and_goes_down(
    platform: Cluster, tmp_path: Path
) -> None:
    before, data = profiles(platform), ("--data", str(tmp_path / "p2"))
    done = run("up", "--detach", *data, "--port", "0", "--json", env=platform.env)
    document = json.loads(done.stdout)
    try:
        assert "sllm --profile p2" in done.stderr
        assert profiles(platform) == {**before, "p2": document["url"]}
        running = read_running(tmp_path / "p2")
        assert running is not None
        assert running.pid == document["pid"]
        assert httpx.get(f"{document['url']}/readyz").status_code == 200
        family = descendants(running.pid) | {running.pid}
        assert os.getsid(running.pid) == running.pid
        log = Layout(tmp_path / "p2").log("up")
        said = log.read_text()
        assert said
        assert "already runs" in run("up", "--detach", *data, "--port", "0", env=platform.env, expect=2).stderr
        assert log.read_text().startswith(said), "what runs goes on to write its log"
    finally:
        down = run("down", *data, "--json", env=platform.env)
    assert json.loads(down.stdout)["stopped"] == document["url"]
    wait_gone(family)
    assert profiles(platform) == before
    assert "no platform runs" in run("down", *data, env=platform.env, expect=3).stderr


def test_a_home_that_cannot_be_written_is_named(platform: Cluster) -> None:
    error = json.loads(run("up", "--json", env={**platform.env, "SLLM_HOME": "/proc/x"}, expect=2).stderr)["error"]
    assert error["code"] == "invalid_request"
    assert "/proc/x" in error["message"]
    assert "SLLM_HOME" in error["message"]


def test_a_second_up_on_the_same_data_says_what_runs(platform: Cluster) -> None:
    data = ["--data", str(platform.data), "--port", "0", "--json"]
    error = json.loads(run("up", *data, env=platform.env, expect=2).stderr.splitlines()[-1])["error"]
    assert error["code"] == "conflict"
    assert platform.url in error["message"]
    assert platform.http.get("/readyz").status_code == 200


def test_a_port_in_use_is_said_before_anything_starts(platform: Cluster, tmp_path: Path) -> None:
    port = platform.url.rpartition(":")[2]
    env = {**platform.env, "SLLM_HOME": str(tmp_path)}
    done = run("up", "--port", port, env=env, expect=2)
    assert "--port" in done.stderr
    assert not (tmp_path / "run" / "logs").exists()


def test_a_platform_whose_url_stdout_does_not_take_is_stopped(tmp_path: Path) -> None:
    env = {**os.environ, **QUICK, "SLLM_HOME": str(tmp_path)}
    with open("/dev/full", "wb") as full:
        up = [sys.executable, "-m", "sllm", "up", "--port", "0", "--json"]
        done = subprocess.run(up, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    error = json.loads(done.stderr)["error"]
    assert (error["code"], error["field"]) == ("invalid_argument", "stdout")
    assert read_running(tmp_path / "run") is None


def test_detach_tells_why_it_failed(tmp_path: Path) -> None:
    env = {**os.environ, "SLLM_HOME": str(tmp_path), "SLLM_NATS_URL": f"nats://127.0.0.1:{free_port()}"}
    env["SLLM_NATS_TIMEOUT"] = "1"
    done = run("up", "--detach", "--port", "0", env=env, expect=5)
    assert "no NATS server at" in done.stderr


def test_ctrl_c_stops_it_in_order(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        assert cluster.process is not None
        family = descendants(cluster.process.pid)
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(STOP_S) == 130
        assert not (cluster.data / "up.json").exists()
        wait_gone(family)


def test_a_second_ctrl_c_does_not_wait_for_a_daemon_that_hangs(tmp_path: Path) -> None:
    with Cluster(tmp_path, env={"SLLM_DRAIN": str(GIVE_UP_S)}) as cluster:
        assert cluster.process is not None
        family = descendants(cluster.process.pid)
        gateway = cluster.pid("gateway")
        suspend(gateway)
        cluster.process.send_signal(signal.SIGINT)
        asyncio.run(until(lambda: asked_to_end(gateway), what="the gateway has been asked to end"))
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(GIVE_UP_S) == 130
        assert (cluster.data / "up.json").exists(), "it tidied nothing up, for which it would have waited"
        wait_gone(family)


def asked_to_end(pid: int) -> bool:
    """Whether SIGTERM waits for a process that is stopped."""
    (pending,) = re.findall(r"^ShdPnd:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    env = {**os.environ, **QUICK, "SLLM_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*UP, "up", "--port", "0"], env=env, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None
        assert "starting" in up.stderr.readline()
        asyncio.run(until(lambda: len(descendants(up.pid)) >= 3, what="daemons are being started"))
        family = descendants(up.pid)
        up.send_signal(signal.SIGINT)
        assert up.wait(STOP_S) == 130
    wait_gone(family)
    assert not (tmp_path / "run" / "up.json").exists()


def test_a_data_directory_whose_path_is_too_long_for_a_socket(tmp_path: Path) -> None:
    with Cluster(tmp_path / ("long" * 20)) as cluster:
        (far,) = Path(cluster.env["TMPDIR"]).glob("sllm-*")
        assert stat.S_IMODE(far.stat().st_mode) == 0o700
        assert (far / "n1.sock").is_socket()
        wait_alive(cluster, {"n1"})
    assert not far.exists()


@pytest.mark.chaos
@pytest.mark.slow  # test_faults.py has it of a platform with functions
def test_nothing_survives_a_kill_9_of_up(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        assert cluster.process is not None
        family = descendants(cluster.process.pid)
        assert len(family) >= 5
        cluster.process.kill()
        cluster.process.wait(STOP_S)
        wait_gone(family)
        with Cluster(tmp_path):  # and the same data directory works again
            pass


@pytest.mark.chaos
def test_nothing_survives_the_death_of_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.fixtures.cluster import Cluster;"
        f"c = Cluster(Path({str(tmp_path)!r})).start(); print(c.process.pid, flush=True); time.sleep(600)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        up = int(parent.stdout.readline())
        family = descendants(up) | {up}
        parent.kill()
    wait_gone(family)


AGAIN_UNDER_CALLS = ("controller", "gateway", "invoker", "loaderd")
"""Killed and started again in test_faults.py, too."""


@pytest.mark.chaos
@pytest.mark.parametrize(
    "component", ["nats", *(pytest.param(name, marks=pytest.mark.slow) for name in AGAIN_UNDER_CALLS)]
)
def test_a_component_that_is_killed_is_started_again(platform: Cluster, component: str) -> None:
    before = platform.running().pids
    old = platform.kill(component)
    new = platform.wait_restarted(component, old)
    after = platform.running().pids
    assert {name for name in before if before[name] != after.get(name)} == {
        name for name in before if before[name] == old
    }
    assert after[next(name for name in before if before[name] == old)] == new
    wait_alive(platform, {"n1"})
    wait(lambda: serves(platform.url), "readyz")


def serves(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def wait_alive(cluster: Cluster, nodes: set[str]) -> None:
    """Wait until the controller counts exactly these nodes as alive."""

    async def ask() -> None:
        who = {"SLLM_IDENTITY_FILE": str(Layout(cluster.data).identity_file("g1"))}
        bus = await Bus.connect(
            Settings.load({"SLLM_NATS_URL": cluster.document["nats_url"], **who}), "g1", name="test"
        )
        try:
            await until(lambda: alive(bus), what=f"nodes {nodes} alive")
        finally:
            await bus.close()

    async def alive(bus: Bus) -> bool:
        try:
            found = await bus.call(ctl("nodes"), Listing(), NodeList, timeout_s=1)
        except (Unavailable, DeadlineExceeded):
            return False
        return {info.record.node for info in found.nodes if info.alive} == nodes

    asyncio.run(ask())


@pytest.mark.slow  # test_nodes.py has two nodes, test_kept_calls.py two gateways
def test_several_nodes_and_gateways(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=2, gateways=2) as cluster:
        assert {"invoker-n2", "loaderd-n2", "gateway-g2"} < set(cluster.running().pids)
        for url in cluster.document["urls"]:
            assert httpx.get(f"{url}/readyz").status_code == 200
        wait_alive(cluster, {"n1", "n2"})


def test_one_whose_port_was_taken_as_it_started_leaves_the_profile_of_who_took_it(tmp_path: Path) -> None:
    """Two that begin at once both find the port free."""
    env = {**os.environ, **QUICK, "SLLM_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    port = free_port()

    def begin(name: str) -> subprocess.Popen[bytes]:
        argv = [*UP, "up", "--json", "--port", str(port), "--data", str(tmp_path / name)]
        with open(tmp_path / f"{name}.err", "wb") as errors:
            return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)

    both = [begin("p1"), begin("p2")]
    try:
        wait(lambda: any(each.poll() for each in both), "one has given up")
        (left,) = [each for each in both if each.poll() is None]
        document = json.loads(Cluster.first_line(left))
        stored = tomllib.loads((tmp_path / "profiles.toml").read_text())["profiles"]
        assert stored == {document["profile"]: {"url": document["url"], "token": document["token"]}}
    finally:
        for each in both:
            each.terminate()
            each.wait(STOP_S)
            assert each.stdout is not None
            each.stdout.close()


def test_nohup_keeps_it_when_its_terminal_is_closed(tmp_path: Path) -> None:
    """Who starts it with SIGHUP ignored means just that: ``nohup sllm up &``, and logs out."""
    env = {**os.environ, **QUICK, "SLLM_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    argv = ["nohup", *UP, "up", "--port", "0", "--json"]
    with subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as up:
        try:
            url = json.loads(Cluster.first_line(up))["url"]
            up.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                up.wait(5)
            assert httpx.get(f"{url}/readyz").status_code == 200
        finally:
            up.terminate()
            up.wait(STOP_S)

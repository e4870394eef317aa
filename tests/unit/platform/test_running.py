"""Who runs on a data directory, and profiles."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sllm_runtime.platform.local import Options
from sllm_runtime.platform.process import start_time
from sllm_runtime.platform.profile import answers_alive, claim, free_name, release, remove_token, write_profile
from sllm_runtime.platform.running import Lock, Running, read_running, stop_running
from sllm_runtime.platform.up import Platform
from sllm_runtime.protocol.errors import Conflict
from tests.fixtures.waiting import GIVE_UP_S


def running(pid: int, data: Path, started: int | None = None, stop_s: float = 0.1) -> Running:
    return Running(
        pid=pid,
        started=started if started is not None else start_time(pid),
        url="http://127.0.0.1:1",
        urls=("http://127.0.0.1:1",),
        profile="default",
        nats_url="",
        data=str(data),
        stop_s=stop_s,
    )


def test_one_lock_for_one_directory(tmp_path: Path) -> None:
    with Lock(tmp_path) as lock:
        lock.write(running(os.getpid(), tmp_path))
        assert read_running(tmp_path) is not None
        with pytest.raises(Conflict, match=r"already runs .* at http://127.0.0.1:1 \(pid"), Lock(tmp_path):
            pass
    assert read_running(tmp_path) is None
    with Lock(tmp_path):
        pass


async def test_who_starts_it_twice_is_told_that_it_runs(tmp_path: Path) -> None:
    """And not to choose another port, which the one that runs has: with another one it is refused all the same."""
    with Lock(tmp_path / "run") as lock, socket.create_server(("127.0.0.1", 0)) as taken:
        lock.write(running(os.getpid(), tmp_path))
        options = Options(home=tmp_path, data=tmp_path / "run", ports=(taken.getsockname()[1],))
        with pytest.raises(Conflict, match=r"already runs .* `sllm down` stops it"):
            await Platform(options, os.environ, lambda _: None).run(lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = Options(home=tmp_path, data=tmp_path / "run", ports=(taken.getsockname()[1],))
        with pytest.raises(Conflict, match="choose another with --port"):
            await Platform(options, os.environ, lambda _: None).run(lambda _: None)


def test_what_a_killed_platform_left_is_no_platform(tmp_path: Path) -> None:
    with Lock(tmp_path) as lock:
        own = start_time(os.getpid())
        assert own is not None
        lock.write(running(os.getpid(), tmp_path, started=own - 1))  # the id was given to another process since
        assert read_running(tmp_path) is None
        (tmp_path / "up.json").write_text("{")
        assert read_running(tmp_path) is None


@pytest.mark.parametrize(
    ("deaf", "grace_s", "status"), [("", 60.0, -signal.SIGTERM), ("SIG_IGN", 0.3, -signal.SIGKILL)]
)
def test_stop_asks_first(tmp_path: Path, deaf: str, grace_s: float, status: int) -> None:
    code = "import signal, time;" + (f"signal.signal(signal.SIGTERM, signal.{deaf});" if deaf else "")
    code += "print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        stop_running(running(child.pid, tmp_path, started=1))  # another process now has this id
        assert child.poll() is None
        stop_running(running(child.pid, tmp_path, stop_s=grace_s))
        assert child.wait(GIVE_UP_S) == status
    stop_running(running(child.pid, tmp_path, started=1))


def test_a_profile_is_written_among_others_and_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text('[profiles.other]\nurl = "https://x"\ntoken = "t"\ncustom = 3\n')
    assert write_profile(tmp_path, "default", "http://a", "secret") == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert tomllib.loads(path.read_text())["profiles"] == {
        "other": {"url": "https://x", "token": "t", "custom": 3},
        "default": {"url": "http://a", "token": "secret"},
    }
    remove_token(tmp_path, "default", "http://another", "secret")
    remove_token(tmp_path, "default", "http://a", "of who has its port now")
    assert "default" in tomllib.loads(path.read_text())["profiles"]
    remove_token(tmp_path, "default", "http://a", "secret")
    assert list(tomllib.loads(path.read_text())["profiles"]) == ["other"]


OWN, A, B = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))


@pytest.mark.parametrize(
    ("alive", "name"),
    [
        (set(), "default"),
        ({A}, "p2"),
        ({A, B}, "p2-2"),
        ({OWN}, "default"),
    ],
)
def test_another_platform_that_runs_keeps_its_profile(tmp_path: Path, alive: set[str], name: str) -> None:
    data = tmp_path / "p2"
    assert free_name(tmp_path, "default", OWN, data, alive.__contains__) == "default"
    write_profile(tmp_path, "default", A, "secret")
    write_profile(tmp_path, "p2", B, "secret")
    assert free_name(tmp_path, "default", OWN, data, alive.__contains__) == name
    assert free_name(tmp_path, "default", A, data, alive.__contains__) == "default"
    assert free_name(tmp_path, "default", OWN, Path("/"), {A}.__contains__) == "platform"


@pytest.mark.parametrize("url", ["https://prod.example", "http://10.0.0.7:8600", "http://[2001:db8::1]:8600"])
@pytest.mark.parametrize("asked", ["default", "prod"])
def test_a_profile_of_another_machine_stays(tmp_path: Path, asked: str, url: str) -> None:
    """Also where it was asked for, and does not answer: who works with `SLLM_PROFILE=prod`, or has no VPN just now,
    means by `up` and its end no loss of a token that is stored nowhere else."""
    write_profile(tmp_path, asked, url, "theirs")
    name = claim(tmp_path, asked, OWN, "new", tmp_path / "run", lambda _: False)
    assert name == "run"
    release(tmp_path, name, OWN, "new")
    assert tomllib.loads((tmp_path / "profiles.toml").read_text()) == {
        "profiles": {asked: {"url": url, "token": "theirs"}}
    }


def own_address() -> str:
    """Of this machine on a network; where it is on none, what stands for any of its own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        try:
            asks.connect(("192.0.2.1", 9))  # which sends nothing
        except OSError:
            return "0.0.0.0"
        return str(asks.getsockname()[0])


@pytest.mark.parametrize("host", [own_address(), socket.gethostname()])
def test_a_dead_platform_of_this_machine_gives_way_whatever_it_was_reached_by(tmp_path: Path, host: str) -> None:
    """One of `sllm up --host` that was killed has left its profile."""
    data, url = tmp_path / "run", f"http://{host}:1"
    write_profile(tmp_path, "default", url, "secret")
    assert free_name(tmp_path, "default", OWN, data, {url}.__contains__) == "run"
    assert free_name(tmp_path, "default", OWN, data, lambda _: False) == "default"


def test_nobody_is_not_alive() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else listens there meanwhile
        assert not answers_alive(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert not answers_alive("")


def test_a_profile_file_that_is_none_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "profiles.toml").write_text("[profiles")
    with pytest.raises(Conflict, match="correct or remove it"):
        write_profile(tmp_path, "default", "http://a", "secret")
    assert (tmp_path / "profiles.toml").read_text() == "[profiles"


def test_platforms_that_start_at_once_get_a_profile_each(tmp_path: Path) -> None:
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 9)]

    def begin(url: str) -> str:
        return claim(tmp_path, "default", url, "secret", tmp_path / "run", lambda _: True)

    with ThreadPoolExecutor(len(urls)) as threads:
        names = list(threads.map(begin, urls))
        assert sorted(names) == sorted(["default", "run", *(f"run-{number}" for number in range(2, 8))])
        stored = tomllib.loads((tmp_path / "profiles.toml").read_text())["profiles"]
        assert {name: stored[name]["url"] for name in names} == dict(zip(names, urls, strict=True))
        list(threads.map(release, [tmp_path] * 8, names, urls, ["secret"] * 8))
    assert tomllib.loads((tmp_path / "profiles.toml").read_text()) == {"profiles": {}}


def test_a_profile_of_this_machine_that_was_asked_for_is_taken(tmp_path: Path) -> None:
    """One of another machine is not: that was so once, see above."""
    write_profile(tmp_path, "mine", A, "secret")
    assert claim(tmp_path, "mine", OWN, "new", tmp_path / "run", lambda _: True) == "mine"
    assert tomllib.loads((tmp_path / "profiles.toml").read_text())["profiles"]["mine"]["url"] == OWN

"""What `sllm up` and `sllm doctor` say where the machine lacks what nothing works without."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from sllm.doctor import checks, containers, kernel
from sllm.doctor.finding import Level
from sllm_runtime.platform import disk
from sllm_runtime.platform.disk import DiskWatch
from sllm_runtime.platform.process import require_calls
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import LEAST_FILES, MIB
from tests.fixtures.refused import refusing
from tests.fixtures.waiting import GIVE_UP_S

UP = ["-m", "sllm_runtime.platform", "up", "--port", "0", "--json"]
FILTERED = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")


def sllm(*words: str, refused: Mapping[str, int], home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, "SLLM_HOME": str(home)}, capture_output=True, text=True,
        timeout=GIVE_UP_S, preexec_fn=refusing(refused),
    )  # fmt: skip


@FILTERED
@pytest.mark.parametrize(
    ("call", "number", "said"),
    [
        ("pidfd_open", errno.ENOSYS, "Linux 5.3"),
        ("memfd_create", errno.EPERM, "seccomp"),
        ("flock", errno.ENOLCK, "--data"),
    ],
)
def test_up_names_at_once_what_is_refused(tmp_path: Path, call: str, number: int, said: str) -> None:
    words = ("-m", "sllm_runtime.platform", "up", "--port", "0", "--json")
    done = sllm(*words, refused={call: number}, home=tmp_path)
    error = json.loads(done.stderr)["error"]
    assert error["code"] in ("unavailable", "invalid_request")
    assert os.strerror(number) in error["message"]
    assert said in error["message"]
    assert not (tmp_path / "run" / "nats").exists()


@FILTERED
@pytest.mark.parametrize(("call", "check"), [("pidfd_open", "kernel.pidfd"), ("flock", "storage.locks")])
def test_doctor_names_what_is_refused(tmp_path: Path, call: str, check: str) -> None:
    code = f"from sllm.doctor import kernel, storage; print({check}().level)"
    done = sllm("-c", code, refused={call: errno.ENOSYS}, home=tmp_path)
    assert done.stdout.strip() == "failure", done.stderr


def test_up_listens_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the port: it was not looked at, and nobody was told."""
    monkeypatch.setenv("SLLM_HOST", "192.0.2.1")
    error = json.loads(sllm(*UP, refused={}, home=tmp_path).stderr.splitlines()[-1])["error"]
    assert (error["code"], "192.0.2.1" in error["message"]) == ("invalid_request", True)


def test_no_directory_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a read-only root, with one directory that can be written."""
    home = tmp_path / "home"
    monkeypatch.setenv("SLLM_HOME", str(home))
    code = (
        "import tempfile, sys; from sllm_runtime.platform.__main__ import main\n"
        "tempfile._candidate_tempdir_list = lambda: ['/proc']\nsys.exit(main())"
    )
    done = sllm("-c", code, "up", "--port", "0", "--json", refused={}, home=home)
    error = json.loads(done.stderr)["error"]
    assert (error["code"], "TMPDIR" in error["message"]) == ("invalid_request", True)
    assert not (home / "run").exists()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    monkeypatch.setattr(containers, "TRIAL", ("true",))
    found = {each.check: each for each in checks.run()}
    assert found["temporary files"].level is Level.FAILURE
    assert "TMPDIR" in found["nats"].remedy


def test_doctor_sees_the_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has more than its container may use."""
    monkeypatch.setattr(kernel, "CGROUPS", tmp_path)
    monkeypatch.setattr(kernel, "OWN_GROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/pod/one\n")
    inner = tmp_path / "pod" / "one"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    outer = {"memory.max": f"{512 * MIB}", "memory.current": f"{300 * MIB}", "cpu.max": "50000 100000"}
    outer["memory.stat"] = f"anon 1\nactive_file {30 * MIB}\ninactive_file {20 * MIB}\n"
    for name, text in outer.items():
        (tmp_path / "pod" / name).write_text(f"{text}\n")
    found = kernel.memory()
    assert (found.level, found.what) == (Level.WARNING, "262.0 MiB available, 0.5 CPUs")


def test_doctor_sees_them_where_control_groups_are_of_version_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "CGROUPS", tmp_path)
    monkeypatch.setattr(kernel, "OWN_GROUP", tmp_path / "own")
    (tmp_path / "own").write_text("4:memory:/docker/one\n2:cpu,cpuacct:/docker/one\n0::/\n")
    inner = tmp_path / "memory"  # a container has its own at the root
    for made in (inner, tmp_path / "cpu"):
        made.mkdir()
    (inner / "memory.limit_in_bytes").write_text(f"{512 * MIB}\n")
    (inner / "memory.usage_in_bytes").write_text(f"{300 * MIB}\n")
    (inner / "memory.stat").write_text(f"active_file 1\ntotal_active_file {50 * MIB}\ntotal_inactive_file 0\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    found = kernel.memory()
    assert (found.level, found.what) == (Level.WARNING, "262.0 MiB available, 0.5 CPUs")


@pytest.mark.parametrize("call", ["pidfd_open", "memfd_create"])
def test_a_python_that_was_built_without_a_call_is_told(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.delattr(os, call)
    with pytest.raises(Unavailable, match=call):
        require_calls(nodes=True)
    if call == "pidfd_open":  # `sllm down` wants it
        with pytest.raises(Unavailable, match=call):
            require_calls(nodes=False)
    else:
        require_calls(nodes=False)


async def test_inodes_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are free; and a server that is started again could make no file either."""
    left, restarts = [0], [0]

    async def restart() -> None:
        restarts[0] += 1

    log_file = tmp_path / "nats.log"
    watch = DiskWatch(tmp_path, log_file, restart, space=lambda _: 100 * MIB, files=lambda _: left[0])
    log_file.write_text("[ERR] no space left on device\n")
    assert not await watch.look()
    left[0] = LEAST_FILES
    assert await watch.look()
    assert restarts == [1]
    monkeypatch.setattr(disk, "files_left", lambda _: 3)
    assert "3 more files (inodes)" in disk.shortage(tmp_path)
    monkeypatch.setattr(disk, "files_left", lambda _: None)  # of btrfs, say
    assert disk.shortage(tmp_path) == ""


def as_nobody_in_particular(words: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    """As somebody whom the modes of files keep out, also where the tests are root's."""
    plain = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"] if not os.getuid() else []
    return subprocess.run(
        [*plain, sys.executable, *words], env={**os.environ, "SLLM_HOME": str(home)}, capture_output=True, text=True,
        timeout=GIVE_UP_S,
    )  # fmt: skip


@pytest.mark.parametrize("inner", ["logs", "nats/jetstream", "nodes/n1/loaderd", "nodes/n1/loaderd/models/0f"])
def test_what_is_another_users_in_the_data_directory_is_named(tmp_path: Path, inner: str) -> None:
    """As of a copy that lost its owners, and after one `sudo sllm up`."""
    (tmp_path / "run" / inner).mkdir(parents=True)
    (tmp_path / "run" / inner).chmod(0)
    try:
        done = as_nobody_in_particular([*UP, "--nodes", "1"], tmp_path)
    finally:
        (tmp_path / "run" / inner).chmod(0o700)
    is_named(done, tmp_path / "run" / inner)


@pytest.mark.parametrize(
    "inner",
    [
        "profiles.toml",
        "profiles.lock",
        "run/up.lock",
        "run/up.json",
        "run/logs/controller.log",
        "run/logs/up.log",
        "run/nats/nats.log",
        "run/nats/jetstream/$G/streams/KV_sllm_state/msgs/1.blk",
        "run/nodes/n1/loaderd/lock",
        "run/nodes/n1/loaderd/models/0f/index.json",
        "run/nodes/n1/invoker/proofs/0f.json",
    ],
)
def test_a_file_that_is_another_users_is_named(tmp_path: Path, inner: str) -> None:
    """After one `sudo sllm up` in the directories of who comes again without."""
    (tmp_path / inner).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / inner).touch(mode=0)
    how = ["--detach"] if inner.endswith("up.log") else []
    is_named(as_nobody_in_particular([*UP, "--nodes", "1", *how], tmp_path), tmp_path / inner)


def is_named(done: subprocess.CompletedProcess[str], path: Path) -> None:
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (error["code"], str(path) in error["message"]) == ("invalid_request", True), error
    assert "chown" in error["message"]


def test_a_platform_of_another_user_is_not_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").touch(mode=0)
    is_named(
        as_nobody_in_particular(["-m", "sllm_runtime.platform", "down", "--json"], tmp_path),
        tmp_path / "run" / "up.json",
    )


@pytest.mark.parametrize(
    "inner",
    [
        "nats/lost+found",
        "nats/jetstream/lost+found",
        "nodes/lost+found",
        "nodes/n1/lost+found",
        "nodes/n1/loaderd/lost+found",
        "nats/.snapshot",
        "nodes/.snapshot/daily",
        "nodes/n1/invoker/work/left-by-a-container",
    ],
)
def test_what_is_not_the_platforms_there_is_nobodys_matter(tmp_path: Path, inner: str) -> None:
    """Of a disk that is mounted there: root's, and no business of ours."""
    (tmp_path / inner).mkdir(parents=True)
    (tmp_path / inner).chmod(0)
    code = "import sys, pathlib, sllm_runtime.platform.commands as c; c._require_own(pathlib.Path(sys.argv[1]))"
    try:
        done = as_nobody_in_particular(["-c", code, str(tmp_path)], tmp_path)
    finally:
        (tmp_path / inner).chmod(0o700)
    assert done.returncode == 0, done.stderr

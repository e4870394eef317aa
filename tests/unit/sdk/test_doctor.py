"""Each check finds what is there, and names what is not."""

import errno
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sllm import profiles
from sllm.doctor import checks, containers, kernel, machine, nats, software, storage
from sllm.doctor.finding import Level
from tests.fixtures.small_disk import fill, small_disk  # noqa: F401 - a fixture is used by being here
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.sdk.gateway import TOKEN, Answer, Gateway


def test_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine runs the platform's tests, so that nothing can be a failure; and each check has its say."""
    # What an engine leaves behind once it has run a container is its own affair; one is run in tests of containers.
    monkeypatch.setattr(containers, "TRIAL", ("true",))
    found = list(checks.run())
    assert [each for each in found if each.level is Level.FAILURE] == []
    assert all(bool(each.remedy) == (each.level is not Level.OK) for each in found)
    names = [each.check for each in found]
    assert len(set(names)) == len(names)
    assert {"python", "port", "direct I/O", "memfd seals", "huge pages", "open files", "locked memory"} <= set(names)
    assert {"nats", "gpu", "containers", "control groups", "user namespaces", "cdi"} <= set(names)
    assert {"disk space", "sandboxes"} <= set(names)


def test_the_gateway_of_the_flags(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles.save("prod", gateway.url, TOKEN)
    monkeypatch.setenv("SLLM_URL", "http://127.0.0.1:9")
    assert software.gateway().level is Level.WARNING
    gateway.will(Answer(json={"version": "9.9.9", "gateway": "g1", "nodes": 1, "functions": 0, "controller": True}))
    for found in (software.gateway(profile="prod"), software.gateway(gateway.url, TOKEN)):
        assert (found.level, found.what) == (Level.OK, f"{gateway.url}: version 9.9.9, 1 node(s), 0 function(s)")
    gateway.will(Answer(json={"status": "ok"}))
    found = software.gateway(profile="prod")
    assert (found.level, found.what) == (Level.WARNING, f"{gateway.url}: what answers there is no gateway of sllm")
    for found in (software.gateway(profile="nonsense"), software.gateway("http://host:port")):
        assert found.level is Level.FAILURE


def test_without_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel that permits none, and one that permits all but a network: an ``unshare`` that refuses says so."""
    unshare = tmp_path / "unshare"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for refused, said in (("--pid", "see the platform's files"), ("--net", "network=False does not hold")):
        unshare.write_text(f'#!/bin/sh\ncase "$*" in *{refused}*) exit 1;; esac\n')
        unshare.chmod(0o755)
        found = kernel.sandboxes()
        assert (found.level, said in found.what) == (Level.WARNING, True)
    unshare.write_text("#!/bin/sh\n")
    assert kernel.sandboxes().level is Level.OK


def test_nats_without_jetstream(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        info = {"version": "9.9.9", "jetstream": False}

        def serve() -> None:
            for _ in range(2):
                connection, _address = listener.accept()
                with connection:
                    connection.sendall(b"INFO " + json.dumps(info).encode() + b"\r\n")
                info["jetstream"] = True

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        monkeypatch.setenv("SLLM_NATS_URL", f"nats://127.0.0.1:{port}")
        without, having = nats.nats(needed=True), nats.nats(needed=True)
        thread.join(GIVE_UP_S)
    assert (without.level, without.check) == (Level.FAILURE, "nats")
    assert "9.9.9, without JetStream" in without.what
    assert having.level is Level.OK
    gone = nats.nats(needed=True)
    assert gone.level is Level.FAILURE
    assert "SLLM_NATS_URL" in gone.remedy


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.11.14", Level.FAILURE), ("2.11.15", Level.OK), ("2.12.5", Level.FAILURE), ("2.12.6", Level.OK)],
)
def test_a_server_whose_rights_do_not_hold(monkeypatch: pytest.MonkeyPatch, version: str, level: Level) -> None:
    monkeypatch.setenv("SLLM_NATS_URL", "nats://one")
    monkeypatch.setattr(nats, "info_of", lambda url: {"version": version, "jetstream": True})
    found = nats.nats(needed=True)
    assert (found.level, "CVE-2026-33249" in found.what) == (level, level is Level.FAILURE)


def test_something_else_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: _greet(listener), daemon=True)
        thread.start()
        monkeypatch.setenv("SLLM_NATS_URL", f"127.0.0.1:{port}")
        assert "no NATS server answers there (b'+OK Redis" in nats.nats(needed=True).what
        thread.join(GIVE_UP_S)


def _greet(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"+OK Redis\r\n")


def test_a_server_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "nats-server"
    broken.write_text("#!/bin/sh\necho 'no space left'; exit 7\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = nats.nats(needed=True)
    assert found.level is Level.FAILURE
    assert "ended with status 7 no space left" in found.what


def test_a_server_of_another_kind_of_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nats-server").write_bytes(b"\x7fELF of another")
    (tmp_path / "nats-server").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("SLLM_NATS_URL", raising=False)
    found = nats.nats(needed=True)
    assert (found.level, "Exec format error" in found.what) == (Level.FAILURE, True)


def test_no_server_matters_only_to_who_runs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nats.nats(needed=True).level is Level.FAILURE
    assert nats.nats(needed=False).level is Level.WARNING


@pytest.mark.parametrize(("text", "level"), [("always [advise] never", Level.OK), ("always [never]", Level.WARNING)])
def test_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, level: Level) -> None:
    (tmp_path / "shmem_enabled").write_text(text)
    monkeypatch.setattr(kernel, "SHMEM_ENABLED", tmp_path / "shmem_enabled")
    assert kernel.huge_pages().level is level
    monkeypatch.setattr(kernel, "SHMEM_ENABLED", tmp_path / "nowhere")
    assert kernel.huge_pages().level is Level.WARNING


def test_limits_of_a_process_that_has_few() -> None:
    code = (
        "import resource\nfrom sllm.doctor import kernel\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "print(kernel.open_files().level, kernel.locked_memory(True).level, kernel.locked_memory(False).level)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["warning", "warning", "ok"]


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(profiles, "DEFAULT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(software, "_is_ours", lambda: False)
        assert software.port().level is Level.WARNING
    assert software.port().level is Level.OK


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLLM_HOME", str(tmp_path / "not" / "yet"))
    assert storage.space().level in (Level.OK, Level.WARNING)
    assert storage.direct_io().check == "direct I/O"
    assert list(tmp_path.iterdir()) == []
    if os.access("/proc", os.W_OK):
        monkeypatch.setenv("SLLM_HOME", "/proc/self/nothing")
        assert storage.direct_io().level is Level.WARNING


def test_a_full_disk_is_said_to_be_that(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """On it `sllm up` refuses to start; it was not blamed for its file system, nor for whose directory it is."""
    monkeypatch.setenv("SLLM_HOME", str(small_disk))
    filled = fill(small_disk)
    subprocess.run(["mount", "-o", "remount,nr_inodes=2", str(small_disk)], check=True)  # nor may a file be made
    found = storage.space()
    assert (found.level, found.what) == (Level.FAILURE, f"0 B free at {small_disk}, the state needs 8.0 MiB")
    for check in (storage.direct_io, storage.locks):
        found = check()
        assert (found.level, found.remedy) == (Level.WARNING, "make room on its disk")
    filled.write_bytes(b"")  # bytes again, but no files
    found = storage.space()
    assert (found.level, found.what) == (Level.FAILURE, f"room for 0 more files (inodes) at {small_disk}")


def test_a_home_that_this_user_may_not_look_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a service that is started with root's HOME; or nobody's."""

    def denied(path: Path) -> bool:
        if path.is_relative_to(tmp_path) and path != tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return before(path)

    before = Path.exists
    monkeypatch.setattr(Path, "exists", denied)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setenv("SLLM_HOME", str(tmp_path / "home" / ".sllm"))
    assert storage.space().level is Level.FAILURE
    monkeypatch.delenv("SLLM_HOME")
    monkeypatch.setattr(Path, "home", _nobodys)
    for check in (storage.space, storage.direct_io):
        found = check()
        assert (found.level, "set SLLM_HOME" in found.what + found.remedy) == (Level.FAILURE, True)


def _nobodys() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_no_engine_and_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = containers.engine()
    assert (found.level, found.what) == (Level.WARNING, "docker is not installed; podman is not installed")
    for name in ("docker", "nvidia-smi"):
        (tmp_path / name).write_text('#!/bin/sh\ncase "$1" in wait) echo 0;; *) echo 1.2.3;; esac\n')
        (tmp_path / name).chmod(0o755)
    assert containers.engine().what == "docker 1.2.3; a container was run by docker"
    (tmp_path / "docker").write_text('#!/bin/sh\ncase "$1" in run) echo no runc >&2; exit 125;; *) echo 1.2.3;; esac\n')
    found = containers.engine()
    assert (found.level, "SLLM_SANDBOX=auto" in found.remedy) == (Level.WARNING, True)
    assert "no container engine works here (docker: `docker run` failed (125): no runc" in found.what
    monkeypatch.setattr(software, "installed", lambda extra: False)
    assert containers.engine().what == "docker 1.2.3", "a client's machine runs none"
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    assert machine.gpu().what == "1.2.3"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'driver/library version mismatch' >&2\nexit 9\n")
    assert (machine.gpu().level, machine.gpu().what) == (Level.FAILURE, "driver/library version mismatch")


def test_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "CGROUPS", tmp_path)
    monkeypatch.setattr(containers, "OWN_GROUP", tmp_path / "own")
    assert containers.control_groups(0).what == "not mounted: cpu, memory, pids"
    for name in ("cpu", "memory", "pids"):
        (tmp_path / name).mkdir()
    assert containers.control_groups(0).level is Level.OK
    assert "lets only root" in containers.control_groups(1000).remedy

    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    assert containers.control_groups(0).what == "version 2, as root"
    assert containers.control_groups(1000).what == "version 2, not delegated to this user: cpu, memory, pids"
    (tmp_path / "own").write_text("0::/user.slice/mine.scope\n")
    (tmp_path / "user.slice" / "mine.scope").mkdir(parents=True)
    (tmp_path / "user.slice" / "mine.scope" / "cgroup.controllers").write_text("memory pids\n")
    found = containers.control_groups(1000)
    assert (found.what, "Delegate=" in found.remedy) == ("version 2, not delegated to this user: cpu", True)
    (tmp_path / "user.slice" / "mine.scope" / "cgroup.controllers").write_text("cpu memory pids\n")
    assert containers.control_groups(1000).level is Level.OK


def test_user_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "SYSCTL", tmp_path)
    monkeypatch.setattr(containers, "SUBUID", tmp_path / "subuid")
    monkeypatch.setattr(containers, "SUBGID", tmp_path / "subgid")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "podman").write_text("#!/bin/sh\n")
    (tmp_path / "podman").chmod(0o755)
    assert containers.user_namespaces(0, "root").level is Level.OK
    cases = [
        ("user/max_user_namespaces", "0", "the kernel permits none"),
        ("kernel/unprivileged_userns_clone", "0", "for root alone"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor keeps them"),
    ]
    for path, value, said in cases:
        file = tmp_path / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(value)
        assert containers.user_namespaces(1000, "me").what.startswith(said)
        file.unlink()
    found = containers.user_namespaces(1000, "me")
    assert (found.level, "--add-subuids" in found.remedy) == (Level.WARNING, True)
    (tmp_path / "subuid").write_text("me:100000:65536\n")
    found = containers.user_namespaces(1000, "me")
    assert (found.level, "--add-subgids" in found.remedy) == (Level.WARNING, True)
    (tmp_path / "subgid").write_text("1000:100000:65536\n")
    found = containers.user_namespaces(1000, "me")
    assert found.what == "newuidmap, newgidmap not installed: podman maps no ids"
    for name in ("newuidmap", "newgidmap"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert containers.user_namespaces(1000, "me").level is Level.OK


def test_gpus_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "CDI", (tmp_path / "none", tmp_path))
    (tmp_path / "other.json").write_text('{"kind": "vendor.example/device"}')
    assert containers.gpu_names(False).level is Level.OK
    assert "nvidia-ctk" in containers.gpu_names(True).remedy
    (tmp_path / "nvidia.yaml").write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n")
    assert containers.gpu_names(True).what == str(tmp_path / "nvidia.yaml")

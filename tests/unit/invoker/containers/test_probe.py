"""What engines are tried with."""

import io
import platform
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from sllm_invoker.containers import probe
from sllm_runtime.protocol.errors import Unavailable


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no instructions of this machine are known")
def test_the_trial_is_a_program_that_ends_well(tmp_path: Path) -> None:
    path = tmp_path / "exit"
    with tarfile.open(fileobj=io.BytesIO(probe.archive(platform.machine()))) as tar:
        found = tar.extractfile("exit")
        assert found is not None
        path.write_bytes(found.read())
        assert tar.getmember("exit").mode & stat.S_IXOTH
    path.chmod(0o755)
    assert subprocess.run([path], check=False).returncode == 0
    assert path.stat().st_size < 200


def test_a_machine_whose_instructions_are_not_known_is_named() -> None:
    with pytest.raises(Unavailable, match="vax"):
        probe.program("vax")


async def test_why_none_works_is_said_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho is the docker daemon running? >&2\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=None)
    with pytest.raises(Unavailable) as caught:
        await probe.find("auto")
    assert "docker: `docker images` failed (1): is the docker daemon running?" in caught.value.message
    assert "podman: not installed" in caught.value.message


def test_podman_is_first_asked_as_this_host_has_configured_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("podman", "docker", "runc"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    tried = [(engine.kind, engine.options) for engine in probe.candidates("auto")]
    assert tried[0] == ("podman", ())
    assert ("podman", ("--cgroup-manager=cgroupfs", "--runtime=runc")) in tried
    assert tried[-1] == ("docker", ())
    (tmp_path / "runc").unlink()
    assert not any("--runtime=runc" in engine.options for engine in probe.candidates("podman"))

"""``make test-containers`` where no engine can be had: it says why, and is no error."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEEDED = ("awk", "cat", "df", "dirname", "sh", "tail", "timeout", "tr")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH with what the script uses, and no engine."""
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    return tmp_path


def program(path: Path, name: str, script: str) -> None:
    (path / name).write_text(f"#!/bin/sh\n{script}\n")
    (path / name).chmod(0o755)


def skipped(path: Path) -> str:
    """Why it ran no test."""
    words = ["sh", str(ROOT / "tools" / "test_containers.sh")]
    done = subprocess.run(words, env={**os.environ, "PATH": str(path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    start, _, why = done.stdout.splitlines()[-1].partition("SKIPPED, no test was run: ")
    assert start == "=== containers: ", done.stdout
    return why.removesuffix(" ===")


def test_only_root_installs_an_engine(path: Path) -> None:
    program(path, "id", "echo 1000")
    why = skipped(path)
    assert "docker: not installed" in why
    assert why.endswith("; only root can install podman")


def test_without_a_package_manager_there_is_none(path: Path) -> None:
    program(path, "id", "echo 0")
    assert skipped(path).endswith("; there is no apt-get to install podman with")


def test_a_command_without_its_daemon_is_no_engine(path: Path) -> None:
    program(path, "id", "echo 0")
    program(path, "docker", "echo Cannot connect to the Docker daemon >&2; exit 1")
    program(path, "apt-get", 'case "$*" in *" update"*) echo E: nobody answers >&2; exit 100 ;; esac')
    assert skipped(path).startswith("apt-get update failed")


@pytest.mark.parametrize("refused", ["update", "install"])
def test_what_the_package_manager_refuses_is_said(path: Path, refused: str) -> None:
    program(path, "id", "echo 0")
    program(path, "apt-get", f'case "$*" in *" {refused}"*) echo E: nobody answers >&2; exit 100 ;; esac')
    why = skipped(path)
    assert why.startswith(f"apt-get {refused}")
    assert "failed: E: nobody answers" in why


def test_an_engine_that_was_installed_and_does_not_work_is_quoted(path: Path) -> None:
    program(path, "id", "echo 0")
    broken = "#!/bin/sh\\necho its kernel has no namespaces >&2\\nexit 125\\n"
    chmod = shutil.which("chmod")
    install = f"printf '{broken}' > {path}/podman; {chmod} 755 {path}/podman"
    program(path, "apt-get", f'case "$*" in *" install "*podman*) {install} ;; esac')
    why = skipped(path)
    assert "podman: `podman images` failed (125): its kernel has no namespaces" in why
    assert "docker: not installed" in why

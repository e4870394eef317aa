"""The boot of a GPU node as root of a machine of its own: a container, with stubs for hardware and cloud alone."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from sllm_invoker.containers import probe
from sllm_runtime.protocol.errors import Unavailable
from tests.unit.infra.contained import Contained

pytestmark = [
    pytest.mark.container,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.terraform,
]

DONE = ["packages", "account", "storage", "memory", "namespaces", "gpus", "software", "credentials", "environment"]


@pytest.fixture
def machine(tmp_path: Path) -> Contained:
    try:
        engine = asyncio.run(probe.find("podman"))
    except Unavailable as error:
        pytest.skip(f"docker runs no directory as a root: {error.message}")
    return Contained.create(tmp_path / "root", engine)


def stages(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.split()[2] for line in done.stdout.splitlines() if " done: " in line]


def owner(machine: Contained, path: str) -> tuple[bool, int]:
    """Whether the daemons' account has it, and its mode."""
    (line,) = [line for line in (machine.folder / "etc/passwd").read_text().splitlines() if line.startswith("sllm:")]
    found = (machine.folder / path).stat()
    return found.st_uid == int(line.split(":")[2]), found.st_mode & 0o777


def test_a_boot_the_same_boot_again_and_the_boot_after_it(machine: Contained) -> None:
    first = machine.boot()
    assert first.returncode == 0, first.stdout
    assert stages(first) == DONE
    order = [line.split()[0] for line in machine.calls("mdadm", "mkfs.xfs", "mount", "nvidia-ctk", "aws")]
    assert order == ["mdadm", "mkfs.xfs", "mount", "nvidia-ctk", "aws", "aws", "aws", "aws"]
    assert owner(machine, "mnt/sllm") == (True, 0o700)
    for name in ("nats-ca.pem", "nats.creds"):
        assert owner(machine, f"run/sllm/{name}") == (True, 0o400)
    assert owner(machine, "run/sllm/node.env") == (False, 0o400), "functions run as that account"
    assert machine.calls("unshare")[1] == "unshare as sllm"
    assert (machine.folder / "thp/userns_restricted").read_text() == "0\n"
    assert "userns = 0" in (machine.folder / "etc/sysctl.d/90-sllm.conf").read_text()
    assert (machine.folder / "run/sllm/nats.creds").read_text() == "creds of i-0abc by SECRET of /sllm/prod/node/key\n"
    assert owner(machine, "etc/cdi/nvidia.yaml") == (False, 0o644)
    packages = [path.parent for path in (machine.folder / "opt/sllm").glob("*/lib/python*/site-packages/sllm.py")]
    assert len(packages) == 1
    assert {path.stem for path in packages[0].glob("*.py")} >= {"sllm", "torch", "web", "driver"}
    assert owner(machine, str(packages[0].relative_to(machine.folder))) == (False, 0o755)
    made = os.stat(packages[0] / "sllm.py").st_mtime_ns

    again = machine.boot()
    assert (again.returncode, stages(again)) == (0, DONE), again.stdout
    assert machine.calls("mdadm", "mkfs.xfs", "mount") == []
    assert [line for line in machine.calls("aws") if line.startswith("aws s3")] == []

    machine.reboot()
    after = machine.boot()
    assert (after.returncode, stages(after)) == (0, DONE), after.stdout
    assert [line.split()[0] for line in machine.calls("mdadm", "mkfs.xfs", "mount")] == ["mdadm", "mkfs.xfs", "mount"]
    assert os.stat(packages[0] / "sllm.py").st_mtime_ns == made, "software stays"
    assert owner(machine, "run/sllm/nats.creds") == (True, 0o400)


def test_a_boot_that_fails_tells_the_group_and_may_be_repeated(machine: Contained) -> None:
    works = machine.answered("nvidia-ctk")
    machine.answer("nvidia-ctk", "exit 1\n")
    failed = machine.boot()
    assert failed.returncode != 0
    assert stages(failed) == DONE[:5]
    assert "stage gpus FAILED" in failed.stdout
    assert not (machine.folder / "run/sllm/node.env").exists()
    (told,) = [line for line in machine.calls("aws") if "autoscaling" in line]
    assert "--lifecycle-action-result ABANDON" in told
    machine.answer("nvidia-ctk", works)
    repeated = machine.boot()
    assert (repeated.returncode, stages(repeated)) == (0, DONE), repeated.stdout
    assert machine.calls("mdadm", "mkfs.xfs") == [], "what was done stays"

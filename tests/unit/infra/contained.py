"""A machine for the boot scripts that is a container: its own /etc, /opt, /run and accounts, this host's programs to
read, and stubs for what asks the hardware and the cloud. Python, pip, useradd, chown and tar are the real ones."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from sllm_invoker.containers.engine import Engine
from tests.fixtures.wheels import wheel
from tests.unit.infra.stubs import ANSWERS, MACHINE, Places, Stubbed, settings

REAL = {"python3.13", "setpriv"}
"""Stubs of the other stage that are real here."""
STUBS = (
    *("lsblk", "mdadm", "wipefs", "mkfs.xfs", "mount", "umount", "mountpoint", "dmsetup"),
    *("nvidia-smi", "nvidia-modprobe", "nvidia-ctk", "aws", "curl", "systemctl", "rpm", "dnf", "unshare"),
)
KEYS = "import sys\nprint('creds of', sys.argv[2], 'by', sys.stdin.read().strip())\n"
RUN_SECONDS = 300
PLACES = Places(
    account="sllm",
    mount="/mnt/sllm",
    prefix="/opt/sllm",
    run="/run/sllm",
    cdi_file="/etc/cdi/nvidia.yaml",
    huge_pages="/thp",
    userns_restricted="/thp/userns_restricted",
    sysctl_file="/etc/sysctl.d/90-sllm.conf",
)


def pip_wheel(directory: Path) -> None:
    """pip as it is installed here, as a wheel."""
    found = metadata.distribution("pip")
    with zipfile.ZipFile(directory / f"pip-{found.version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as file:
        for each in found.files or ():
            path = Path(str(found.locate_file(each)))
            if each.parts[0].startswith("pip") and path.suffix != ".pyc" and path.is_file():
                file.write(path, each.as_posix())


@dataclass(frozen=True)
class Contained(Stubbed):
    """``folder``: what the container sees as its root."""

    engine: Engine

    @property
    def stubs(self) -> Path:
        return self.folder / "stubs"

    @classmethod
    def create(cls, root: Path, engine: Engine) -> "Contained":
        """Lay it out: scripts and settings where cloud-init puts them, the artifact where the stub of aws finds it."""
        machine = cls(root, engine)
        own = ("etc/sllm", "etc/sysctl.d", "stubs/answers", "stubs/state")
        for name in (*own, "scripts", "opt", "mnt", "run", "tmp", "root", "usr"):
            (root / name).mkdir(parents=True)
        for name in ("proc", "sys", "dev", "thp", str(Path(sys.base_prefix).relative_to("/"))):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            if Path("/", name).is_symlink():
                (root / name).symlink_to(os.readlink(f"/{name}"))
        (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
        (root / "etc/group").write_text("root:x:0:\n")
        (root / "etc/shadow").write_text("root:*:19000::::::\n")
        machine.command(root / "stubs", STUBS)
        for name, answer in ANSWERS.items():
            if name not in REAL:
                machine.answer(name, answer)
        machine.answer("unshare", 'printf "unshare as %s\\n" "$(id -un)" >>"$CALLS"\n')
        (root / "thp/userns_restricted").write_text("1\n")
        for script in (MACHINE / "boot.sh", *(MACHINE / "node").glob("*.sh")):
            shutil.copy(script, root / "scripts")
        shutil.copy(MACHINE / "aws.sh", root / "scripts/cloud.sh")
        (root / "etc/sllm/boot.env").write_text(settings(root / "tmp", "node", machine._pack(), PLACES))
        return machine

    def _pack(self) -> str:
        """Make the artifact: pip itself, and an sllm that needs one library for each extra. Its SHA-256."""
        wheels = self.folder / "tmp/wheels"
        wheels.mkdir()
        pip_wheel(wheels)
        extras = ("server", "worker", "cuda")
        needs = ("torch ; extra == 'worker'", "web ; extra == 'server'", "driver ; extra == 'cuda'")
        own = {"sllm_runtime/platform/cluster_keys.py": KEYS}
        wheel(wheels, "sllm", "0.1.0", *needs, extras=extras, files=own)
        for name in ("torch", "web", "driver"):
            wheel(wheels, name, "2.11")
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w:gz") as archive:
            for path in wheels.iterdir():
                archive.add(path, path.name)
        (self.folder / "stubs/artifact.tar.gz").write_bytes(data.getvalue())
        return sha256(data.getvalue()).hexdigest()

    def boot(self) -> subprocess.CompletedProcess[str]:
        """Run the boot script to its end, as the machine's root, in a container without network."""
        python = Path(sys.base_prefix, "bin")
        path = f"/stubs:{python}:/usr/sbin:/usr/bin:/sbin:/bin"
        own = {"PATH": path} | self.seen(Path("/stubs"), "/dev/nvme1n1 /dev/nvme2n1")
        (self.stubs / "calls").chmod(0o666)  # another account's stubs are called too
        seen = {"/usr", str(sys.base_prefix)} - ({str(sys.base_prefix)} if python.is_relative_to("/usr") else set())
        command = [
            *(self.engine.program, *self.engine.options, "run", "--rm", "--network", "none", "--pull", "never"),
            *("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=512:512"),
            *(word for path in sorted(seen) for word in ("--volume", f"{path}:{path}:ro")),
            *(word for name, value in own.items() for word in ("--env", f"{name}={value}")),
            *("--rootfs", str(self.folder), "bash", "/scripts/boot.sh"),
        ]
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )

    def reboot(self) -> None:
        super().reboot()
        (self.folder / "run").mkdir()

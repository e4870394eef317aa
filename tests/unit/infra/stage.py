"""A machine for the boot scripts: stub commands in PATH that write down how they were called, and a folder for all that
the scripts write."""

import getpass
import io
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tests.unit.infra.stubs import ANSWERS, MACHINE, Places, Stubbed, settings

RUN_SECONDS = 200
REAL = (
    *(
        "bash",
        "sh",
        "cat",
        "cp",
        "sed",
        "sort",
        "tail",
        "cut",
        "dirname",
        "basename",
        "mkdir",
        "rm",
        "mv",
        "ln",
        "chmod",
    ),
    *("chown", "id", "tar", "gzip", "sha256sum", "grep", "touch", "env"),
)
STUBS = (
    *("lsblk", "mdadm", "wipefs", "mkfs.xfs", "xfs_growfs", "mount", "umount", "mountpoint", "dmsetup", "useradd"),
    *("nvidia-smi", "nvidia-modprobe", "nvidia-ctk", "aws", "curl", "systemctl", "sleep", "python3.13"),
    *("rpm", "dnf", "udevadm", "blkid", "gcloud", "setpriv", "unshare"),
)

WHEELS = ("pip-25.0-py3-none-any.whl", "sllm-0.1.0-py3-none-any.whl")
TORCH = "torch-2.13.0-cp313-cp313-manylinux_2_28_x86_64.whl"


@dataclass(frozen=True)
class Machine(Stubbed):
    """One machine of that ``kind``. ``run`` runs the real scripts there."""

    kind: str

    @classmethod
    def create(cls, folder: Path, kind: str = "node", cloud: str = "aws") -> "Machine":
        """Lay it out in ``folder``: the scripts where cloud-init puts them, settings as terraform renders them."""
        machine = cls(folder, kind)
        for name in ("bin", "answers", "state", "lib", "sys", "tmp"):
            (folder / name).mkdir(parents=True)
        for name in REAL:
            found = shutil.which(name)
            assert found, f"{name} is not on this machine"
            (folder / "bin" / name).symlink_to(found)
        machine.command(folder / "bin", STUBS)
        for name, answer in ANSWERS.items():
            machine.answer(name, answer)
        (folder / "sys/shmem_enabled").write_text("never\n")
        for script in (MACHINE / "boot.sh", *(MACHINE / kind).glob("*.sh")):
            shutil.copy(script, folder / "lib")
        shutil.copy(MACHINE / f"{cloud}.sh", folder / "lib/cloud.sh")
        (folder / "boot.env").write_text(machine.settings(machine.pack(*WHEELS, TORCH)))
        return machine

    def settings(self, digest: str, **more: object) -> str:
        """The boot script's settings for an artifact with that SHA-256."""
        places = Places(
            account=getpass.getuser(),
            mount=str(self.folder / "mnt"),
            prefix=str(self.folder / "opt"),
            run=str(self.folder / "run"),
            cdi_file=str(self.folder / "cdi/nvidia.yaml"),
            huge_pages=str(self.folder / "sys"),
            userns_restricted=str(self.folder / "sys/userns_restricted"),
            sysctl_file=str(self.folder / "sys/sysctl.conf"),
        )
        return settings(self.folder / "tmp", self.kind, digest, places, **more)

    def pack(self, *names: str) -> str:
        """Make the artifact of empty files; its SHA-256."""
        with tarfile.open(self.folder / "artifact.tar.gz", "w:gz") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        return sha256((self.folder / "artifact.tar.gz").read_bytes()).hexdigest()

    def run(self, script: str, *, disks: str = "/dev/nvme1n1 /dev/nvme2n1") -> subprocess.CompletedProcess[str]:
        """Run a script of lib/ to its end."""
        own = {"PATH": str(self.folder / "bin"), "TMPDIR": str(self.folder / "tmp")}
        return subprocess.run(
            ["bash", str(self.folder / "lib" / script), str(self.folder / "boot.env")],
            env=own | self.seen(self.stubs, disks),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )

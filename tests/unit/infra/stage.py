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

from tests.fixtures.terraform import TERRAFORM, render

MACHINE = TERRAFORM / "machine"
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
    *("lsblk", "mdadm", "wipefs", "mkfs.xfs", "mount", "umount", "mountpoint", "dmsetup", "useradd"),
    *("nvidia-smi", "nvidia-ctk", "aws", "curl", "systemctl", "sleep", "python3.13"),
    *("rpm", "dnf", "udevadm", "blkid", "gcloud"),
)

STUB = """\
#!/usr/bin/env bash
name=${0##*/}
printf '%s\\n' "$name $*" >>"$CALLS"
[ ! -e "$ANSWERS/$name" ] || . "$ANSWERS/$name"
"""

ANSWERS = {
    # Two instance-store disks and the root volume, as lsblk shows them; nothing holds them.
    "lsblk": """\
case "$*" in
*MODEL*) printf '/dev/nvme0n1 Amazon Elastic Block Store\\n'
    for disk in $DISKS; do printf '%s Amazon EC2 NVMe Instance Storage\\n' "$disk"; done ;;
*) printf '%s disk\\n' "${@: -1}" ;;
esac
""",
    "mount": ': >"$STATE/mounted"\n',
    "mountpoint": '[ -e "$STATE/mounted" ]\n',
    "nvidia-smi": "[ \"$1\" != --list-gpus ] || echo 'GPU 0: NVIDIA L4'\n",
    "nvidia-ctk": 'for word; do case $word in --output=*) echo cdi >"${word#--output=}" ;; esac; done\n',
    "curl": """\
case "$*" in
*api/token*) echo token ;;
*instance-id) printf i-0abc ;;
*local-ipv4) printf 10.42.128.7 ;;
*availability-zone) printf us-east-1a ;;
*instance-type) printf g6.xlarge ;;
*life-cycle) printf spot ;;
*) exit 22 ;;
esac
""",
    "aws": """\
case "$*" in
's3 cp'*) cp "$ARTIFACT" "${@: -1}" ;;
'ssm get-parameter'*) printf 'SECRET of %s\\n' "$6" ;;
esac
""",
    "python3.13": """\
case "$*" in
'-m venv'*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; cp "$ANSWERS/python3.13" "$ANSWERS/python" ;;
*cluster_keys*) printf 'creds of %s by %s\\n' "${@: -1}" "$(cat)" ;;
esac
""",
}

SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "node": (
        "modules/gpu_pool/templates/boot.env.tftpl",
        {"group": "chat-gpu", "labels": "pool=chat-gpu", "peer_port": 8610, "storage_key": ""},
    ),
    "gateway": ("modules/gateway/templates/boot.env.tftpl", {"port": 8600}),
    "nats": (
        "modules/nats/templates/boot.env.tftpl",
        {
            "server": "nats-1",
            "cluster": "prod",
            "routes": "nats-0.sllm.internal nats-1.sllm.internal nats-2.sllm.internal",
            "volume": "vol-0abc",
            "max_file_store": 2**30,
        },
    ),
}


WHEELS = ("pip-25.0-py3-none-any.whl", "sllm-0.1.0-py3-none-any.whl")
TORCH = "torch-2.13.0-cp313-cp313-manylinux_2_28_x86_64.whl"


@dataclass(frozen=True)
class Machine:
    """One machine. ``boot`` and ``watch`` run the real scripts there."""

    folder: Path
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
        for name in STUBS:
            machine.command(name)
        for name, answer in ANSWERS.items():
            machine.answer(name, answer)
        (folder / "sys/shmem_enabled").write_text("never\n")
        for script in (MACHINE / "boot.sh", *(MACHINE / kind).glob("*.sh")):
            shutil.copy(script, folder / "lib")
        shutil.copy(MACHINE / f"{cloud}.sh", folder / "lib/cloud.sh")
        digest = machine.pack(*WHEELS, TORCH)
        (folder / "boot.env").write_text(machine.settings(digest))
        return machine

    def settings(self, digest: str, **more: object) -> str:
        """The boot script's settings for an artifact with that SHA-256."""
        template, own = SETTINGS[self.kind]
        return render(
            self.folder / "tmp",
            template,
            region="us-east-1",
            artifact_url="s3://models/sllm.tar.gz",
            artifact_sha256=digest,
            parameter_prefix="/sllm/prod",
            account=getpass.getuser(),
            mount=str(self.folder / "mnt"),
            prefix=str(self.folder / "opt"),
            run=str(self.folder / "run"),
            cdi_file=str(self.folder / "cdi/nvidia.yaml"),
            huge_pages=str(self.folder / "sys"),
            **own | more,
        )

    def command(self, name: str) -> None:
        """A stub that is called ``name``."""
        path = self.folder / "bin" / name
        path.write_text(STUB)
        path.chmod(0o755)

    def answer(self, name: str, shell: str) -> None:
        """What the stub ``name`` does beside writing itself down."""
        (self.folder / "answers" / name).write_text(shell)

    def pack(self, *names: str) -> str:
        """Make the artifact of empty files; its SHA-256."""
        with tarfile.open(self.folder / "artifact.tar.gz", "w:gz") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        return sha256((self.folder / "artifact.tar.gz").read_bytes()).hexdigest()

    def run(self, script: str, *, disks: str = "/dev/nvme1n1 /dev/nvme2n1") -> subprocess.CompletedProcess[str]:
        """Run a script of lib/ to its end."""
        own = {
            "PATH": str(self.folder / "bin"),
            "CALLS": str(self.folder / "calls"),
            "ANSWERS": str(self.folder / "answers"),
            "STATE": str(self.folder / "state"),
            "ARTIFACT": str(self.folder / "artifact.tar.gz"),
            "DISKS": disks,
            "TMPDIR": str(self.folder / "tmp"),
        }
        (self.folder / "calls").write_text("")
        return subprocess.run(
            ["bash", str(self.folder / "lib" / script), str(self.folder / "boot.env")],
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )

    def calls(self, *names: str) -> list[str]:
        """How the stubs ``names`` were called in the last run, in order."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if line.split(" ", 1)[0] in names]

    def reboot(self) -> None:
        """What a reboot takes away."""
        (self.folder / "state/mounted").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "run")

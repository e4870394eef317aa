"""Stub commands for the boot scripts: each writes down how it was called and does what its answer says, a piece of
shell. And the scripts' settings, as terraform renders them."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.fixtures.terraform import TERRAFORM, render

MACHINE = TERRAFORM / "machine"

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
    # As the account that it names; a test has no other.
    "setpriv": 'while [ "$1" != unshare ]; do shift; done\n"$@"\n',
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
        {
            "packages": "mdadm xfsprogs",
            "group": "chat-gpu",
            "labels": "pool=chat-gpu",
            "peer_port": 8610,
            "storage_key": "",
        },
    ),
    "gateway": ("modules/gateway/templates/boot.env.tftpl", {"group": "prod-gateway", "port": 8600}),
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


@dataclass(frozen=True)
class Places:
    """Where the scripts find and put things, as they see them, and for whom."""

    account: str
    mount: str
    prefix: str
    run: str
    cdi_file: str
    huge_pages: str
    userns_restricted: str
    sysctl_file: str


def settings(home: Path, kind: str, digest: str, places: Places, **more: object) -> str:
    """What the boot script of a machine of that ``kind`` reads, for an artifact with that SHA-256. Needs terraform."""
    template, own = SETTINGS[kind]
    return render(
        home,
        template,
        region="us-east-1",
        artifact_url="s3://models/sllm.tar.gz",
        artifact_sha256=digest,
        parameter_prefix="/sllm/prod",
        **vars(places),
        **own | more,
    )


@dataclass(frozen=True)
class Stubbed:
    """A machine whose commands are stubs. ``folder``: all that it writes."""

    folder: Path

    @property
    def stubs(self) -> Path:
        """What the stubs answer, remember and write down."""
        return self.folder

    def command(self, where: Path, names: Iterable[str]) -> None:
        """Stubs that are called so, in ``where``."""
        for name in names:
            (where / name).write_text(STUB)
            (where / name).chmod(0o755)

    def answer(self, name: str, shell: str) -> None:
        """What the stub ``name`` does beside writing itself down."""
        (self.stubs / "answers" / name).write_text(shell)

    def answered(self, name: str) -> str:
        """What it does now."""
        return (self.stubs / "answers" / name).read_text()

    def seen(self, stubs: Path, disks: str) -> dict[str, str]:
        """The stubs' environment, where they see their folder as ``stubs``. What they have written down is gone."""
        (self.stubs / "calls").write_text("")
        names = {"CALLS": "calls", "ANSWERS": "answers", "STATE": "state", "ARTIFACT": "artifact.tar.gz"}
        return {variable: str(stubs / name) for variable, name in names.items()} | {"DISKS": disks}

    def calls(self, *names: str) -> list[str]:
        """How the stubs ``names`` were called in the last run, in order."""
        lines = (self.stubs / "calls").read_text().splitlines()
        return [line for line in lines if line.split(" ", 1)[0] in names]

    def reboot(self) -> None:
        """What a reboot takes away."""
        (self.stubs / "state/mounted").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "run")

"""What a GPU node does at each boot, with stub commands in PATH: its order, again and again, and where it fails."""

import getpass
from pathlib import Path

import pytest

from sllm_invoker.fork_server import _USER
from tests.unit.infra.stage import TORCH, WHEELS, Machine
from tests.unit.infra.stubs import MACHINE

pytestmark = pytest.mark.terraform

DONE = ["packages", "account", "storage", "memory", "namespaces", "gpus", "software", "credentials", "environment"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine")


def stages(output: str) -> list[str]:
    return [line.split()[2] for line in output.splitlines() if " done: " in line]


def test_a_first_boot(machine: Machine) -> None:
    done = machine.run("boot.sh")
    assert done.returncode == 0, done.stdout
    assert stages(done.stdout) == DONE
    disks = machine.calls("wipefs", "mdadm", "mkfs.xfs", "mount")
    assert [line.split()[0] for line in disks] == ["wipefs", "wipefs", "mdadm", "mkfs.xfs", "mount"]
    assert disks[2].endswith("--level=0 --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1")
    assert disks[4] == f"mount -o noatime,nodiscard /dev/md/sllm {machine.folder}/mnt"
    assert (machine.folder / "sys/shmem_enabled").read_text() == "advise\n"
    assert (machine.folder / "cdi/nvidia.yaml").read_text() == "cdi\n"
    assert (machine.folder / "run/nats.creds").read_text() == "creds of i-0abc by SECRET of /sllm/prod/node/key\n"
    assert (machine.folder / "run/node.env").read_text().splitlines() == [
        "SLLM_NODE=i-0abc",
        "SLLM_LABELS=pool=chat-gpu,zone=us-east-1a,type=g6.xlarge,market=spot",
        "SLLM_PEER_LISTEN=10.42.128.7:8610",
        "SLLM_PEER_TOKEN=SECRET of /sllm/prod/node/peer-token",
    ]


def test_software_comes_from_the_archive_alone(machine: Machine) -> None:
    machine.run("boot.sh")
    (install,) = [line for line in machine.calls("python") if "-m pip install" in line]
    wheels = machine.folder / "opt/.new/wheels"
    assert f"--no-index --find-links {wheels}" in install
    assert install.endswith(f"sllm[server,worker,cuda] @ file://{wheels}/sllm-0.1.0-py3-none-any.whl")
    assert not (machine.folder / "opt/.new").exists()
    assert (machine.folder / "opt/current").resolve().parent == machine.folder / "opt"


def test_secrets_are_in_no_log_and_for_one_account(machine: Machine) -> None:
    done = machine.run("boot.sh")
    assert "SECRET" not in done.stdout
    assert not any("SECRET" in line for line in (machine.folder / "calls").read_text().splitlines())
    for name in ("nats-ca.pem", "nats.creds", "node.env"):
        assert (machine.folder / "run" / name).stat().st_mode & 0o777 == 0o400


def test_running_it_again_does_nothing_twice(machine: Machine) -> None:
    machine.run("boot.sh")
    before = (machine.folder / "run/node.env").read_text()
    again = machine.run("boot.sh")
    assert again.returncode == 0, again.stdout
    assert stages(again.stdout) == DONE
    assert machine.calls("wipefs", "mdadm", "mkfs.xfs", "mount", "python3.13") == []
    assert [line for line in machine.calls("aws") if line.startswith("aws s3")] == []
    assert (machine.folder / "run/node.env").read_text() == before


def test_a_reboot_makes_the_disks_anew(machine: Machine) -> None:
    machine.run("boot.sh")
    machine.reboot()
    held = "*) printf '%s disk\\n/dev/md127 raid0\\n' \"${@: -1}\" ;;\n"
    shown = machine.answered("lsblk")
    machine.answer("lsblk", shown.replace("*) printf '%s disk\\n' \"${@: -1}\" ;;\n", held))
    done = machine.run("boot.sh")
    assert done.returncode == 0, done.stdout
    disks = [" ".join(line.split()[:3]) for line in machine.calls("wipefs", "mdadm", "mkfs.xfs")]
    assert disks[0] == "mdadm --stop /dev/md127"
    assert disks[-2:] == ["mdadm --create /dev/md/sllm", "mkfs.xfs -f -K"]
    assert machine.calls("python3.13") == [], "software stays"
    assert (machine.folder / "run/nats.creds").exists(), "credentials are fetched anew"


def test_one_disk_is_no_array(machine: Machine) -> None:
    assert machine.run("boot.sh", disks="/dev/nvme1n1").returncode == 0
    assert machine.calls("mdadm") == []
    assert machine.calls("mount") == [f"mount -o noatime,nodiscard /dev/nvme1n1 {machine.folder}/mnt"]


def test_no_disk_is_said(machine: Machine) -> None:
    done = machine.run("boot.sh", disks="")
    assert done.returncode == 0, done.stdout
    assert machine.calls("mdadm", "mkfs.xfs", "mount", "wipefs") == []
    assert "no instance-store disk" in done.stdout


def test_what_the_image_lacks_comes_from_its_own_repositories(machine: Machine) -> None:
    machine.answer("rpm", "exit 1\n")
    assert machine.run("boot.sh").returncode == 0
    assert machine.calls("dnf") == ["dnf install --assumeyes --quiet mdadm xfsprogs"]
    machine.answer("dnf", "exit 1\n")
    done = machine.run("boot.sh")
    assert done.returncode != 0
    assert "stage packages FAILED" in done.stdout


def test_another_archive_is_not_installed(machine: Machine) -> None:
    (machine.folder / "artifact.tar.gz").write_bytes(b"something else")
    done = machine.run("boot.sh")
    assert done.returncode != 0
    assert "stage software FAILED" in done.stdout
    assert machine.calls("python3.13", "python") == []
    assert not (machine.folder / "opt/current").exists()


def test_an_archive_without_our_wheel(machine: Machine) -> None:
    digest = machine.pack("pip-25.0-py3-none-any.whl")
    (machine.folder / "boot.env").write_text(machine.settings(digest))
    done = machine.run("boot.sh")
    assert done.returncode != 0
    assert "sllm-*.whl" in done.stdout
    assert "stage software FAILED" in done.stdout


def test_the_archives_python_is_taken_where_the_image_has_a_later_one_too(machine: Machine) -> None:
    """The image's name is a parameter that moves on; wheels of one version are of no use to another."""
    (machine.folder / "boot.env").write_text(machine.settings(machine.pack(*WHEELS, TORCH.replace("313", "312"))))
    machine.command(machine.folder / "bin", ["python3.12"])
    machine.answer("python3.12", machine.answered("python3.13").replace("python3.13", "python3.12"))
    done = machine.run("boot.sh")
    assert done.returncode == 0, done.stdout
    assert [line.split()[0] for line in machine.calls("python3.13", "python3.12")] == ["python3.12"]


IMAGES = """\
case "$*" in
*distribution*) [ "$WITH" = yes ] || exit 1; echo /image/packages ;;
*sysconfig*) echo "$(dirname "$(dirname "$0")")/packages" ;;
'-m venv'*) mkdir -p "$4/bin" "$4/packages"; cp "$0" "$4/bin/python"; cp "$ANSWERS/python3.13" "$ANSWERS/python" ;;
*cluster_keys*) cat >/dev/null; echo creds ;;
esac
"""


def test_torch_that_the_archive_lacks_is_the_images(machine: Machine) -> None:
    (machine.folder / "boot.env").write_text(machine.settings(machine.pack(*WHEELS)))
    machine.answer("python3.13", "WITH=yes\n" + IMAGES)
    done = machine.run("boot.sh")
    assert done.returncode == 0, done.stdout
    assert (machine.folder / "opt/current/packages/image.pth").read_text() == "/image/packages\n"
    (install,) = [line for line in machine.calls("python") if "-m pip install" in line]
    assert "--no-index" in install, "nothing else comes from elsewhere"


def test_an_image_without_the_torch_that_the_archive_lacks_is_no_node(machine: Machine) -> None:
    (machine.folder / "boot.env").write_text(machine.settings(machine.pack(*WHEELS)))
    machine.answer("python3.13", "WITH=no\n" + IMAGES)
    done = machine.run("boot.sh")
    assert done.returncode != 0
    assert "there is no Python 3.11 to 3.13 with torch, which the artifact lacks" in done.stdout
    assert "stage software FAILED" in done.stdout
    assert machine.calls("python") == []


@pytest.mark.parametrize(
    ("command", "answer", "stage"),
    [
        ("lsblk", "exit 1", "storage"),
        ("mdadm", "exit 1", "storage"),
        ("mkfs.xfs", "exit 1", "storage"),
        ("mount", "exit 32", "storage"),
        ("unshare", "exit 1", "namespaces"),
        ("nvidia-smi", "echo 'No devices were found'", "gpus"),
        ("nvidia-ctk", "exit 1", "gpus"),
        ("python3.13", "exit 1", "software"),
        ("aws", 'case $1 in ssm) exit 254 ;; s3) cp "$ARTIFACT" "${@: -1}" ;; esac', "credentials"),
    ],
)
def test_the_first_stage_that_fails_ends_it(machine: Machine, command: str, answer: str, stage: str) -> None:
    machine.answer(command, answer + "\n")
    done = machine.run("boot.sh")
    assert done.returncode != 0
    assert stages(done.stdout) == DONE[: DONE.index(stage)]
    assert done.stdout.count("FAILED") == 1, done.stdout
    assert f"stage {stage} FAILED" in done.stdout
    assert not (machine.folder / "run/node.env").exists(), "the node's service does not start without it"
    (told,) = [line for line in machine.calls("aws") if "autoscaling" in line]
    assert "--lifecycle-hook-name arrive --lifecycle-action-result ABANDON --instance-id i-0abc" in told


def test_a_boot_that_failed_may_be_repeated(machine: Machine) -> None:
    machine.answer("nvidia-ctk", "exit 1\n")
    assert machine.run("boot.sh").returncode != 0
    machine.answer("nvidia-ctk", 'for word; do case $word in --output=*) : >"${word#--output=}" ;; esac; done\n')
    done = machine.run("boot.sh")
    assert stages(done.stdout) == DONE, done.stdout
    assert machine.calls("mdadm", "mkfs.xfs") == [], "what was done stays"


def test_functions_have_namespaces_or_there_is_no_node(machine: Machine) -> None:
    """What is tried is what the invoker will do, as the account that it has."""
    done = machine.run("boot.sh")
    assert done.returncode == 0, done.stdout
    (privileges,) = machine.calls("setpriv")
    assert privileges.startswith(f"setpriv --reuid {getpass.getuser()} --regid ")
    assert machine.calls("unshare") == [f"{' '.join(_USER)} unshare --mount --net true"]
    assert not (machine.folder / "sys/sysctl.conf").exists(), "nothing is restricted here"
    machine.answer("unshare", "exit 1\n")
    assert "the kernel gives" in machine.run("boot.sh").stdout


def test_ubuntus_restriction_of_namespaces_is_lifted_before_they_are_tried(machine: Machine) -> None:
    restricted = machine.folder / "sys/userns_restricted"
    restricted.write_text("1\n")
    machine.answer("unshare", f'[ "$(cat "{restricted}")" = 0 ]\n')
    done = machine.run("boot.sh")
    assert done.returncode == 0, done.stdout
    assert restricted.read_text() == "0\n"
    kept = (machine.folder / "sys/sysctl.conf").read_text()
    assert kept == "kernel.apparmor_restrict_unprivileged_userns = 0\n"


NOTICE = '*spot/instance-action) [ -e "$STATE/notice" ] && printf \'{"action":"terminate"}\' || exit 22 ;;\n'
ENDS = '*target-lifecycle-state) [ -e "$STATE/notice" ] && printf Terminated || printf InService ;;\n'


@pytest.mark.parametrize(("what", "said"), [(NOTICE, "spot notice"), (ENDS, "its group ends it")])
def test_a_node_that_is_taken_away_is_drained_first(machine: Machine, what: str, said: str) -> None:
    machine.run("boot.sh")
    answers = machine.answered("curl")
    machine.answer("curl", answers.replace("*instance-id)", what + "*instance-id)"))
    # The node is ready after the first look; the notice is there after the second.
    ready = machine.folder / "run/ready"
    machine.answer("sleep", f'[ -s {ready} ] && : >"$STATE/notice"; echo READY >{ready}\n')
    done = machine.run("watch.sh")
    assert done.returncode == 0, done.stdout
    assert said in done.stdout
    happened = [" ".join(line.split()[:3]) for line in machine.calls("aws", "systemctl")]
    assert happened == [
        "aws autoscaling complete-lifecycle-action",
        "systemctl stop sllm-node.service",
        "aws autoscaling complete-lifecycle-action",
    ]
    hooks = [line.split("--lifecycle-hook-name ")[1].split()[0] for line in machine.calls("aws")]
    assert hooks == ["arrive", "drain"]


def test_a_node_that_goes_before_it_is_ready(machine: Machine) -> None:
    machine.run("boot.sh")
    answers = machine.answered("curl")
    ends = "*target-lifecycle-state) printf Terminated ;;\n"
    machine.answer("curl", answers.replace("*instance-id)", ends + "*instance-id)"))
    machine.answer("aws", "echo 'Rate exceeded' >&2; exit 254\n")
    done = machine.run("watch.sh")
    assert done.returncode == 0, done.stdout
    assert machine.calls("systemctl") == ["systemctl stop sllm-node.service"]
    assert done.stdout.count("Rate exceeded") == len(machine.calls("aws")) > 1, "it is said, and tried again"
    assert "the group could not be told" in done.stdout


def test_a_group_that_waits_for_nothing_has_been_told(machine: Machine) -> None:
    """As after a restart of what watches, or a spot notice that the group has not heard of yet."""
    machine.run("boot.sh")
    ends = "*target-lifecycle-state) printf Terminated ;;\n"
    machine.answer("curl", machine.answered("curl").replace("*instance-id)", ends + "*instance-id)"))
    machine.answer("aws", "echo '(ValidationError): No active Lifecycle Action found with instance ID' >&2; exit 254\n")
    done = machine.run("watch.sh")
    assert done.returncode == 0, done.stdout
    assert len(machine.calls("aws")) == 1
    assert "ValidationError" not in done.stdout


def test_a_group_that_did_not_hear_of_a_ready_node_is_told_again(machine: Machine) -> None:
    """Otherwise it would end a node that works."""
    machine.run("boot.sh")
    (machine.folder / "run/ready").write_text("READY\n")
    (machine.folder / "run/ready").chmod(0o600)
    machine.answer("curl", machine.answered("curl").replace("*instance-id)", ENDS + "*instance-id)"))
    fails = '[ -e "$STATE/heard" ] || { : >"$STATE/heard"; echo "Could not connect" >&2; exit 255; }\n'
    machine.answer("aws", fails)
    machine.answer("sleep", '[ ! -e "$STATE/once" ] || : >"$STATE/notice"; : >"$STATE/once"\n')
    done = machine.run("watch.sh")
    assert done.returncode == 0, done.stdout
    hooks = [line.split("--lifecycle-hook-name ")[1].split()[0] for line in machine.calls("aws")]
    assert hooks == ["arrive", "arrive", "drain"]
    assert done.stdout.count("READY") == 1


def test_the_node_says_when_it_is_ready(machine: Machine) -> None:
    machine.run("boot.sh")
    program = machine.folder / "opt/current/bin/sllm"
    program.write_text('#!/usr/bin/env bash\necho "$*"; echo READY >&"$SLLM_READY_FD"\n')
    program.chmod(0o755)
    done = machine.run("node.sh")
    assert done.stdout == "up --node\n"
    assert (machine.folder / "run/ready").read_text() == "READY\n"


def test_the_same_on_google_cloud(tmp_path: Path) -> None:
    machine = Machine.create(tmp_path / "machine", cloud="gcp")
    settings = machine.settings(machine.pack(*WHEELS, TORCH), storage_key="yes")
    (machine.folder / "boot.env").write_text(settings)
    machine.answer(
        "curl",
        """\
case "$*" in
*/instance/name) printf chat-gpu-x1z2 ;;
*/ip) printf 10.128.0.7 ;;
*/zone) printf projects/1/zones/us-central1-a ;;
*/machine-type) printf projects/1/machineTypes/a2-highgpu-1g ;;
*/preemptible) printf TRUE ;;
*/preempted) printf TRUE ;;
*) exit 22 ;;
esac
""",
    )
    machine.answer(
        "gcloud",
        'case $1 in storage) cp "$ARTIFACT" "${@: -1}" ;; secrets) printf "SECRET of %s\\n" "${@: -1}" ;; esac\n',
    )
    shown = machine.answered("lsblk")
    machine.answer("lsblk", shown.replace("Amazon EC2 NVMe Instance Storage", "nvme_card1"))
    done = machine.run("boot.sh")
    assert done.returncode == 0, done.stdout
    assert stages(done.stdout) == DONE
    assert len(machine.calls("wipefs")) == 2
    assert (machine.folder / "run/nats-ca.pem").read_text() == "SECRET of sllm-prod-nats-ca\n"
    assert (machine.folder / "run/node.env").read_text().splitlines() == [
        "SLLM_NODE=chat-gpu-x1z2",
        "SLLM_LABELS=pool=chat-gpu,zone=us-central1-a,type=a2-highgpu-1g,market=spot",
        "SLLM_PEER_LISTEN=10.128.0.7:8610",
        "SLLM_PEER_TOKEN=SECRET of sllm-prod-node-peer-token",
        "AWS_ACCESS_KEY_ID=SECRET of sllm-prod-node-storage-id",
        "AWS_SECRET_ACCESS_KEY=SECRET of sllm-prod-node-storage-key",
    ]
    assert "it is preempted; draining" in machine.run("watch.sh").stdout
    assert machine.calls("systemctl") == ["systemctl stop sllm-node.service"]
    assert machine.run("shutdown.sh").returncode == 0
    assert machine.calls("systemctl") == ["systemctl stop sllm-node.service"]


def test_what_cuda_needs_is_there_before_the_node(machine: Machine) -> None:
    """The node's service has no new privileges, nor has a function's namespace: libcuda's own call of nvidia-modprobe,
    which is setuid, does nothing there. And the description for containers holds what is there when it is made."""
    unit = (MACHINE / "node/sllm-node.service").read_text()
    assert "NoNewPrivileges=yes" in unit
    for _ in range(2):  # at each boot: /dev is memory
        assert machine.run("boot.sh").returncode == 0
        ours = machine.calls("nvidia-modprobe", "nvidia-ctk")
        assert [line.split()[0] for line in ours] == ["nvidia-modprobe", "nvidia-ctk"]
        assert ours[0] == "nvidia-modprobe --unified-memory --create-nvidia-device-file=0"

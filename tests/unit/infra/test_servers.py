"""What NATS servers and gateways do at each boot, and the secrets that they find: real keys, certificates and a real
nats-server that reads its configuration."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sllm_runtime.control.sealed_vault import Keyring
from sllm_runtime.platform.nats_server import EmbeddedNats, find_binary
from tests.unit.infra.stage import RUN_SECONDS, Machine
from tests.unit.infra.stubs import MACHINE

pytestmark = [pytest.mark.terraform, pytest.mark.openssl]

# Makes an environment whose commands are stubs again, or what FILL writes.
VENV = """\
case "$*" in
"-m venv"*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; cp "$ANSWERS/python3.13" "$ANSWERS/python"; FILL ;;
*cluster_keys* | *nats_settings*) exec PYTHON "$@" ;;
esac
"""

KEEPS = """#!/usr/bin/env bash
set -e
all=" $* "
case $all in *" get-parameters "*)
    while [ "$1" != --names ]; do shift; done
    while [[ "$2" == /* ]]; do
        case $all in *" --with-decryption "*) cat "$STORE$2" 2>/dev/null || echo None ;;
        *) [ ! -e "$STORE$2" ] || printf '%s\\t' "$2" ;; esac
        shift
    done
    exit ;;
esac
while [ "$1" != --name ]; do shift; done
case $all in *" get-parameter "*) exec cat "$STORE$2" ;; *" delete-parameter "*) exec rm "$STORE$2" ;; esac
case $all in *" --overwrite "*) rm "$STORE$2" ;; esac
[ ! -e "$STORE$2" ] || { echo ParameterAlreadyExists >&2; exit 254; }
mkdir -p "$STORE${2%/*}"
last=${*: -1}
cp "${last#file://}" "$STORE$2"
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parameter store after new-secrets.sh: a file for each parameter."""
    folder = tmp_path_factory.mktemp("secrets")
    keep(folder)
    done = run(folder, "new-secrets.sh")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("stored /sllm/prod/") == 11
    assert not list((folder / "tmp").iterdir()), "nothing of them stays"
    return folder / "store"


def keep(folder: Path, before: str = "", after: str = "") -> None:
    """A parameter store below ``folder``, which does these too."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/aws").write_text(KEEPS.replace("set -e\n", f"set -e\n{before}\n", 1) + after)
    (folder / "bin/aws").chmod(0o755)


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """As on the operator's machine."""
    (folder / "tmp").mkdir(exist_ok=True)
    own = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "STORE": str(folder / "store"), "TMPDIR": str(folder / "tmp")}
    return subprocess.run(
        ["bash", str(MACHINE / script), "/sllm/prod", "us-east-1"],
        env=os.environ | own | {"PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )


def machine_of(folder: Path, kind: str, store: Path) -> Machine:
    machine = Machine.create(folder / "machine", kind)
    machine.answer("aws", f'case "$1" in s3) cp "$ARTIFACT" "${{@: -1}}" ;; ssm) cat "{store}$6" ;; esac\n')
    return machine


def test_secrets_are_made_once(store: Path) -> None:
    before = (store / "sllm/prod/nats/ca").read_text()
    again = run(store.parent, "new-secrets.sh")
    assert again.returncode != 0
    assert "there are already: /sllm/prod/nats/ca" in again.stdout
    assert "/sllm/prod/node/peer-token" in again.stdout, "each of them is named"
    assert (store / "sllm/prod/nats/ca").read_text() == before


FIFTH = "*put-parameter*operator/seed*"
BREAKS = f'case "$*" in {FIFTH}) echo ThrottlingException >&2; exit 254 ;; esac'


@pytest.mark.parametrize(
    ("before", "after"), [(BREAKS, ""), ("", BREAKS.replace("$*", "$all"))], ids=["refused", "answer lost"]
)
def test_a_run_that_breaks_off_takes_back_what_it_has_stored(tmp_path: Path, before: str, after: str) -> None:
    """Whether the one that it broke off at arrived or not."""
    keep(tmp_path, before, after)
    broken = run(tmp_path, "new-secrets.sh")
    assert broken.returncode == 254
    assert contents(tmp_path / "store") == {}
    assert not list((tmp_path / "tmp").iterdir())
    keep(tmp_path)
    assert run(tmp_path, "new-secrets.sh").returncode == 0
    assert len(contents(tmp_path / "store")) == 11


def test_what_is_not_taken_back_is_named(tmp_path: Path) -> None:
    refused = 'case "$*" in *delete-parameter*) echo AccessDenied >&2; exit 254 ;; esac'
    keep(tmp_path, f"{BREAKS}\n{refused}")
    broken = run(tmp_path, "new-secrets.sh")
    assert broken.returncode == 254
    named = {line.split(": ")[1] for line in broken.stdout.splitlines() if line.startswith("not taken back")}
    assert named == {f"/{name}" for name in contents(tmp_path / "store")}
    assert len(named) == 4
    again = run(tmp_path, "new-secrets.sh")
    assert again.returncode == 1
    assert set(again.stdout.split()) >= named


def test_what_another_run_stored_meanwhile_stays(tmp_path: Path) -> None:
    theirs = 'mkdir -p "$STORE/sllm/prod/operator"; echo theirs >"$STORE/sllm/prod/operator/seed"'
    keep(tmp_path, f'case "$*" in {FIFTH}) {theirs} ;; esac')
    broken = run(tmp_path, "new-secrets.sh")
    assert "ParameterAlreadyExists" in broken.stdout
    assert contents(tmp_path / "store") == {"sllm/prod/operator/seed": "theirs\n"}


def test_rights_are_renewed(tmp_path: Path, store: Path) -> None:
    """Of the same account, by a seed that no machine may read; all else stays."""
    folder = tmp_path / "operator"
    shutil.copytree(store.parent, folder)
    before = contents(folder / "store")
    done = run(folder, "renew-rights.sh")
    assert done.returncode == 0, done.stdout
    after = contents(folder / "store")
    assert {name for name in after if after[name] != before.get(name)} == {"sllm/prod/nats/accounts"}
    old, new = (json.loads(each["sllm/prod/nats/accounts"]) for each in (before, after))
    assert new["resolver_preload"].keys() == old["resolver_preload"].keys()
    assert not list((folder / "tmp").iterdir()), "nothing of them stays"
    policies = [path.read_text() for path in MACHINE.parent.rglob("iam.tf")]
    assert policies
    assert not any("operator" in policy for policy in policies)


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("server", ["nats-0", "nats-1", "nats-2"])
def test_the_certificate_is_for_each_server(store: Path, server: str) -> None:
    lies, host = store / "sllm/prod/nats", f"{server}.sllm.internal"
    command = ["openssl", "verify", "-CAfile", str(lies / "ca"), "-verify_hostname", host, str(lies / "cert")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def nats_machine(folder: Path, store: Path) -> Machine:
    machine = machine_of(folder, "nats", store)
    linked = VENV.replace("FILL", f'ln -s "{find_binary()}" "$4/bin/nats-server"')
    machine.answer("python3.13", linked.replace("PYTHON", f'"{sys.executable}"'))
    return machine


def test_a_nats_server(tmp_path: Path, store: Path) -> None:
    machine = nats_machine(tmp_path, store)
    done = machine.run("boot.sh")
    assert done.returncode == 0, done.stdout
    assert "configuration file" in done.stdout, "nats-server has read it, and takes it"
    device = "/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_vol0abc"
    made, mounted = machine.calls("mkfs.xfs", "mount")
    assert made == f"mkfs.xfs -q {device}"
    assert mounted == f"mount -o noatime {device} {machine.folder}/mnt"
    config = (machine.folder / "run/nats.conf").read_text()
    assert 'routes: [ "tls://nats-0.sllm.internal:6222", "tls://nats-1.sllm.internal:6222"' in config

    machine.reboot()
    machine.answer("blkid", "echo xfs\n")
    done = machine.run("boot.sh")
    assert done.returncode == 0, done.stdout
    assert machine.calls("mkfs.xfs") == [], "what has streams on it is never formatted"


def test_a_volume_that_was_made_larger_is_used_whole(tmp_path: Path, store: Path) -> None:
    """``volume_gb`` of before, formatted; a server that takes this one's place is told the store of the new size."""
    machine = nats_machine(tmp_path, store)
    machine.answer("blkid", "echo xfs\n")
    assert machine.run("boot.sh").returncode == 0
    mount = f"{machine.folder}/mnt"
    happened = machine.calls("mkfs.xfs", "mount", "xfs_growfs")
    assert [line.split()[0] for line in happened] == ["mount", "xfs_growfs"]
    assert happened[1].endswith(f" {mount}")


def test_a_nats_server_is_told_what_the_one_that_sllm_up_starts_is(tmp_path: Path, store: Path) -> None:
    """Its limits, and that what it acknowledges is on the disk."""
    machine = nats_machine(tmp_path, store)
    assert machine.run("boot.sh").returncode == 0
    run = machine.folder / "run"
    told = json.loads((run / "nats-settings").read_text())
    embedded = EmbeddedNats(directory=tmp_path / "embedded", identities=())
    embedded.prepare()
    config = json.loads(embedded.config_file.read_text())
    own = {"store_dir": f"{machine.folder}/mnt/jetstream", "max_file_store": 2**30}
    assert told["jetstream"] == config["jetstream"] | own
    assert told["jetstream"]["sync_interval"] == "always"
    assert {name: told[name] for name in told if name != "jetstream"}.items() <= config.items()
    assert "include ./nats-settings" in (run / "nats.conf").read_text()


def test_a_gateway(tmp_path: Path, store: Path) -> None:
    machine = machine_of(tmp_path, "gateway", store)
    machine.answer("python3.13", VENV.replace("FILL", "").replace("PYTHON", f'"{sys.executable}"'))
    done = machine.run("boot.sh")
    assert done.returncode == 0, done.stdout
    run = machine.folder / "run"
    assert (run / "gateway.env").read_text().splitlines() == [
        "SLLM_GATEWAY=g-i-0abc",
        f"SLLM_NATS_CREDS={run}/gateway.creds",
        "SLLM_HOST=10.42.128.7",
        "SLLM_PORT=8600",
        f"SLLM_TOKEN_FILE={run}/token",
    ]
    assert (run / "controller.env").read_text().startswith("SLLM_CONTROLLER=c-i-0abc\n")
    assert f"SLLM_SECRETS_KEY={run}/secrets-key" in (run / "controller.env").read_text().splitlines()
    assert len(Keyring.read(run / "secrets-key").boxes) == 1, "controllers of all machines have the one"
    for kind in ("gateway", "controller"):
        assert (run / f"{kind}.creds").read_text().startswith("-----BEGIN NATS USER JWT-----")
        assert (run / f"{kind}.creds").stat().st_mode & 0o777 == 0o400
    assert machine.calls("rpm") == ["rpm --query --quiet python3.12"]
    assert machine.calls("dnf") == []


# Ready from the second look on; from the fifth what THEN says.
TURNS = """\
turn=$(($(cat "$STATE/turns" 2>/dev/null || echo 0) + 1))
echo "$turn" >"$STATE/turns"
[ "$turn" != 1 ] || : >"$STATE/ready"
[ "$turn" != 4 ] || { THEN; }
[ "$turn" -lt 20 ]
"""
HEALTH = """\
*/readyz) [ -e "$STATE/ready" ] || exit 22 ;;
*/livez) [ ! -e "$STATE/hangs" ] || exit 28 ;;
"""


@pytest.mark.parametrize(("then", "killed"), [(': >"$STATE/hangs"', 2), ('rm "$STATE/ready"', 0)])
def test_a_gateway_that_hangs_is_killed_and_one_that_is_not_ready_is_left(
    tmp_path: Path, store: Path, then: str, killed: int
) -> None:
    machine = machine_of(tmp_path, "gateway", store)
    machine.answer("curl", machine.answered("curl").replace("*instance-id)", HEALTH + "*instance-id)"))
    machine.answer("sleep", TURNS.replace("THEN", then))
    done = machine.run("watch.sh")
    assert done.returncode != 0, "it watches for ever, but for a sleep that fails"
    assert done.stdout.count("READY") == 1
    (told,) = machine.calls("aws")
    group = "--auto-scaling-group-name prod-gateway --lifecycle-hook-name arrive --lifecycle-action-result CONTINUE"
    assert group in told
    kills = [call for call in machine.calls("systemctl") if call.startswith("systemctl kill ")]
    assert kills == ["systemctl kill --signal=KILL sllm-gateway.service"] * killed


def test_a_gateway_that_drains_is_not_killed_for_its_silence(tmp_path: Path, store: Path) -> None:
    """One that is stopped listens no more from the beginning of its drain on, and has ``drain_s`` for its calls."""
    machine = machine_of(tmp_path, "gateway", store)
    machine.answer("curl", machine.answered("curl").replace("*instance-id)", HEALTH + "*instance-id)"))
    machine.answer("sleep", TURNS.replace("THEN", ': >"$STATE/hangs"'))
    machine.answer("systemctl", '[ "$1" != is-active ] || exit 3  # deactivating\n')
    machine.run("watch.sh")
    assert not [call for call in machine.calls("systemctl") if call.startswith("systemctl kill ")]

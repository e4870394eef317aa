"""Terraform's own checks of every module and example: format, validation, and their tests against a mock provider."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.terraform import ROOT, TERRAFORM, environment, why_no_terraform

MODULES = sorted(path.parent.relative_to(TERRAFORM).as_posix() for path in TERRAFORM.glob("modules/*/main.tf"))
EXAMPLES = sorted(path.parent.relative_to(TERRAFORM).as_posix() for path in TERRAFORM.glob("examples/*/main.tf"))
OTHERS = sorted(path.parent.relative_to(TERRAFORM).as_posix() for path in TERRAFORM.glob("gcp/*/main.tf"))
CHECKOV = ROOT / ".venv-infra/bin/checkov"
MIRROR = os.environ.get("TF_MIRROR_DIR", "")
SECONDS = 1000

needs_terraform = pytest.mark.skipif(why_no_terraform() is not None, reason=str(why_no_terraform()))
needs_provider = pytest.mark.skipif(
    why_no_terraform() is not None or not MIRROR,
    reason=why_no_terraform() or "TF_MIRROR_DIR does not name a filesystem mirror with the AWS provider",
)


def terraform(folder: Path, home: Path, *words: str) -> str:
    """Run terraform in ``folder`` with the providers of the mirror alone; its output. Fails with it."""
    own = environment(home, TF_DATA_DIR=str(home / "data"))
    if MIRROR:
        installation = f'provider_installation {{\n  filesystem_mirror {{\n    path = "{MIRROR}"\n  }}\n}}\n'
        Path(own["TF_CLI_CONFIG_FILE"]).write_text(installation)
    done = subprocess.run(
        ["terraform", *words, "-no-color"],
        cwd=folder,
        env=own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@needs_terraform
def test_format(tmp_path: Path) -> None:
    terraform(TERRAFORM, tmp_path, "fmt", "-check", "-recursive", "-diff", str(TERRAFORM))


# A copy: terraform writes its lock file beside what it checks.
@needs_provider
@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)  # a provider is started for each run of a test
@pytest.mark.parametrize("name", [*MODULES, *EXAMPLES])
def test_validate_and_test(tmp_path: Path, name: str) -> None:
    shutil.copytree(TERRAFORM, tmp_path / "terraform", ignore=shutil.ignore_patterns(".terraform*"))
    folder = tmp_path / "terraform" / name
    terraform(folder, tmp_path, "init", "-backend=false", "-input=false")
    terraform(folder, tmp_path, "validate")
    if name in MODULES or (folder / "tests").exists():
        assert "0 failed" in terraform(folder, tmp_path, "test")


@pytest.mark.skipif(not CHECKOV.exists(), reason="checkov is not installed: make infra-tools")
@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_checkov(tmp_path: Path) -> None:
    """No failed check that is not explained in place (``checkov:skip=ID:why``)."""
    command = [str(CHECKOV), "--directory", str(TERRAFORM), "--framework", "terraform", "--quiet", "--compact"]
    done = subprocess.run(
        [*command, "--skip-download", "--download-external-modules", "false"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


PARSE = """\
import json, sys
from tfparse import load_from_path
print(json.dumps({name: load_from_path(name) for name in sys.argv[1:]}))
"""


def test_every_variable_and_output_is_explained() -> None:
    """The floor, without terraform: everything parses; variables have type and description, outputs a description."""
    # Its parser is a program in Go, which brings threads of its own: hence a process.
    parsed = subprocess.run(
        [sys.executable, "-c", PARSE, *MODULES, *EXAMPLES, *OTHERS],
        cwd=TERRAFORM,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )

    found = json.loads(parsed.stdout)
    for name in [*MODULES, *EXAMPLES, *OTHERS]:
        for variable in found[name].get("variable", []):
            label = f"{name}: variable {variable['__tfmeta']['label']}"
            assert variable.get("description"), label
            assert variable.get("type"), label
        for output in found[name].get("output", []):
            assert output.get("description"), f"{name}: output {output['__tfmeta']['label']}"
        assert all(block["required_version"] for block in found[name]["terraform"]), name


def test_nothing_else_names_the_whole_world() -> None:
    """Clients' 443 at the load balancer, the way out that is asked for, and the routes that these two need."""
    found = [
        (path.relative_to(TERRAFORM).as_posix(), line.split("=")[0].strip())
        for path in sorted(TERRAFORM.rglob("*.tf"))
        for line in path.read_text().splitlines()
        if "0.0.0.0/0" in line or "::/0" in line
    ]
    assert found == [
        ("modules/network/main.tf", "destination_cidr_block"),
        ("modules/network/main.tf", "destination_cidr_block"),
        ("modules/network/security.tf", "cidr_ipv4"),
        ("modules/network/variables.tf", "default"),
    ]


def test_every_module_is_whole() -> None:
    for name in MODULES:
        files = {path.name for path in (TERRAFORM / name).iterdir()}
        assert {"main.tf", "variables.tf", "outputs.tf", "versions.tf", "README.md", "tests"} <= files, name
        assert list((TERRAFORM / name).glob("tests/*.tftest.hcl")), name
        assert 'mock_provider "aws"' in next((TERRAFORM / name).glob("tests/*.tftest.hcl")).read_text(), name


def test_shell_scripts_are_clean() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    scripts = sorted(str(path) for path in TERRAFORM.rglob("*.sh"))
    assert scripts
    done = subprocess.run([checker, *scripts], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout

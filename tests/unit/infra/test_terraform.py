"""Terraform's own checks of every module and example: format, validation, and their tests against a mock provider."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder

from tests.fixtures.terraform import ROOT, TERRAFORM, environment

MODULES = sorted(path.parent.relative_to(TERRAFORM).as_posix() for path in TERRAFORM.glob("modules/*/main.tf"))
EXAMPLES = sorted(path.parent.relative_to(TERRAFORM).as_posix() for path in TERRAFORM.glob("examples/*/main.tf"))
OTHERS = sorted(path.parent.relative_to(TERRAFORM).as_posix() for path in TERRAFORM.glob("gcp/*/main.tf"))
CHECKOV = ROOT / ".venv-infra/bin/checkov"
MIRROR = os.environ.get("TF_MIRROR_DIR", "")
SECONDS = 1000

needs_provider = pytest.mark.skipif(
    not MIRROR, reason="TF_MIRROR_DIR does not name a filesystem mirror with the AWS provider"
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


@pytest.mark.terraform
def test_format(tmp_path: Path) -> None:
    terraform(TERRAFORM, tmp_path, "fmt", "-check", "-recursive", "-diff", str(TERRAFORM))


# A copy: terraform writes its lock file beside what it checks.
@pytest.mark.terraform
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


GIVEN: dict[str, dict[str, object]] = {
    "modules/nats": {"vpc_id": "vpc-1", "subnets": {"a": "subnet-a", "b": "subnet-b", "c": "subnet-c"}},
    "modules/gateway": {
        "vpc_id": "vpc-1",
        "public_subnet_ids": ["subnet-pa", "subnet-pb"],
        "private_subnet_ids": ["subnet-a"],
        "balancer_security_group_id": "sg-balancer",
        "gateway_security_group_id": "sg-gateway",
        "host": "sllm.example.com",
        "certificate_arn": "arn:aws:acm:us-east-1:123456789012:certificate/1",
    },
    "modules/gpu_pool": {"subnet_ids": ["subnet-a"], "model_bucket_arn": "arn:aws:s3:::models"},
    "gcp/gpu_pool": {
        "project": "acme",
        "region": "us-central1",
        "zones": ["us-central1-a"],
        "subnetwork": "nodes",
        "bucket": "models",
        "secret_prefix": "sllm-prod",
    },
}
OF_A_NETWORK: dict[str, object] = {
    "zones": ["us-east-1a", "us-east-1b", "us-east-1c"],
    "bucket_arns": ["arn:aws:s3:::models"],
}
COMMON: dict[str, object] = {
    "name": "prod",
    "region": "us-east-1",
    "security_group_ids": ["sg-1"],
    "artifact_bucket_arn": "arn:aws:s3:::models",
    "artifact_sha256": "0" * 64,
    "nats_url": "tls://nats-0.sllm.internal:4222",
    "parameter_prefix": "/sllm/prod",
}


def planned(folder: Path, name: str, key: object = "sllm.tar.gz", **more: object) -> str:
    """What terraform says of the variables alone of that module, with an artifact of that ``key`` and ``more``."""
    for file in ("variables.tf", "shapes.tf"):
        if (TERRAFORM / name / file).exists():
            shutil.copy(TERRAFORM / name / file, folder)
    scheme = "gs" if name.startswith("gcp") else "s3"
    declared = (folder / "variables.tf").read_text()
    given = {variable: value for variable, value in COMMON.items() if f'variable "{variable}"' in declared}
    given |= GIVEN.get(name, OF_A_NETWORK) | more
    given |= {"artifact_url": f"{scheme}://models/{key}"} if 'variable "artifact_url"' in declared else {}
    (folder / "given.tfvars.json").write_text(json.dumps(given))
    command = ["terraform", "plan", "-input=false", "-no-color", "-var-file=given.tfvars.json"]
    own = environment(folder / "home")
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ("Invalid value for variable" in done.stderr) == (done.returncode != 0), done.stderr
    return done.stderr


@pytest.mark.terraform
@pytest.mark.parametrize("name", sorted(GIVEN))
def test_no_artifacts_key_is_more_than_a_word_to_the_boot_scripts_shell(tmp_path: Path, name: str) -> None:
    for key in ("artifacts/sllm-0.1.0_x.tar.gz", "env=prod/sllm-0.1.0+cu128.tar.gz", "a:b@c,d.tar.gz"):
        assert planned(tmp_path, name, key) == "", key
    for key in (
        "my artifacts/sllm.tar.gz",
        "$(reboot).tar.gz",
        "a;b.tar.gz",
        "a&b.tar.gz",
        "*.tar.gz",
        "a\nb.tar.gz",
        "a:~b.tar.gz",
    ):
        assert "artifact_url is" in planned(tmp_path, name, key), key


@pytest.mark.terraform
@pytest.mark.parametrize("name", sorted(set(GIVEN) - {"modules/nats"}))
def test_a_setting_is_one_line_of_the_daemons_environment(tmp_path: Path, name: str) -> None:
    assert planned(tmp_path, name, settings={"SLLM_POOL_SIZE": "4"}) == ""
    assert "of one line" in planned(tmp_path, name, settings={"SLLM_POOL_SIZE": "4\nSLLM_HOME=/tmp"})


def test_what_aws_does_to_a_pool_by_itself_is_told() -> None:
    """With spot instances its group ends nodes that neither the controller nor anybody by hand has picked."""
    assert "capacity_rebalance        = var.spot_percentage > 0" in (TERRAFORM / "modules/gpu_pool/main.tf").read_text()
    for page in (ROOT / "docs/terraform.md", TERRAFORM / "modules/gpu_pool/README.md"):
        assert "`capacity_rebalance`" in page.read_text(), page


@pytest.mark.terraform
@pytest.mark.parametrize("name", ["pool", "zone", "type", "market"])
def test_a_pools_labels_are_none_that_its_nodes_have_anyway(tmp_path: Path, name: str) -> None:
    """A node's own come later, and win: the controller would make nodes for a start that fits none of them."""
    assert planned(tmp_path, "modules/gpu_pool", labels={"tier": "standard"}) == ""
    assert "labels" in planned(tmp_path, "modules/gpu_pool", labels={name: "a"})


@pytest.mark.terraform
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpus", "H200"),
        ("gpus", "H200:8"),
        ("gpus", "8xH200:141GiB"),
        ("gpus", "H200:141GiB:8"),
        ("memory", "1024 Gigs"),
        ("memory", "0GiB"),
        ("cpu", 0),
    ],
)
def test_a_nodes_shape_is_one_that_controllers_take(tmp_path: Path, field: str, value: object) -> None:
    """It is the settings of every controller: none of them starts with one that it cannot read."""
    pool = {"instance_types": ["p5e.48xlarge"]}
    shape = {"cpu": 192, "memory": "1024GiB", "gpus": ",".join(["H200:141GiB"] * 8)}
    assert planned(tmp_path, "modules/gpu_pool", **pool, node_shape=shape) == ""
    assert "node_shape" in planned(tmp_path, "modules/gpu_pool", **pool, node_shape=shape | {field: value})


@pytest.mark.terraform
@pytest.mark.parametrize(
    ("name", "port"),
    [
        ("modules/gateway", "port"),
        ("modules/network", "gateway_port"),
        ("modules/network", "peer_port"),
        ("modules/gpu_pool", "peer_port"),
        ("gcp/gpu_pool", "peer_port"),
    ],
)
def test_a_port_is_one_that_the_daemons_account_may_listen_at(tmp_path: Path, name: str, port: str) -> None:
    """Below 1024 the kernel lets root alone, which no daemon is: no machine would ever be READY."""
    assert planned(tmp_path, name, **{port: 8700}) == ""
    for wrong in (80, 1023, 65536, 8600.5):
        assert f"{port} is" in planned(tmp_path, name, **{port: wrong}), wrong


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


def test_what_terraform_keeps_beside_its_files_is_in_no_source_archive(tmp_path: Path) -> None:
    """State and variables name what a cluster is made of. hatchling leaves out what git is told to ignore."""
    for file in ("pyproject.toml", ".gitignore", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    example = tmp_path / "infra/terraform/examples/minimal"
    (example / ".terraform").mkdir(parents=True)
    kept = ("terraform.tfstate", "terraform.tfstate.backup", "terraform.tfvars", "prod.auto.tfvars", "x.tfvars.json")
    for file in ("main.tf", *kept, "errored.tfstate", "prod.tfplan", ".terraform/terraform.tfstate"):
        (example / file).touch()
    files = {Path(file.path).name for file in SdistBuilder(str(tmp_path)).recurse_included_files()}
    assert "main.tf" in files
    assert files <= {"main.tf", "README.md", "LICENSE", "pyproject.toml", ".gitignore"}


def test_shell_scripts_are_clean() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    scripts = sorted(str(path) for path in TERRAFORM.rglob("*.sh"))
    assert scripts
    done = subprocess.run([checker, *scripts], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.terraform
@pytest.mark.parametrize(
    ("field", "value"), [("memory", "0.5TiB"), ("memory", "512 GiB"), ("gpus", "H200:141GiB, H200:141GiB")]
)
def test_a_shape_that_controllers_take_is_taken(tmp_path: Path, field: str, value: object) -> None:
    shape = {"cpu": 192, "memory": "1024GiB", "gpus": "H200:141GiB", field: value}
    assert planned(tmp_path, "modules/gpu_pool", instance_types=["p5e.48xlarge"], node_shape=shape) == ""

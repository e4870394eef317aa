"""What Terraform would do to machines that are there when a setting changes: planned by the real AWS provider, offline,
against a state that holds their group."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.terraform import TERRAFORM
from tests.unit.infra.test_terraform import COMMON, GIVEN, needs_provider, terraform

pytestmark = [pytest.mark.terraform, pytest.mark.slow, needs_provider]

WHO = """\
<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>
<Arn>arn:aws:iam::123456789012:user/me</Arn><UserId>U</UserId><Account>123456789012</Account>
</GetCallerIdentityResult></GetCallerIdentityResponse>"""
PROVIDER = """\
provider "aws" {
  region                      = "us-east-1"
  access_key                  = "a"
  secret_key                  = "s"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
  endpoints {
    sts = "STS"
  }
}
"""


class Sts(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(WHO.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def sts() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Sts)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class Module:
    """A module as the root one, whose plans the real provider makes. ``given``: what it needs beside ``GIVEN``."""

    def __init__(self, folder: Path, name: str, sts: str, **given: object) -> None:
        shutil.copytree(TERRAFORM, folder / "terraform", ignore=shutil.ignore_patterns(".terraform*", "tests"))
        self.folder, self.home = folder / "terraform" / name, folder / "home"
        (self.folder / "provider.tf").write_text(PROVIDER.replace("STS", sts))
        declared = (self.folder / "variables.tf").read_text()
        self.given = {key: value for key, value in COMMON.items() if f'variable "{key}"' in declared}
        self.given |= GIVEN.get(name, {}) | given
        self.given |= {"artifact_url": "s3://models/sllm.tar.gz"} if 'variable "artifact_url"' in declared else {}
        terraform(self.folder, self.home, "init", "-backend=false", "-input=false")

    def plan(self, **more: object) -> dict[str, Any]:
        """By address: what is planned for each resource."""
        (self.folder / "given.auto.tfvars.json").write_text(json.dumps(self.given | more))
        terraform(self.folder, self.home, "plan", "-refresh=false", "-input=false", "-lock=false", "-out=plan")
        shown = json.loads(terraform(self.folder, self.home, "show", "-json", "plan"))
        return {each["address"]: each["change"] for each in shown["resource_changes"]}

    def there(self, kind: str, name: str, instances: dict[str, dict[str, Any]], schema: int = 1) -> None:
        """From now on these are there, with these attributes: by key, which is "" where there is one alone."""
        each = [
            {"schema_version": schema, "attributes": attributes} | ({"index_key": key} if key else {})
            for key, attributes in instances.items()
        ]
        provider = 'provider["registry.terraform.io/hashicorp/aws"]'
        resource = {"mode": "managed", "type": kind, "name": name, "provider": provider, "instances": each}
        file = self.folder / "terraform.tfstate"
        state = {"version": 4, "terraform_version": "1.9.0", "serial": 1, "lineage": "x", "outputs": {}}
        resources = json.loads(file.read_text())["resources"] if file.exists() else []
        file.write_text(json.dumps(state | {"resources": [*resources, resource]}))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "group", "more", "hook", "seconds"),
    [
        ("modules/gpu_pool", "nodes", {"node_drain_s": 600}, "drain", 660),
        ("modules/gpu_pool", "nodes", {"boot_timeout_s": 1800}, "arrive", 1800),
        ("modules/gateway", "gateways", {"boot_timeout_s": 1800}, "arrive", 1800),
    ],
)
def test_another_time_for_a_hook_takes_no_machine_away(
    tmp_path: Path, sts: str, name: str, group: str, more: dict[str, object], hook: str, seconds: int
) -> None:
    """It is the hook's new time, and the group with all its machines stays."""
    module = Module(tmp_path, name, sts)
    address = f"aws_autoscaling_group.{group}"
    made = module.plan()[address]["after"]
    module.there("aws_autoscaling_group", group, {"": made | {"id": made["name"]}})
    changed = module.plan(**more)
    assert changed[address]["actions"] in (["no-op"], ["update"]), changed[address].get("replace_paths")
    assert changed[f"aws_autoscaling_lifecycle_hook.{hook}"]["after"]["heartbeat_timeout"] == seconds


@pytest.mark.timeout(600)
def test_a_larger_server_is_no_stop_of_all_three(tmp_path: Path, sts: str) -> None:
    """Terraform changes them side by side, and AWS changes the type of one that is stopped. So it is taken as a new
    image is: when a server is replaced, one at a time."""
    module = Module(tmp_path, "modules/nats", sts)
    main = module.folder / "main.tf"
    asked = 'data "aws_ssm_parameter" "image" {\n  name = var.ami_parameter\n}\n'
    assert asked in main.read_text()
    told = main.read_text().replace(asked, "").replace("data.aws_ssm_parameter.image.value", '"ami-1"')
    main.write_text(told.replace('nonsensitive("ami-1")', '"ami-1"'))
    planned = module.plan()
    names = ["nats-0", "nats-1", "nats-2"]
    servers = [f'aws_instance.server["{name}"]' for name in names]
    known = {"security_groups": [], "ipv6_addresses": [], "private_ip": "10.42.128.7"}
    made = {name: planned[at]["after"] | known | {"id": f"i-{name}"} for name, at in zip(names, servers, strict=True)}
    module.there("aws_instance", "server", made)
    changed = module.plan(instance_type="m7i.large")
    assert [changed[server]["actions"] for server in servers] == [["update"]] * 3, "nobody is replaced by this"
    assert [changed[server]["after"]["instance_type"] for server in servers] == ["t3.small"] * 3


@pytest.mark.timeout(600)
def test_another_port_of_the_gateways_takes_the_target_group_that_is_listened_to_last(tmp_path: Path, sts: str) -> None:
    """AWS deletes none that a listener sends to, and no two have one name."""
    module = Module(tmp_path, "modules/gateway", sts)
    address = "aws_lb_target_group.gateways"
    made = module.plan()[address]["after"]
    arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:targetgroup/prod-gateway/0"
    module.there("aws_lb_target_group", "gateways", {"": made | {"id": arn, "arn": arn}}, schema=0)
    change = module.plan(port=8700)[address]
    assert change["actions"] == ["create", "delete"]
    assert change["after"]["name"] != made["name"]


@pytest.mark.timeout(600)
def test_a_release_does_not_replace_the_target_group_of_gateways_that_serve(tmp_path: Path, sts: str) -> None:
    """The listener would send to one in which no gateway is healthy yet. As the releases before named it."""
    module = Module(tmp_path, "modules/gateway", sts)
    address = "aws_lb_target_group.gateways"
    made = module.plan()[address]["after"] | {"name": f"{module.given['name']}-gateway"}
    arn = "arn:aws:elasticloadbalancing:us-east-1:123456789012:targetgroup/prod-gateway/0"
    module.there("aws_lb_target_group", "gateways", {"": made | {"id": arn, "arn": arn}}, schema=0)
    change = module.plan()[address]
    assert change["actions"] in (["no-op"], ["update"]), change.get("replace_paths")


@pytest.mark.timeout(600)
def test_zones_in_another_order_take_no_subnet_away(tmp_path: Path, sts: str) -> None:
    """Servers of NATS go with their subnets: two or three of them at once."""
    zones = ["us-east-1a", "us-east-1b", "us-east-1c"]
    module = Module(tmp_path, "modules/network", sts, zones=zones, bucket_arns=["arn:aws:s3:::models"])
    planned = module.plan()
    vpc = planned["aws_vpc.this"]["after"] | {"id": "vpc-1", "arn": "arn:aws:ec2:us-east-1:123456789012:vpc/vpc-1"}
    module.there("aws_vpc", "this", {"": vpc})
    for kind in ("public", "private"):
        made = {zone: planned[f'aws_subnet.{kind}["{zone}"]']["after"] for zone in zones}
        own = {zone: after | {"id": f"subnet-{kind}-{zone}", "vpc_id": "vpc-1"} for zone, after in made.items()}
        module.there("aws_subnet", kind, own)
    subnets = [f'aws_subnet.{kind}["{zone}"]' for kind in ("public", "private") for zone in zones]
    same = module.plan()
    assert [same[each]["actions"] for each in subnets] == [["no-op"]] * 6
    other = module.plan(zones=["us-east-1b", "us-east-1a", "us-east-1c"])
    assert {each: other[each]["actions"] for each in subnets} == {each: ["no-op"] for each in subnets}
    moved = module.plan(zones=zones, cidr="10.43.0.0/16")['aws_subnet.private["us-east-1b"]']
    assert (moved["actions"], moved["after"]["cidr_block"]) == (["delete", "create"], "10.43.144.0/20")


ZONES = ["us-east-1a", "us-east-1b", "us-east-1c"]


@pytest.mark.timeout(600)
def test_a_zone_that_comes_for_one_that_goes_takes_no_addresses_of_one_that_stays(tmp_path: Path, sts: str) -> None:
    module = Module(tmp_path, "modules/network", sts, zones=ZONES, bucket_arns=["arn:aws:s3:::models"])
    planned = module.plan()
    vpc = planned["aws_vpc.this"]["after"] | {"id": "vpc-1", "arn": "arn:aws:ec2:us-east-1:123456789012:vpc/vpc-1"}
    module.there("aws_vpc", "this", {"": vpc})
    for kind in ("public", "private"):
        made = {zone: planned[f'aws_subnet.{kind}["{zone}"]']["after"] for zone in ZONES}
        module.there("aws_subnet", kind, {z: a | {"id": f"s-{kind}-{z}", "vpc_id": "vpc-1"} for z, a in made.items()})
    with pytest.raises(AssertionError, match="further ones go to the end"):
        module.plan(zones=["us-east-1b", "us-east-1c", "us-east-1d"])
    other = module.plan(zones=["us-east-1d", "us-east-1b", "us-east-1c"])
    assert other['aws_subnet.private["us-east-1d"]']["after"]["cidr_block"] == "10.42.128.0/20"
    assert other['aws_subnet.private["us-east-1c"]']["actions"] == ["no-op"]

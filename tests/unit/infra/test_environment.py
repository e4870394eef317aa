"""What the rendered environment files name, the daemons read."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sllm_gateway.settings import GatewaySettings
from sllm_invoker import machine
from sllm_invoker.settings import InvokerSettings
from sllm_loaderd.daemon.settings import LoaderSettings
from sllm_runtime.control.daemon import ControllerSettings
from sllm_runtime.control.fits import Need, choose_gpus
from sllm_runtime.control.providing.aws import AutoScalingGroup
from sllm_runtime.control.providing.packing import empty
from sllm_runtime.control.providing.provider import Shape
from sllm_runtime.platform.settings import PREFIX, Settings
from tests.fixtures.terraform import TERRAFORM, render
from tests.unit.infra.stubs import MACHINE

pytestmark = pytest.mark.terraform

NOT_OURS = {"AWS_DEFAULT_REGION"}
"""boto3 reads it."""
OF_THE_MACHINE = set(re.findall(r"printf '(SLLM_[A-Z_]+)=", (MACHINE / "node/stages.sh").read_text()))


def variables(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def node_env(tmp_path: Path) -> dict[str, str]:
    text = render(
        tmp_path / "home",
        "modules/gpu_pool/templates/node.env.tftpl",
        home="/mnt/sllm",
        nats_url="tls://nats-0.sllm.internal:4222,tls://nats-1.sllm.internal:4222",
        nats_ca="/run/sllm/nats-ca.pem",
        nats_creds="/run/sllm/nats.creds",
        node_drain_s=90,
        settings={"AWS_DEFAULT_REGION": "us-east-1", "SLLM_POOL_SIZE": "4"},
    )
    return variables(text)


def known(*settings: type[Settings]) -> set[str]:
    return {PREFIX + name.upper() for kind in settings for name in kind.model_fields}


def test_each_variable_is_one_that_the_node_reads(tmp_path: Path) -> None:
    assert {"SLLM_NODE", "SLLM_LABELS", "SLLM_PEER_LISTEN", "SLLM_PEER_TOKEN"} == OF_THE_MACHINE
    unknown = set(node_env(tmp_path)) | OF_THE_MACHINE
    assert unknown - known(InvokerSettings, LoaderSettings) == NOT_OURS


def test_the_daemons_take_the_values(tmp_path: Path) -> None:
    """Each value passes the daemon's own validation, together with those that boot.sh and ``sllm up`` add."""
    own = {"SLLM_NODE": "i-0abc", "SLLM_LABELS": "pool=chat,zone=us-east-1a", "SLLM_PEER_LISTEN": "10.0.0.1:8610"}
    environment = node_env(tmp_path) | own
    paths = {"data_dir": tmp_path, "loaderd_socket": tmp_path / "socket"}
    invoker = InvokerSettings.load(environment, **paths)
    assert (invoker.replicas, invoker.pool_size, invoker.nats_creds) == (3, 4, Path("/run/sllm/nats.creds"))
    loader = LoaderSettings.load(environment, data=tmp_path, socket=tmp_path / "socket")
    assert (loader.cuda_devices, loader.peer_listen) == ("all", "10.0.0.1:8610")


def test_gateways_and_controllers_read_theirs(tmp_path: Path) -> None:
    text = render(
        tmp_path / "home",
        "modules/gateway/templates/cluster.env.tftpl",
        home="/var/lib/sllm",
        nats_url="tls://nats-0.sllm.internal:4222",
        nats_ca="/run/sllm/nats-ca.pem",
        drain_s=60,
        keep_alive_s=960,
        settings={"AWS_DEFAULT_REGION": "us-east-1"},
    )
    own = set(re.findall(r"printf '(SLLM_[A-Z_]+)=", (MACHINE / "gateway/stages.sh").read_text()))
    gateways = {"SLLM_GATEWAY", "SLLM_NATS_CREDS", "SLLM_HOST", "SLLM_PORT", "SLLM_TOKEN_FILE"}
    assert own == gateways | {"SLLM_CONTROLLER", "SLLM_SECRETS_KEY"}
    unknown = (set(variables(text)) | own) - known(GatewaySettings, ControllerSettings)
    assert unknown == NOT_OURS
    gateway = GatewaySettings.load(variables(text))
    assert (gateway.drain, gateway.keep_alive) == (60, 960)


def test_a_pool_tells_the_controller_of_itself() -> None:
    """The output ``controller_settings``, and each shape that the module knows, as the controller takes them."""
    told = set(re.findall(r"^ +(SLLM_[A-Z_]+) +=", (TERRAFORM / "modules/gpu_pool/outputs.tf").read_text(), re.M))
    assert "SLLM_NODES_GROUP" in told
    assert told - known(ControllerSettings) == set()
    shapes = (TERRAFORM / "modules/gpu_pool/shapes.tf").read_text()
    found = re.findall(r'cpu = (\d+), memory = "(\w+)", gpus = (?:join\(.*range\((\d+)\) : )?"([\w:]+)"', shapes)
    assert len(found) == shapes.count("cpu =")
    for cpu, memory, count, gpu in found:
        gpus = ",".join([gpu] * int(count or 1))
        given = {"SLLM_NODES_CPU": cpu, "SLLM_NODES_MEMORY": memory, "SLLM_NODES_GPUS": gpus}
        shape = ControllerSettings.load(given).shape
        assert (shape.cpu, len(shape.gpus)) == (float(cpu), int(count or 1))


class Asked:
    """The auto scaling API, which writes down what it is asked."""

    def __init__(self) -> None:
        self.actions: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        def answer(**_given: Any) -> dict[str, Any]:
            self.actions.add("autoscaling:" + "".join(map(str.capitalize, name.split("_"))))
            return {"AutoScalingGroups": [{"DesiredCapacity": 1, "MinSize": 0, "MaxSize": 2, "Instances": []}]}

        return answer


async def test_the_controllers_role_may_do_what_its_provider_asks_and_no_more() -> None:
    api = Asked()
    group = AutoScalingGroup(api, "chat-gpu", Shape(cpu=4.0, memory=2**33))
    await group.capacity()
    await group.set_desired(2)
    await group.remove("i-0abc")
    text = (TERRAFORM / "modules/gpu_pool/iam.tf").read_text()
    policy = text[text.index("scaler_policy = {") : text.index('resource "aws_iam_role" "node"')]
    granted = set(re.findall(r'"(autoscaling:\w+)"', policy))
    assert granted == api.actions


@pytest.mark.parametrize(("gpu", "model"), [("L4:24GiB", "NVIDIA L4"), ("H100:80GiB", "NVIDIA H100 80GB HBM3")])
def test_a_start_that_a_node_is_made_for_fits_the_node_that_comes(
    gpu: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nodes of one type say of their GPUs is what the controller is told of them, whatever the driver lists."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "information").write_text(f"Model: \t\t {model}\nIRQ: 40\n")
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path)
    is_told = "SLLM_GPUS" in (TERRAFORM / "modules/gpu_pool/user_data.tf").read_text()
    there = machine.parse_gpus(gpu) if is_told else machine.nvidia_gpus()
    shape = ControllerSettings.load({"SLLM_NODES_GPUS": gpu}).shape
    need = Need(cpu=1.0, memory=1, gpus=((gpu.partition(":")[0], 1),), gpu_memory=20 * 2**30)
    assert choose_gpus(need, empty(shape)) is not None
    assert choose_gpus(need, empty(replace(shape, gpus=there))) is not None

"""An auto scaling group as a provider of nodes, against moto's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from moto import mock_aws

from sllm_runtime.control.providing.aws import AutoScalingGroup, client
from sllm_runtime.control.providing.provider import Shape
from sllm_runtime.control.providing.settings import ProviderSettings
from sllm_runtime.protocol.errors import InvalidRequest, NotFound, SllmError, Unauthorized, Unavailable

REGION, GROUP = "eu-central-1", "gpu"
SHAPE = Shape(cpu=8.0, memory=2**35)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A group of nothing to three, as a launch template makes them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with mock_aws():
        machines = boto3.client("ec2", region_name=REGION)
        image = machines.describe_images()["Images"][0]["ImageId"]
        made = machines.create_launch_template(
            LaunchTemplateName="node", LaunchTemplateData={"ImageId": image, "InstanceType": "t3.small"}
        )
        groups = client(REGION)
        groups.create_auto_scaling_group(
            AutoScalingGroupName=GROUP,
            LaunchTemplate={"LaunchTemplateId": made["LaunchTemplate"]["LaunchTemplateId"]},
            MinSize=0,
            MaxSize=3,
            DesiredCapacity=0,
            AvailabilityZones=[f"{REGION}a"],
        )
        yield groups
        for opened in (machines, groups):
            opened.close()


def test_a_question_is_asked_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/nodes.md: a provider that does not answer is noticed by its call, after at most some 25 s. Of an AWS that
    takes the connection and says nothing each try takes 10 s."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    opened = client(REGION)
    config = opened.meta.config
    tries = config.retries["total_max_attempts"]
    opened.close()
    assert tries * config.read_timeout <= 25


@pytest.mark.slow
async def test_it_grows_and_a_named_node_goes(api: Any) -> None:
    group = AutoScalingGroup(api, GROUP, SHAPE)
    offer = await group.capacity()
    assert (offer.desired, offer.least, offer.most, offer.members, offer.shape) == (0, 0, 3, frozenset(), SHAPE)
    await group.set_desired(2)
    await group.set_desired(2)
    offer = await group.capacity()
    assert offer.desired == 2
    first, second = sorted(offer.members)
    await group.remove(first)
    offer = await group.capacity()
    assert (offer.desired, offer.members) == (1, frozenset({second}))


@pytest.mark.slow
async def test_a_group_that_is_not_there(api: Any) -> None:
    with pytest.raises(NotFound, match="no auto scaling group other; see SLLM_NODES_GROUP"):
        await AutoScalingGroup(api, "other", SHAPE).capacity()


class Answers:
    """The API, of which every question ends with ``error``."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, _name: str) -> Any:
        def refuse(**_given: Any) -> None:
            raise self._error

        return refuse


def error(code: str, message: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "Any")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (error("AccessDenied", "not authorized to perform: autoscaling:SetDesiredCapacity"), Unauthorized),
        (error("ValidationError", "New SetDesiredCapacity value 4 is above max value 3"), Unavailable),
        (error("Throttling", "Rate exceeded"), Unavailable),
        (EndpointConnectionError(endpoint_url="https://autoscaling"), Unavailable),
    ],
    ids=["refused", "above its most", "throttled", "away"],
)
async def test_what_aws_raises_names_the_group(raised: Exception, kind: type[SllmError]) -> None:
    with pytest.raises(kind, match=GROUP):
        await AutoScalingGroup(Answers(raised), GROUP, SHAPE).set_desired(1)


class Bounded:
    """The API of a group with so many instances, which ends none without another one below its minimum: moto would."""

    def __init__(self, instances: int, least: int) -> None:
        self.made = instances
        self._there = {f"i-{number + 1}" for number in range(instances)}
        self._desired, self._least = instances, least

    def describe_auto_scaling_groups(self, AutoScalingGroupNames: list[str]) -> dict[str, Any]:
        members = [{"InstanceId": name, "LifecycleState": "InService"} for name in self._there]
        bounds = {"DesiredCapacity": self._desired, "MinSize": self._least, "MaxSize": 3}
        return {"AutoScalingGroups": [{**bounds, "Instances": members}]}

    def terminate_instance_in_auto_scaling_group(self, InstanceId: str, ShouldDecrementDesiredCapacity: bool) -> None:
        if InstanceId not in self._there:
            raise error("ValidationError", f"Instance Id not found - No managed instance found for {InstanceId}")
        if ShouldDecrementDesiredCapacity and self._desired <= self._least:
            raise error("ValidationError", "Terminating instance without replacement will violate min size constraint")
        self._there.remove(InstanceId)
        if ShouldDecrementDesiredCapacity:
            self._desired -= 1
        else:
            self.made += 1
            self._there.add(f"i-{self.made}")


async def test_one_that_hangs_goes_at_the_minimum_too_for_another_one() -> None:
    api = Bounded(2, least=1)
    group = AutoScalingGroup(api, GROUP, SHAPE)
    await group.remove("i-1")
    offer = await group.capacity()
    assert (offer.desired, offer.members) == (1, frozenset({"i-2"}))
    await group.remove("i-2")
    offer = await group.capacity()
    assert (offer.desired, offer.members, api.made) == (1, frozenset({"i-3"}), 3)


async def test_removing_what_is_gone_is_done() -> None:
    await AutoScalingGroup(Bounded(1, least=0), GROUP, SHAPE).remove("i-7")


def test_settings_say_what_is_missing_or_wrong() -> None:
    assert ProviderSettings.load({}).provider() is None
    with pytest.raises(InvalidRequest, match="SLLM_NODES_GROUP"):
        ProviderSettings.load({"SLLM_NODE_PROVIDER": "aws"}).provider()
    with pytest.raises(InvalidRequest, match="SLLM_NODES_DATA"):
        ProviderSettings.load({"SLLM_NODE_PROVIDER": "processes"}).provider()
    with pytest.raises(InvalidRequest, match="SLLM_NODE_PROVIDER"):
        ProviderSettings.load({"SLLM_NODE_PROVIDER": "azure"})
    shape = ProviderSettings.load({"SLLM_NODES_GPUS": "L4:24GiB,L4:24GiB", "SLLM_NODES_LABELS": "zone = a"}).shape
    assert [(gpu.index, gpu.kind, gpu.memory) for gpu in shape.gpus] == [(0, "L4", 24 * 2**30), (1, "L4", 24 * 2**30)]
    assert shape.labels == {"zone": "a"}
    for variable, text in (("GPUS", "L4"), ("GPUS", "NVIDIA L4:24GiB"), ("LABELS", "zone")):
        with pytest.raises(InvalidRequest, match=f"SLLM_NODES_{variable}: '{text}'"):
            _ = ProviderSettings.load({f"SLLM_NODES_{variable}": text}).shape
    with pytest.raises(InvalidRequest, match="SLLM_NODES_SANDBOX"):
        ProviderSettings.load({"SLLM_NODES_SANDBOX": "proces"})
    bounds = {"SLLM_NODE_PROVIDER": "processes", "SLLM_NODES_DATA": "/x", "SLLM_NODES_LEAST": "3"}
    with pytest.raises(InvalidRequest, match="SLLM_NODES_LEAST 3 is above SLLM_NODES_MOST 2"):
        ProviderSettings.load(bounds).provider()


@pytest.mark.parametrize("lost", ["60", "180"])
def test_nodes_that_would_be_given_back_before_they_have_come_are_refused(lost: str) -> None:
    """They would be made and given back for ever, and nothing would ever start."""
    given = {"SLLM_NODE_PROVIDER": "processes", "SLLM_NODES_DATA": "/x", "SLLM_NODES_LOST": lost}
    with pytest.raises(InvalidRequest, match=f"SLLM_NODES_LOST {lost} is not above SLLM_NODES_BOOT 180"):
        ProviderSettings.load(given).provider()
    assert ProviderSettings.load({**given, "SLLM_NODES_BOOT": "30"}).provider() is not None
    assert ProviderSettings.load({"SLLM_NODES_LOST": lost}).provider() is None, "nobody makes nodes"

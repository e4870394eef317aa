"""Nodes of an AWS auto scaling group. Its bounds are the group's own; a node's name is its instance's id.

Rights needed, and no more: ``autoscaling:SetDesiredCapacity`` and ``autoscaling:TerminateInstanceInAutoScalingGroup``
on this group, ``autoscaling:DescribeAutoScalingGroups``, which AWS does not narrow to one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from sllm_runtime.control.providing.provider import Offer, Shape
from sllm_runtime.protocol.errors import NotFound, SllmError, Unauthorized, Unavailable

T = TypeVar("T")

_GOING: Final = ("Terminating", "Terminated", "Detach")
"""Life cycle states of instances that end, by how they begin."""
_REFUSED: Final = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "ExpiredToken"})
_GONE: Final = "not found"
"""What AWS says of an instance that it no longer knows: a ``ValidationError`` with these words."""
_LIMITS: Final = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2, "mode": "standard"})


def client(region: str | None) -> Any:
    """The API, with deadlines; its credentials are the machine's role."""
    return boto3.client("autoscaling", region_name=region, config=_LIMITS)


class AutoScalingGroup:
    """A ``NodeProvider``. Scale-in protection of the group's instances is recommended: then nothing but ``remove`` ends
    one."""

    def __init__(self, api: Any, group: str, shape: Shape) -> None:
        self._api, self._group, self._shape = api, group, shape

    async def capacity(self) -> Offer:
        """As ``NodeProvider``. Raises ``NotFound`` too, if there is no such group."""
        found = await self._ask(lambda: self._api.describe_auto_scaling_groups(AutoScalingGroupNames=[self._group]))
        groups = found["AutoScalingGroups"]
        if not groups:
            raise NotFound(f"there is no auto scaling group {self._group}; see SLLM_NODES_GROUP and SLLM_NODES_REGION")
        group = groups[0]
        staying = (each for each in group["Instances"] if not each["LifecycleState"].startswith(_GOING))
        return Offer(
            desired=group["DesiredCapacity"],
            least=group["MinSize"],
            most=group["MaxSize"],
            members=frozenset(each["InstanceId"] for each in staying),
            shape=self._shape,
        )

    async def set_desired(self, nodes: int) -> None:
        """As ``NodeProvider``."""
        name = self._group
        await self._ask(
            lambda: self._api.set_desired_capacity(
                AutoScalingGroupName=name, DesiredCapacity=nodes, HonorCooldown=False
            )
        )

    async def remove(self, node: str) -> None:
        """As ``NodeProvider``. At its minimum AWS takes an instance from a group only for another one."""
        offer = await self.capacity()
        fewer = offer.desired > offer.least
        try:
            await self._ask(
                lambda: self._api.terminate_instance_in_auto_scaling_group(
                    InstanceId=node, ShouldDecrementDesiredCapacity=fewer
                )
            )
        except NotFound:
            return

    async def _ask(self, question: Callable[[], T]) -> T:
        """In a thread: boto3 waits for its socket, at most as long as ``_LIMITS`` say."""
        try:
            return await asyncio.to_thread(question)
        except ClientError as error:
            raise _as_ours(error, self._group) from error
        except BotoCoreError as error:
            raise Unavailable(f"AWS does not answer for auto scaling group {self._group}: {error}") from error


def _as_ours(error: ClientError, group: str) -> SllmError:
    code, text = error.response["Error"]["Code"], error.response["Error"]["Message"]
    if code in _REFUSED:
        return Unauthorized(f"AWS refuses the controller's role for auto scaling group {group}: {text}")
    if code == "ValidationError" and _GONE in text:
        return NotFound(f"AWS does not know it: {text}")
    return Unavailable(f"auto scaling group {group}: {code}: {text}")

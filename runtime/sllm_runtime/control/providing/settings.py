"""Which provider makes nodes, and by which rules: the controller's ``SLLM_NODE_*`` and ``SLLM_NODES_*``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from sllm_runtime.control.providing.pool import Timing
from sllm_runtime.control.providing.provider import NodeProvider, Shape
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.node import Gpu
from sllm_runtime.protocol.quantities import Bytes, is_gpu_kind, parse_bytes


class ProviderSettings(Settings):
    """The controller's; a provider that is not chosen needs none of them."""

    node_provider: Literal["none", "processes", "aws"] = "none"
    nodes_cpu: float = Field(default=1.0, gt=0)
    """What each node has: cores, bytes of memory for instances, accelerators (``"L4:24GiB,L4:24GiB"``), labels."""
    nodes_memory: Bytes = Field(default=2**30, gt=0)
    nodes_gpus: str = ""
    nodes_labels: str = ""
    nodes_sandbox: Literal["", "auto", "podman", "docker", "process"] = ""
    """``SLLM_SANDBOX`` of the nodes, where that is not this process's own, as it is of ``processes``."""
    sandbox: str = "process"
    nodes_idle: float = Field(default=600.0, gt=0)
    """Seconds; see ``Timing``."""
    nodes_cooldown: float = Field(default=60.0, ge=0)
    nodes_boot: float = Field(default=180.0, gt=0)
    nodes_lost: float = Field(default=900.0, gt=0)
    nodes_every: float = Field(default=5.0, gt=0)
    """Seconds between two looks at the provider."""
    nodes_least: int = Field(default=0, ge=0)
    """``processes``: bounds; ``aws`` has them from its group."""
    nodes_most: int = Field(default=2, ge=0, le=64)
    nodes_data: Path | None = None
    """``processes``: where their data lie; ``sllm up`` says so."""
    nodes_group: str = ""
    """``aws``: the auto scaling group."""
    nodes_region: str | None = None
    """``aws``: default: what boto3 finds."""

    @property
    def timing(self) -> Timing:
        return Timing(self.nodes_idle, self.nodes_cooldown, self.nodes_boot, self.nodes_lost)

    @property
    def shape(self) -> Shape:
        """Raises ``InvalidRequest``."""
        sandbox = self.nodes_sandbox or self.sandbox
        drivers = {"process": ("process",), "auto": ("process", "container")}.get(sandbox, ("container",))
        return Shape(self.nodes_cpu, self.nodes_memory, _gpus(self.nodes_gpus), _labels(self.nodes_labels), drivers)

    def provider(self) -> NodeProvider | None:
        """The one that is chosen. Raises ``InvalidRequest`` for settings that it cannot work with."""
        if self.node_provider != "none" and self.nodes_lost <= self.nodes_boot:
            raise InvalidRequest(
                f"SLLM_NODES_LOST {self.nodes_lost:g} is not above SLLM_NODES_BOOT {self.nodes_boot:g}, what a node"
                " takes until it reports: each would be given back before it has come, and another one made; raise"
                " SLLM_NODES_LOST, or say by SLLM_NODES_BOOT how long a boot takes",
                field="SLLM_NODES_LOST",
            )
        if self.node_provider == "processes":
            from sllm_runtime.control.providing.processes import Processes

            if self.nodes_data is None:
                raise _missing("SLLM_NODES_DATA", "`sllm up` sets it")
            if self.nodes_least > self.nodes_most:
                raise InvalidRequest(f"SLLM_NODES_LEAST {self.nodes_least} is above SLLM_NODES_MOST {self.nodes_most}")
            return Processes(self.nodes_data, self.shape, self.nodes_least, self.nodes_most, os.environ)
        if self.node_provider == "aws":
            from sllm_runtime.control.providing.aws import AutoScalingGroup, client

            if not self.nodes_group:
                raise _missing("SLLM_NODES_GROUP", "the name of the auto scaling group")
            return AutoScalingGroup(client(self.nodes_region), self.nodes_group, self.shape)
        return None


def _missing(variable: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{variable} is not set: {what}", field=variable)


def _gpus(text: str) -> tuple[Gpu, ...]:
    found = []
    for index, item in enumerate(part.strip() for part in text.split(",") if part.strip()):
        kind, _, size = item.partition(":")
        try:
            if not is_gpu_kind(kind):
                raise ValueError(kind)
            found.append(Gpu(index=index, kind=kind, memory=parse_bytes(size)))
        except ValueError as error:
            raise InvalidRequest(f"SLLM_NODES_GPUS: {item!r} is no GPU; write for example 'L4:24GiB'") from error
    return tuple(found)


def _labels(text: str) -> dict[str, str]:
    pairs = [[word.strip() for word in part.partition("=")] for part in text.split(",") if part.strip()]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise InvalidRequest(f"SLLM_NODES_LABELS: {key!r} is no label; write for example 'zone=a'")
    return {key: value for key, _, value in pairs}

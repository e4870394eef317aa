"""Who makes nodes and takes them back: a group of equal machines in a cloud, processes on this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sllm_runtime.protocol.node import Gpu


@dataclass(frozen=True, slots=True)
class Shape:
    """What each node of a provider has. ``memory``: bytes for instances."""

    cpu: float
    memory: int
    gpus: tuple[Gpu, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    drivers: tuple[str, ...] = ("process",)


@dataclass(frozen=True, slots=True)
class Offer:
    """How many nodes a provider is to have, between which bounds, and which there are. ``members``: by the names that
    they have in the cluster; those that come already, those that end no longer."""

    desired: int
    least: int
    most: int
    members: frozenset[str]
    shape: Shape


class NodeProvider(Protocol):
    """Every method may be repeated. They raise ``Unavailable`` when the provider does not answer, ``Unauthorized`` when
    it refuses, and return within seconds: what they begin goes on by itself."""

    async def capacity(self) -> Offer:
        """What there is now, and what may be."""
        ...

    async def set_desired(self, nodes: int) -> None:
        """Have so many: it makes what lacks. It is not called to have fewer: ``remove`` says which goes."""
        ...

    async def remove(self, node: str) -> None:
        """End this node, and have one fewer; one that has no more than its least may make another. A node that is gone:
        nothing to do."""
        ...

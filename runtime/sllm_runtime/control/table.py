"""Instances by id, by node and by version: an immutable mapping that shares what a change leaves alone."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, TypeVar

from sllm_runtime.control.traced import Traced
from sllm_runtime.protocol.records import InstanceRecord

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class Recorded(Protocol):
    """What has an instance's record."""

    @property
    def record(self) -> InstanceRecord: ...


I = TypeVar("I", bound=Recorded)  # noqa: E741 - an instance
K = TypeVar("K")


class Table(Mapping[str, I], Generic[I]):
    """``instance id -> instance``; ``on(node)``: those of one node; ``of(key)``: those of one version, oldest first."""

    __slots__ = ("_all", "_nodes", "_versions")

    def __init__(self, instances: Iterable[I] = ()) -> None:
        self._all: dict[str, I] = {}
        self._nodes: Traced[str, dict[str, I]] = Traced()
        self._versions: Traced[tuple[str, int], dict[str, I]] = Traced()
        for instance in instances:
            self._all[instance.record.instance] = instance
            self._nodes.setdefault(instance.record.node, {})[instance.record.instance] = instance
            self._versions.setdefault(_key(instance), {})[instance.record.instance] = instance

    def on(self, node: str) -> Mapping[str, I]:
        """Those of ``node``; the same object until one of them changes."""
        return self._nodes.get(node, _NONE)

    @property
    def nodes(self) -> Mapping[str, Mapping[str, I]]:
        """All that ``on`` knows, by node."""
        return self._nodes

    def of(self, key: tuple[str, int]) -> Mapping[str, I]:
        """Those of version ``key``, in the order in which they came."""
        return self._versions.get(key, _NONE)

    def put(self, *instances: I) -> Table[I]:
        """With ``instances`` in place of those of their ids. An instance never changes its node or its version."""
        return self._with({instance.record.instance: instance for instance in instances}, ())

    def without(self, names: Iterable[str]) -> Table[I]:
        """Less these."""
        return self._with({}, [self._all[name] for name in names])

    def _with(self, come: Mapping[str, I], gone: Iterable[I]) -> Table[I]:
        made: Table[I] = Table()
        made._all = {**self._all, **come}
        for instance in gone:
            del made._all[instance.record.instance]
        made._nodes = _regrouped(self._nodes, come.values(), gone, _node)
        made._versions = _regrouped(self._versions, come.values(), gone, _key)
        return made

    # What Mapping would do through __getitem__, one by one.
    def __getitem__(self, name: str) -> I:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def keys(self) -> KeysView[str]:
        return self._all.keys()

    def values(self) -> ValuesView[I]:
        return self._all.values()

    def items(self) -> ItemsView[str, I]:
        return self._all.items()


def _node(instance: Recorded) -> str:
    return instance.record.node


def _key(instance: Recorded) -> tuple[str, int]:
    return (instance.record.function, instance.record.version)


def _regrouped(
    groups: Traced[K, dict[str, I]], come: Iterable[I], gone: Iterable[I], group_of: Callable[[I], K]
) -> Traced[K, dict[str, I]]:
    """``groups`` of instances with those that have come, less those that have gone; none is empty."""
    made: dict[K, dict[str, I]] = {}
    for instance in (*come, *gone):
        group = group_of(instance)
        if group not in made:
            made[group] = dict(groups.get(group, _NONE))
    for instance in come:
        made[group_of(instance)][instance.record.instance] = instance
    for instance in gone:
        del made[group_of(instance)][instance.record.instance]
    return groups.after({group: there for group, there in made.items() if there}, (k for k, v in made.items() if not v))

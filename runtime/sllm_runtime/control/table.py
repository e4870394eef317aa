"""Instances by id, by node and by version: an immutable mapping that shares what a change leaves alone."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from itertools import compress
from operator import is_, is_not
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, TypeVar

from sllm_runtime.protocol.records import InstanceRecord

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class Recorded(Protocol):
    """What has an instance's record."""

    @property
    def record(self) -> InstanceRecord: ...


I = TypeVar("I", bound=Recorded)  # noqa: E741 - an instance
K = TypeVar("K")
V = TypeVar("V")


class Table(Mapping[str, I], Generic[I]):
    """``instance id -> instance``; ``on(node)``: those of one node; ``of(key)``: those of one version, oldest first."""

    __slots__ = ("_all", "_nodes", "_versions")

    def __init__(self, instances: Iterable[I] = ()) -> None:
        self._all: dict[str, I] = {}
        self._nodes: dict[str, dict[str, I]] = {}
        self._versions: dict[tuple[str, int], dict[str, I]] = {}
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
        made = self._copy()
        touched: set[object] = set()
        for instance in instances:
            name, node, key = instance.record.instance, instance.record.node, _key(instance)
            if node not in touched:
                made._nodes[node] = dict(made._nodes.get(node, _NONE))
            if key not in touched:
                made._versions[key] = dict(made._versions.get(key, _NONE))
            touched |= {node, key}
            made._all[name] = made._nodes[node][name] = made._versions[key][name] = instance
        return made

    def without(self, names: Iterable[str]) -> Table[I]:
        """Less these."""
        made = self._copy()
        for name in names:
            gone = made._all.pop(name)
            _remove(made._nodes, gone.record.node, name)
            _remove(made._versions, _key(gone), name)
        return made

    def _copy(self) -> Table[I]:
        made: Table[I] = Table()
        made._all, made._nodes, made._versions = dict(self._all), dict(self._nodes), dict(self._versions)
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


def changed(old: Mapping[K, V], new: Mapping[K, V]) -> Iterable[K]:
    """The keys whose value is not the object that it was: those of ``new`` in its order, then those that are gone. A
    view is copied at each change, so most have the same keys in the same order, which is told without a step of Python
    for each."""
    if len(old) == len(new) and all(map(is_, old, new)):
        return compress(new, map(is_not, old.values(), new.values()))
    return [key for key, value in new.items() if old.get(key) is not value] + [key for key in old if key not in new]


def _key(instance: Recorded) -> tuple[str, int]:
    return (instance.record.function, instance.record.version)


def _remove(groups: dict[K, dict[str, I]], group: K, name: str) -> None:
    """From a copy of its group; an empty one goes."""
    left = {key: instance for key, instance in groups[group].items() if key != name}
    if left:
        groups[group] = left
    else:
        del groups[group]

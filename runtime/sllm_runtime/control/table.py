"""Instances by id and by node: an immutable mapping that shares what a change leaves alone."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, TypeVar

from sllm_runtime.protocol.records import InstanceRecord

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class Recorded(Protocol):
    """What has an instance's record."""

    @property
    def record(self) -> InstanceRecord: ...


I = TypeVar("I", bound=Recorded)  # noqa: E741 - an instance


class Table(Mapping[str, I], Generic[I]):
    """``instance id -> instance``, and ``on(node)``: those of one node."""

    __slots__ = ("_all", "_nodes")

    def __init__(self, instances: Iterable[I] = ()) -> None:
        self._all: dict[str, I] = {}
        self._nodes: dict[str, dict[str, I]] = {}
        for instance in instances:
            self._all[instance.record.instance] = instance
            self._nodes.setdefault(instance.record.node, {})[instance.record.instance] = instance

    def on(self, node: str) -> Mapping[str, I]:
        """Those of ``node``; the same object until one of them changes."""
        return self._nodes.get(node, _NONE)

    def put(self, *instances: I) -> Table[I]:
        """With ``instances`` in place of those of their ids. An instance never changes its node."""
        made = self._copy()
        touched: set[str] = set()
        for instance in instances:
            node = instance.record.node
            if node not in touched:
                made._nodes[node] = dict(made._nodes.get(node, _NONE))
                touched.add(node)
            made._all[instance.record.instance] = made._nodes[node][instance.record.instance] = instance
        return made

    def without(self, names: Iterable[str]) -> Table[I]:
        """Less these."""
        made = self._copy()
        for name in names:
            node = made._all.pop(name).record.node
            made._nodes[node] = {key: instance for key, instance in made._nodes[node].items() if key != name}
            if not made._nodes[node]:
                del made._nodes[node]
        return made

    def _copy(self) -> Table[I]:
        made: Table[I] = Table()
        made._all, made._nodes = dict(self._all), dict(self._nodes)
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

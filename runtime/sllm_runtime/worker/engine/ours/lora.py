"""Rows of one step that go through different adapters: what each product of the model adds to the rows it concerns.

A row's bits depend on its own tokens and its own adapter alone: rows are gathered by adapter into tiles of one size,
and each tile is a product by itself. A step without adapters pays a look at an empty tuple for each product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from sllm_runtime.protocol.errors import InvalidCheckpoint, ModelNotFound, UnsupportedModel
from sllm_runtime.worker.engine.ours.adapter import Adapter, LowRank

Rows = torch.Tensor
Through = Callable[[LowRank, Rows, int], Rows]
"""What a module's half makes of rows (float32), as many as some tiles of the given size have."""
_CPU: Final = torch.device("cpu")
_OUTSIDE: Final = ("lm_head", "project_in", "project_out")
"""Matrices before and behind the layers: a step may compute other rows there than its groups name, or elsewhere."""
_TURNED: Final = ("c_attn", "c_proj", "c_fc")
"""GPT-2's, which are stored as (in, out)."""


def in_tiles(half: LowRank, rows: Rows, size: int) -> Rows:
    """``Through`` on a CPU: each tile is a product by itself."""
    tiles = [half(rows[at : at + size]) for at in range(0, len(rows), size)]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _stay(adapter: Adapter) -> None:
    """It is computed where it was read."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one adapter in a step; ``padded``: with the first one again up to whole tiles."""

    adapter: Adapter
    rows: torch.Tensor
    padded: torch.Tensor


class Lora:
    """The adapters of one model: those that requests may name, and those of the rows of the current step. ``device``:
    where it is computed; ``take``: brings an adapter there (``Backend.take``)."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device = _CPU, take: Callable[[Adapter], None] = _stay
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._take = take
        self._named: dict[str, Adapter] = {}
        self.groups: tuple[Group, ...] = ()

    def put(self, name: str, adapter: Adapter) -> None:
        """Requests may name it from now on. Raises ``UnsupportedModel`` or ``InvalidCheckpoint`` if it is of another
        model, or of parts that take none, and ``OutOfMemory``."""
        self.bring(name, adapter)
        self._named[name] = adapter

    def bring(self, name: str, adapter: Adapter) -> None:
        """Have it where the model is computed. Raises as ``put`` does."""
        for module, half in adapter.modules.items():
            self._check(name, module, half.a.shape[0], half.b.shape[1])
        self._take(adapter)

    def drop(self, name: str) -> None:
        """Requests that name it are refused from now on; those that run keep it. Repeatable."""
        self._named.pop(name, None)

    def get(self, name: str | None) -> Adapter | None:
        """The adapter of a request. Raises ``ModelNotFound``."""
        if name is None:
            return None
        if name not in self._named:
            raise ModelNotFound(f"there is no adapter {name!r:.100} here", field="model")
        return self._named[name]

    def begin(self, parts: Iterable[tuple[Adapter | None, int]]) -> None:
        """Which adapter the rows of the next step go through, and how many do, in their order."""
        rows: dict[Adapter, list[int]] = {}
        at = 0
        for adapter, count in parts:
            if adapter is not None:
                rows.setdefault(adapter, []).extend(range(at, at + count))
            at += count
        self.groups = tuple(_groups(rows, self._device)) if rows else ()

    def product(self, outputs: Mapping[str, int]) -> Product:
        """What is added to a product of the model whose modules, side by side, have so many outputs."""
        places, low = [], 0
        for name, count in outputs.items():
            places.append((name, low, low + count))
            low += count
        return Product(self, tuple(places))

    def _check(self, name: str, module: str, inputs: int, outputs: int) -> None:
        found = _shape(self._tensors, f"{module}.weight")
        if found is None:
            raise InvalidCheckpoint(f"adapter {name!r} is of another model: there is no {module!r} here", field=module)
        last = module.rpartition(".")[2]
        if last in _OUTSIDE or len(found) != 2:
            raise UnsupportedModel(f"adapter {name!r} changes {module!r}, which takes none here", field=module)
        if (outputs, inputs) != (found[::-1] if last in _TURNED else found):
            text = f"adapter {name!r} is of another model: {module!r} is {found} here, it has {(outputs, inputs)}"
            raise InvalidCheckpoint(text, field=module)


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    known = getattr(tensors, "shape_of", None)  # where a tensor is made of its bytes when it is asked for
    if known is not None:
        found: tuple[int, ...] | None = known(name)
        return found
    return tuple(tensors[name].shape) if name in tensors else None


def _groups(rows: Mapping[Adapter, list[int]], device: torch.device) -> Iterator[Group]:
    """All numbers come to ``device`` by one copy."""
    padded = [numbers + numbers[:1] * (-len(numbers) % adapter.tile) for adapter, numbers in rows.items()]
    joined = torch.tensor([number for each in padded for number in each], pin_memory=device.type == "cuda")
    parts = torch.split(joined.to(device, non_blocking=True), [len(each) for each in padded])
    for (adapter, numbers), part in zip(rows.items(), parts, strict=True):
        yield Group(adapter, part[: len(numbers)], part)


@dataclass(frozen=True, slots=True)
class Product:
    """``places``: modules and the columns ``[low, high)`` that are theirs."""

    lora: Lora
    places: tuple[tuple[str, int, int], ...]

    def add(self, x: Rows, out: Rows, through: Through = in_tiles) -> None:
        """To ``out`` (rows, outputs), in place, what the adapters of the rows of ``x`` (rows, inputs) add."""
        for group in self.lora.groups:
            gathered: Rows | None = None
            for module, low, high in self.places:
                half = group.adapter.modules.get(module)
                if half is None:
                    continue
                if gathered is None:
                    gathered = x.index_select(0, group.padded).to(torch.float32)
                added = through(half, gathered, group.adapter.tile)[: len(group.rows)]
                columns = out[:, low:high]
                changed = columns.index_select(0, group.rows).to(torch.float32).add_(added)
                columns.index_copy_(0, group.rows, changed.to(out.dtype))

"""How many empty nodes of one shape some starts need: first fit, the largest first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sllm_runtime.control.fits import Capacity, Need, choose_gpus, short, using
from sllm_runtime.control.providing.provider import Shape


def empty(shape: Shape) -> Capacity:
    """A node of this shape on which nothing runs."""
    return Capacity("", shape.cpu, shape.memory, shape.gpus, shape.labels, shape.drivers, "")


def fits(need: Need, shape: Shape) -> bool:
    """Whether an empty node would do."""
    return not short(need, empty(shape))


def fitting(needs: Sequence[Need], nodes: Sequence[Capacity]) -> int:
    """How many of ``needs`` find room on ``nodes``, first fit, the largest first."""
    bins, found = list(nodes), 0
    for need in sorted(needs, key=_size, reverse=True):
        for index, there in enumerate(bins):
            if not short(need, there):
                bins[index], found = _less(there, need), found + 1
                break
    return found


def places(need: Need, there: Capacity, most: int) -> int:
    """How many starts with one ``need`` find room there; no more than ``most`` are counted."""
    found = 0
    while found < most and not short(need, there):
        there, found = _less(there, need), found + 1
    return found


def nodes_for(needs: Sequence[Need], shape: Shape) -> int:
    """Nodes that take all of ``needs`` that fit one at all. At most 11/9 of the fewest, and one, where one resource
    decides (Johnson 1973) and no two use one model."""
    bins: list[Capacity] = []
    for need in sorted((each for each in needs if fits(each, shape)), key=_size, reverse=True):
        for index, there in enumerate(bins):
            if not short(need, there):
                bins[index] = _less(there, need)
                break
        else:
            bins.append(_less(empty(shape), need))
    return len(bins)


def _size(need: Need) -> tuple[int, int, float]:
    return (max((count for _, count in need.gpus), default=0), need.memory, need.cpu)


def _less(there: Capacity, need: Need) -> Capacity:
    chosen = choose_gpus(need, there)
    taken = frozenset(chosen[1]) if chosen is not None else frozenset()
    return msgspec.structs.replace(
        there,
        cpu=there.cpu - need.cpu,
        memory=there.memory - need.takes(there),
        shared=using(there.shared, need),
        gpus=tuple(gpu for gpu in there.gpus if gpu.index not in taken),
    )

"""The sockets between the processes of one instance: made here, handed over, and closed here, so that whoever dies is
seen by those who are joined to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from sllm_runtime.protocol.manifest import Parallelism
from sllm_runtime.protocol.node import StartInstance
from sllm_runtime.protocol.worker import Member


def members(parallelism: Parallelism) -> tuple[Member, ...]:
    """The processes of an instance, in the order of their numbers."""
    stages, ranks = parallelism.pipeline, parallelism.tensor
    return tuple(Member(number=number, stages=stages, ranks=ranks) for number in range(parallelism.processes))


def clustered(order: StartInstance) -> bool:
    """Whether its processes share one network (``Assign.cluster``): ranks on GPUs, which NCCL joins."""
    return order.manifest.parallelism.tensor > 1 and bool(order.gpus)


@contextmanager
def wired(those: tuple[Member, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Descriptors of each member's edges, in the order that ``Member.edges`` states, for as long as the block lasts:
    who is given them has duplicates."""
    made: list[socket.socket] = []

    def pair() -> tuple[int, int]:
        one, other = socket.socketpair()
        made.extend((one, other))
        return one.fileno(), other.fileno()

    try:
        if len(those) == 1:
            yield ((),)
        elif those[0].stages > 1:
            yield _ring([pair() for _ in those])
        else:
            count = len(those)
            streams = [pair() for _ in range(count - 1)]
            sums = {(a, b): pair() for b in range(count) for a in range(b)}
            yield tuple(_rank(number, count, streams, sums) for number in range(count))
    finally:
        for each in made:
            each.close()


def _ring(pairs: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Pair n leads from stage n to the one behind it."""
    return tuple((pairs[number - 1][1], pairs[number][0]) for number in range(len(pairs)))


def _rank(
    number: int, count: int, streams: list[tuple[int, int]], sums: dict[tuple[int, int], tuple[int, int]]
) -> tuple[int, ...]:
    own = [one for one, _ in streams] if number == 0 else [streams[number - 1][1]]
    lower = [sums[other, number][1] for other in range(number)]
    higher = [sums[number, other][0] for other in range(number + 1, count)]
    return (*own, *lower, *higher)

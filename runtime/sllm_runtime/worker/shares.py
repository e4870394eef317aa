"""Which layers of a model a stage has, and in which blocks they are. Pure functions over the index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sllm_runtime.protocol.checkpoint import CheckpointIndex
from sllm_runtime.protocol.errors import InvalidArgument, InvalidCheckpoint
from sllm_runtime.protocol.stages import LayerRange


def layers_of(count: int, stages: int, number: int) -> LayerRange:
    """Layers of stage ``number``, of a model in one partition; all are as many, or one more. Raises ``InvalidArgument``
    if some would have none."""
    if stages > count:
        text = f"{count} layers cannot be shared out over {stages} stages; lower parallelism.pipeline"
        raise InvalidArgument(text, field="parallelism")
    return LayerRange(number * count // stages, (number + 1) * count // stages)


def layers_in(index: CheckpointIndex, needs: Mapping[int, frozenset[str]], number: int) -> LayerRange:
    """Layers of stage ``number``, of a model with a partition for each stage: those that the partition has all tensors
    of. ``needs``: names by layer, -1 and the count of layers what stands before and behind them (``survey.Needs``).

    Raises ``InvalidCheckpoint`` unless every partition has a run of layers, in their order, and the first beside them
    what stands before and behind: number 0 has the embedding and the output head.
    """
    names = [_names(index, rank) for rank in range(len(index.partitions))]
    count = max(needs)
    places = [next((rank for rank, own in enumerate(names) if needs[layer] <= own), -1) for layer in range(count)]
    if (
        -1 in places
        or places != sorted(places)
        or len(set(places)) < len(names)
        or not needs[-1] | needs[count] <= names[0]
    ):
        raise InvalidCheckpoint(
            f"its {len(names)} partitions (layout {index.layout}) are no runs of layers, the first with embedding and "
            f"output head; convert the model with --plan auto-stages:{len(names)}",
            field="parallelism",
        )
    low = places.index(number)
    return LayerRange(low, low + places.count(number))


def ranges(blocks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Block numbers as ranges [first, last], in their order."""
    found: list[tuple[int, int]] = []
    for block in sorted(set(blocks)):
        if found and found[-1][1] == block - 1:
            found[-1] = (found[-1][0], block)
        else:
            found.append((block, block))
    return tuple(found)


def _names(index: CheckpointIndex, rank: int) -> frozenset[str]:
    """Of the partition's tensors, their parts and their ties."""
    own = {record.name for record in (*index.tensors, *index.views) if record.rank == rank}
    return frozenset((*own, *_tied(index, own)))


def _tied(index: CheckpointIndex, own: set[str]) -> Iterator[str]:
    return (alias.name for alias in index.aliases if alias.of in own)

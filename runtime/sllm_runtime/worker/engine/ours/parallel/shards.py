"""A model of one rank's weights, as ``auto:N`` plans share them out: heads, columns, rows, experts, runs of tokens.

The family builds it as any model, for as many heads and columns as the rank has; what goes back to the residual is
summed over ranks. Embedding and head are shared out by tokens: a row is that of the one rank which has the token, and
logits are put side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from sllm_runtime.protocol.checkpoint import CheckpointIndex
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.model.backend import Backend, Linear, Mlp, Rows
from sllm_runtime.worker.engine.ours.model.decoder import Decoder, Embed, Layer
from sllm_runtime.worker.engine.ours.parallel.group import Group

FAMILIES: Final = frozenset(
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma2", "Gemma3")
)
_EMBEDDING: Final = "model.embed_tokens.weight"
_SUMMED: Final = ("o_proj.bias", "down_proj.bias")


def token_runs(index: CheckpointIndex) -> tuple[int, ...]:
    """Tokens that each rank has, in the order of ranks. Raises ``InvalidCheckpoint`` for a checkpoint that is not
    shared out by tokens over all its ranks."""
    split = next((split for split in index.splits if split.name == _EMBEDDING), None)
    if split is None or split.dim != 0 or split.ranks != tuple(range(len(index.partitions))):
        raise InvalidCheckpoint(
            f"{_EMBEDDING} is not shared out by tokens over all ranks (layout {index.layout}); convert the model with "
            "--plan auto:N",
            field=_EMBEDDING,
        )
    rows = {record.rank: record.shape[0] for record in index.tensors if record.name == _EMBEDDING}
    return tuple(rows[rank] for rank in split.ranks)


def build_shard(
    architecture: str, config: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, tile: int,
    group: Group, runs: Sequence[int], backend: Backend | None = None,
) -> Decoder:  # fmt: skip
    """The model of this rank; ``tensors`` are those of its partition, ``runs`` the tokens that each rank has,
    ``backend`` as ``build`` has it.

    Raises ``UnsupportedModel`` for a family that is not shared out, ``InvalidCheckpoint`` for tensors that are not this
    rank's.
    """
    if architecture not in FAMILIES:
        raise UnsupportedModel(f"this engine cannot share {architecture} out over ranks; use one rank, or stages")
    if len(runs) != group.size:
        raise InvalidCheckpoint(f"the checkpoint has {len(runs)} ranks, the instance {group.size}", field="ranks")
    own = _share(config, group, runs[group.rank])
    decoder = build(architecture, own, _OnceSummed(tensors, group.rank), dtype, tile, backend)
    start, layer, finish = decoder.start, decoder.layer, decoder.finish
    decoder.vocabulary = sum(runs)
    decoder.start = lambda: _embedding(start(), group, runs)
    decoder.layer = lambda number: _summed(layer(number), group)
    decoder.finish = lambda: _head(finish(), group, runs)
    return decoder


def _share(config: Any, group: Group, tokens: int) -> Any:
    """``config`` as it describes this rank's part."""
    size = group.size
    kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if config.num_attention_heads % size or kv % size:
        raise InvalidCheckpoint(
            f"{config.num_attention_heads} heads and {kv} of keys cannot be shared out over {size} ranks",
            field="num_key_value_heads",
        )
    changes: dict[str, Any] = {
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "num_attention_heads": config.num_attention_heads // size,
        "num_key_value_heads": kv // size,
        "vocab_size": tokens,
    }
    if config.model_type == "mixtral":
        count = config.num_local_experts // size
        changes["experts_here"] = range(group.rank * count, (group.rank + 1) * count)
    else:
        changes["intermediate_size"] = config.intermediate_size // size
    return _Changed(config, changes)


class _Changed:
    """A configuration, but for some fields."""

    def __init__(self, config: Any, changes: Mapping[str, Any]) -> None:
        self._config = config
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _OnceSummed(Mapping[str, torch.Tensor]):
    """A rank's tensors; biases of what is summed over ranks are rank 0's alone."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
        self._tensors, self._rank = tensors, rank

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._tensors[name]
        return torch.zeros_like(found) if self._rank and name.endswith(_SUMMED) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _Total:
    """A product or an MLP whose ranks each give a part of the sum."""

    def __init__(self, part: Linear | Mlp, group: Group) -> None:
        self._part, self._group = part, group

    def __call__(self, x: Rows) -> Rows:
        return self._group.total(self._part(x))

    def added(self, x: Rows, residual: Rows) -> Rows:
        return residual + self(x)


def _summed(layer: Layer, group: Group) -> Layer:
    layer.attention.out = _Total(layer.attention.out, group)
    layer.mlp = _Total(layer.mlp, group)
    return layer


def _embedding(embed: Embed, group: Group, runs: Sequence[int]) -> Embed:
    first, count = sum(runs[: group.rank]), runs[group.rank]

    def rows(tokens: torch.Tensor, positions: torch.Tensor) -> Rows:
        own = tokens - first
        here = (own >= 0) & (own < count)
        return group.total(embed(own.clamp(0, count - 1), positions) * here.unsqueeze(1))

    return rows


def _head(head: Any, group: Group, runs: Sequence[int]) -> Any:
    return lambda x: group.columns(head(x), runs)

"""Parallelism plans made by rule: tensor parallel for llama-like models, runs of layers for any. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sllm_loaderd.convert.ranks import AutoPlan, Share
from sllm_loaderd.layout import PlannedTensor, layer_key
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel

_COLUMN: Final = re.compile(r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)")
_ROW: Final = re.compile(r".*\.(o_proj|down_proj)\.weight")
_VOCABULARY: Final = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.weight")
_EXPERTS: Final = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
_COPY: Final = re.compile(r".*norm\.(weight|bias)|.*\.(o_proj|down_proj)\.bias|.*\.(gate|router)\.weight")


def auto_shares(
    plan: AutoPlan,
    order: Sequence[str],
    tensors: Iterable[PlannedTensor],
    ties: Mapping[str, str],
    config: Mapping[str, Any],
) -> dict[str, Share]:
    """The share of every tensor and tie. ``order`` names them all in execution order.

    Raises ``UnsupportedModel`` for a tensor that the rules do not know, ``InvalidCheckpoint`` for ranks that do not
    divide the model.
    """
    if plan.kind == "auto":
        return _tensor_parallel(plan.ranks, list(tensors), ties, config)
    sizes = {tensor.name: tensor.nbytes for tensor in tensors}
    share = _stages if plan.kind == "auto-stages" else _by_layers
    return share(plan.ranks, order, sizes, ties)


def _tensor_parallel(
    ranks: int, tensors: Sequence[PlannedTensor], ties: Mapping[str, str], config: Mapping[str, Any]
) -> dict[str, Share]:
    """Column, row and vocabulary parallel (Megatron-LM): a rank has whole heads, whole experts, a run of tokens."""
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = config.get(field, config.get("num_attention_heads"))
        if not isinstance(heads, int) or heads % ranks:
            raise InvalidCheckpoint(
                f"auto:{ranks} cannot share {field} = {heads} of config.json out evenly; give a plan file, or"
                f" auto-layers:{ranks}",
                field=field,
            )
    everywhere = tuple(range(ranks))
    shares = {tensor.name: Share(everywhere, _dim(tensor, ranks) if ranks > 1 else None) for tensor in tensors}
    return shares | {name: Share(shares[of].ranks) for name, of in ties.items()}


def _dim(tensor: PlannedTensor, ranks: int) -> int | None:
    rules = ((_COLUMN, 0), (_ROW, 1), (_VOCABULARY, 0), (_EXPERTS, 0), (_COPY, None))
    dim = next((dim for pattern, dim in rules if pattern.fullmatch(tensor.name)), -1)
    if dim == -1 or (dim is not None and dim >= len(tensor.shape)):
        raise UnsupportedModel(
            f"auto:{ranks} knows llama-like models and has no rule for tensor {tensor.name!r} of {tensor.shape}; give a"
            f" plan file, or auto-layers:{ranks}",
            field=tensor.name,
        )
    if dim is not None and tensor.granules(dim) % ranks and not _VOCABULARY.fullmatch(tensor.name):
        raise InvalidCheckpoint(
            f"{tensor.name!r} of {tensor.shape} cannot be split evenly over {ranks} ranks; give a plan file, or"
            f" auto-layers:{ranks}",
            field=tensor.name,
        )
    return dim


def _by_layers(ranks: int, order: Sequence[str], sizes: Mapping[str, int], ties: Mapping[str, str]) -> dict[str, Share]:
    """Runs of layers of about the same bytes; what stands before them is in the first, behind them in the last.

    A tied head has a copy of its embedding with it: no rank needs bytes of another one.
    """
    rank_of = _balanced(ranks, _layers(ranks, order, sizes, "auto-layers"))
    shares: dict[str, Share] = {}
    current = 0
    for name in order:
        key = layer_key(name)
        if key is not None:
            current = max(current, rank_of[key])
        shares[name] = Share((rank_of[key] if key is not None else current,))
    for name, of in ties.items():
        shares[of] = Share(tuple(sorted({*shares[of].ranks, *shares[name].ranks})))
    return shares


def _stages(ranks: int, order: Sequence[str], sizes: Mapping[str, int], ties: Mapping[str, str]) -> dict[str, Share]:
    """Runs of layers, and with the first of them all that stands before and behind: so the engine's stages have it,
    whose first one takes tokens and gives logits. All ranks have about the same bytes."""
    layers = _layers(ranks, order, sizes, "auto-stages")
    first = sum(sizes.get(name, 0) for name in order if layer_key(name) is None)
    rank_of = _balanced(ranks, layers, first)
    keys = {name: layer_key(name) for name in order}
    shares = {name: Share((0 if key is None else rank_of[key],)) for name, key in keys.items()}
    return shares | {name: Share(shares[of].ranks) for name, of in ties.items()}


def _layers(ranks: int, order: Sequence[str], sizes: Mapping[str, int], plan: str) -> dict[str, int]:
    """Bytes of each layer, in their order. Raises ``InvalidCheckpoint`` for fewer layers than ranks."""
    layers: dict[str, int] = {}
    for name in order:
        key = layer_key(name)
        if key is not None:
            layers[key] = layers.get(key, 0) + sizes.get(name, 0)
    if len(layers) < ranks:
        raise InvalidCheckpoint(f"{plan}:{ranks}: the model has {len(layers)} layers", field="plan")
    return layers


def _balanced(ranks: int, layers: Mapping[str, int], first: int = 0) -> dict[str, int]:
    """Rank of each layer: ascending, each rank at least one, borders where the bytes are nearest to even. ``first``:
    what rank 0 has beside its layers."""
    total, before, left = first + sum(layers.values()), first, len(layers)
    result: dict[str, int] = {}
    rank = -1
    for key, nbytes in layers.items():
        wanted = min(ranks * (2 * before + nbytes) // (2 * total), ranks - 1) if total else 0
        # At most one rank further, and never so late that the ranks behind would have no layer.
        rank = max(rank, 0, ranks - left, min(wanted, rank + 1))
        result[key] = rank
        before, left = before + nbytes, left - 1
    return result

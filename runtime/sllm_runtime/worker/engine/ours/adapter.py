"""A LoRA adapter: for some of a model's matrices W, two narrow ones whose product is added, W + scaling * B A.

What it holds are float32 copies, so that the memory they came in can be given back, and small products in float32 are
the fast ones on a CPU.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch

from sllm_runtime.protocol.checkpoint import AdapterRecord
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel

TILE: Final = 32
"""Rows of every product with an adapter, so that it is always the same kernel."""
_A_TENSOR: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_A(?:\.\w+)?\.weight")
_B_TENSOR: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_B(?:\.\w+)?\.weight")
_MOVES: Final = (1, 5, 16, 31)
_OF_ANOTHER_BASE: Final = ("pissa", "olora", "corda", "loftq")
"""Ways to begin (init_lora_weights) with which peft, when it loads one, changes the base's own matrices first."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """``x @ a @ b`` is what a module adds; its scaling is in ``b``."""

    a: torch.Tensor
    """(inputs, rank) float32."""
    b: torch.Tensor
    """(rank, outputs) float32."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, self.a), self.b)


class Adapter:
    """``modules`` by the names that the model's own matrices have. ``digest``: of its content. ``tile``: rows of its
    products, where that is known; 1: each row has to be a product by itself."""

    def __init__(self, digest: str, modules: Mapping[str, LowRank], tile: int | None = None) -> None:
        self.modules = modules
        self.root = hashlib.blake2b(b"lora" + digest.encode(), digest_size=16).digest()
        """What the hashes of its pages in the KV cache begin with: what it computed is no other's."""
        self.nbytes = sum(half.a.nbytes + half.b.nbytes for half in modules.values())
        """Of all its modules, also of those that are in other processes."""
        self.tile = tile or (TILE if all(map(_same_wherever, self.of_each_shape())) else 1)

    @classmethod
    def read(
        cls,
        digest: str,
        record: AdapterRecord,
        config: bytes,
        names: frozenset[str],
        tensor: Callable[[str], torch.Tensor],
    ) -> Adapter:
        """From a checkpoint: its ``record``, its adapter_config.json, and what it holds. Raises ``UnsupportedModel``
        for what is no matrix's adapter, ``InvalidCheckpoint`` for a half without its other half, or of another rank
        than its configuration says."""
        halves_a, halves_b = _named(_A_TENSOR, names), _named(_B_TENSOR, names)
        other = next(iter(sorted(names - set(halves_a.values()) - set(halves_b.values()))), None)
        if other is not None:
            raise UnsupportedModel(
                f"the adapter holds {other!r}; only lora_A and lora_B of matrices are served", field=other
            )
        if halves_a.keys() != halves_b.keys():
            lone = min(halves_a.keys() ^ halves_b.keys())
            raise InvalidCheckpoint(f"the adapter has but one half of {lone!r}", field=lone)
        scaling = _Scaling(record, config)
        with torch.inference_mode():
            modules = {
                name: _low_rank(a := tensor(halves_a[name]), tensor(halves_b[name]), scaling.of(name, len(a)))
                for name in halves_a
            }
        return cls(digest, modules)

    def move(self, device: torch.device) -> None:
        """Its matrices are on ``device`` from now on."""
        self.modules = {name: LowRank(half.a.to(device), half.b.to(device)) for name, half in self.modules.items()}

    def of_each_shape(self) -> list[LowRank]:
        """One of its modules for each shape that they have."""
        return list({(half.a.shape, half.b.shape): half for half in self.modules.values()}.values())

    def keep(self, holds: Callable[[str], bool]) -> None:
        """Give up the modules that ``holds`` is false of: another process has them."""
        self.modules = {name: half for name, half in self.modules.items() if holds(name)}


def _named(pattern: re.Pattern[str], names: frozenset[str]) -> dict[str, str]:
    return {found[1]: name for name in names if (found := pattern.fullmatch(name))}


def _low_rank(a: torch.Tensor, b: torch.Tensor, scaling: float) -> LowRank:
    """Of (rank, inputs) and (outputs, rank)."""
    return LowRank(a.to(torch.float32, copy=True).t().contiguous(), (b.to(torch.float32) * scaling).t().contiguous())


class _Config(msgspec.Struct, frozen=True):
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    use_dora: bool = False
    lora_bias: bool = False
    init_lora_weights: bool | str | None = True
    alora_invocation_tokens: list[int] | None = None


class _Scaling:
    """``alpha / rank`` of each module, as peft finds it."""

    def __init__(self, record: AdapterRecord, config: bytes) -> None:
        self._record = record
        try:
            self._own = msgspec.json.decode(config or b"{}", type=_Config)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidCheckpoint(f"adapter_config.json cannot be read: {error}") from error
        if self._own.use_dora or self._own.lora_bias:
            raise UnsupportedModel("the adapter changes more than matrices (use_dora, lora_bias), which is not served")
        if self._own.alora_invocation_tokens:
            raise UnsupportedModel("the adapter counts behind some tokens only (alora_invocation_tokens), not served")
        if str(self._own.init_lora_weights).lower().startswith(_OF_ANOTHER_BASE):
            raise UnsupportedModel(
                f"the adapter belongs to a base without its initial product (init_lora_weights "
                f"{self._own.init_lora_weights!r}); save it with path_initial_model_for_weight_conversion"
            )

    def of(self, module: str, there: int) -> float:
        """``there``: the rank that its halves have. Raises ``InvalidCheckpoint`` for another one, as peft does."""
        rank = _matching(self._own.rank_pattern, module, self._record.rank)
        if rank != there:
            text = f"the adapter's {module!r} has rank {there}, its adapter_config.json says {rank}"
            raise InvalidCheckpoint(f"{text}; they are not of one training", field=module)
        alpha = _matching(self._own.alpha_pattern, module, self._record.alpha)
        return float(alpha / (math.sqrt(rank) if self._record.rslora else rank))


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def _same_wherever(half: LowRank) -> bool:
    """Whether a row of a tile has the same bits at any place and beside any others, with this library and threads."""
    made = torch.Generator().manual_seed(1)
    x = torch.randn(TILE, half.a.shape[0], generator=made)
    with torch.inference_mode():
        whole = half(x)
        moved = all(torch.equal(half(x.roll(by, 0)), whole.roll(by, 0)) for by in _MOVES)
        alone = torch.cat((x[:1], torch.zeros_like(x[1:])))
        return moved and torch.equal(half(alone)[0], whole[0])

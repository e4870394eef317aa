"""config.json of the commonest families, read without transformers: whose import alone takes two seconds of a CPU.

Attributes, defaults and derived values are those of transformers' own objects, and a test compares them. What stands
here does not know everything: where it does not, transformers reads (``read``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

_OWN_SCALINGS: Final = frozenset({"default", "linear", "llama3"})


class Config(msgspec.Struct, kw_only=True):
    """As Llama has it; the others differ in defaults."""

    model_type: str
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    @property
    def default_theta(self) -> float:
        """Where config.json names none."""
        return 10_000.0

    def complete(self) -> None:
        """Fill in what follows from the rest."""
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        parameters = dict(self.rope_scaling or self.rope_parameters or {})
        parameters.setdefault("rope_theta", self.rope_theta or self.default_theta)
        parameters.setdefault("rope_type", parameters.get("type", "default"))
        if self.partial_rotary_factor is not None:
            parameters.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        if parameters["rope_type"] == "llama3":
            parameters.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        self.rope_parameters = parameters


class Mistral(Config, kw_only=True):
    """Mistral 7b and what came of it."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096


class Mixtral(Mistral, kw_only=True):
    """With experts."""

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_experts_per_tok: int = 2
    num_local_experts: int = 8

    @property
    def default_theta(self) -> float:
        """See ``Config``."""
        return 1_000_000.0


class Qwen2(Config, kw_only=True):
    """Qwen 2 and 2.5: a window, where it is used at all, for layers from ``max_window_layers`` on."""

    vocab_size: int = 151_936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    def complete(self) -> None:
        """See ``Config``."""
        Config.complete(self)
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            first = math.inf if self.sliding_window is None else self.max_window_layers
            kinds = ("full_attention", "sliding_attention")
            self.layer_types = [kinds[layer >= first] for layer in range(self.num_hidden_layers)]


class Qwen3(Qwen2, kw_only=True):
    """Dense ones."""

    head_dim: int | None = 128


KINDS: Final[Mapping[str, tuple[str, type[Config]]]] = {
    "llama": ("LlamaForCausalLM", Config),
    "mistral": ("MistralForCausalLM", Mistral),
    "mixtral": ("MixtralForCausalLM", Mixtral),
    "qwen2": ("Qwen2ForCausalLM", Qwen2),
    "qwen3": ("Qwen3ForCausalLM", Qwen3),
}
"""By ``model_type``: the causal language model, and who reads its config.json."""
OTHERS: Final[Mapping[str, str]] = {
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "falcon": "FalconForCausalLM",
}
"""Those that transformers reads."""


def read(raw: Mapping[str, Any], loader: str) -> tuple[str, Any] | None:
    """Architecture and configuration of a model of ours, ``raw`` being its config.json and ``loader`` the manifest's.

    None: it is not one of ours as it stands there, and transformers is to judge it.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or raw.get("quantization_config") is not None or "auto_map" in raw:
        return None
    architecture = KINDS[kind][0] if kind in KINDS else OTHERS.get(kind)
    named = raw.get("architectures") or []
    if architecture is None or (loader != "causal_lm" and named[:1] != [architecture]):
        return None
    found = _own(raw, kind) if kind in KINDS else None
    if found is None:
        found = _theirs(raw, kind)
    return None if found is None else (architecture, found)


def _own(raw: Mapping[str, Any], kind: str) -> Config | None:
    try:
        config = msgspec.convert(raw, type=KINDS[kind][1])
        config.complete()
    except (msgspec.ValidationError, TypeError, ZeroDivisionError):
        return None
    parameters = config.rope_parameters or {}
    return config if parameters.get("rope_type") in _OWN_SCALINGS else None


def _theirs(raw: Mapping[str, Any], kind: str) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[kind].from_dict(dict(raw))
    except Exception:  # whatever is wrong with it, the module of transformers says it again, by name
        return None

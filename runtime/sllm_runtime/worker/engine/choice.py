"""Which engine runs a model: ours where it knows the architecture, else the one over transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from sllm_runtime.protocol.errors import UnsupportedModel
from sllm_runtime.worker.engine import admission
from sllm_runtime.worker.engine.base import Engine
from sllm_runtime.worker.engine.ours import selftest
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.transformers_engine import TransformersEngine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """An engine, and its proof for the starts to come (empty: it has none)."""

    engine: Engine
    proof: str


def choose_engine(
    module: Any,
    files: Mapping[str, bytes],
    config: Mapping[str, Any],
    *,
    kv_bytes: int,
    model: str = "",
    proof: str = "",
) -> Chosen:
    """The engine for ``module``, a causal language model with its weights bound; ``model`` is their digest.

    ``proof``: what the self-test of an earlier start found (``selftest.Proof`` as JSON), used if it is for the same
    weights, libraries, processor and threads.
    """
    eos = admission.end_ids(config, files.get("generation_config.json"))
    context = admission.max_context(config)
    architecture = type(module).__name__
    decoder = _known(module, architecture)
    if decoder is None:
        vocabulary = int(module.get_input_embeddings().weight.shape[0])
        return Chosen(TransformersEngine(module, eos, context, vocabulary), "")
    mark = selftest.fingerprint(architecture, model, decoder.dtype)
    found = selftest.remembered(proof, mark) or selftest.prove(decoder, mark)
    if not found.exact:
        log.warning("no level of exactness holds for %s on this machine: a resumed call may differ", architecture)
    engine = OurEngine(
        decoder,
        eos,
        found.numerics,
        kv_bytes,
        proven=found.exact,
        fingerprint=found.numerics_class,
        max_context=context,
    )
    return Chosen(engine, msgspec.json.encode(found).decode())


def _known(module: Any, architecture: str) -> Decoder | None:
    """Ours, if it is one of transformers' own classes that ours knows, on a CPU."""
    tensors = dict(module.named_parameters())
    first: torch.Tensor = next(iter(tensors.values()))
    if not type(module).__module__.startswith("transformers.") or first.device.type != "cpu":
        return None
    try:
        return build(architecture, module.config, tensors, first.dtype, EXACT.rows)
    except UnsupportedModel as error:
        log.info("%s; transformers runs it", error.message)
        return None

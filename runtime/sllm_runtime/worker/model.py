"""From a load on its way to a model handle: our engine over its tensors, or a module of transformers or of the user."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from sllm_runtime.protocol.checkpoint import CheckpointIndex
from sllm_runtime.protocol.errors import FunctionError, InvalidBundle, StartFailed
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.timeline import SETUP
from sllm_runtime.worker import weights
from sllm_runtime.worker.arriving import Layers, Report, Weights, blocks_of
from sllm_runtime.worker.engine.choice import Chosen, Known, Settings, choose_engine, recognise
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.handle import ModelHandle
from sllm_runtime.worker.tensors import CheckpointTensors, TypedTensors
from sllm_runtime.worker.tokens import Tokens

KV_SHARE: Final = 4
"""The KV cache may take this part of the manifest's memory; the rest is the function's and the activations'."""


def load_model(
    manifest: Manifest,
    home: Path,
    pending: Weights,
    module: ModuleType | None,
    report: Report,
    proof: str = "",
    proofs: tuple[str, ...] = (),
) -> ModelHandle:
    """The model of ``pending``. Where our engine knows it and has its ``proof`` (see ``Assign``), its bytes may still
    come when this returns: a first prefill follows them layer by layer. Else all of them are there."""
    index, files = pending.load.index(pending.left), pending.load.files(pending.left)
    config = weights.read_config(files)
    tensors = _tensors(index, pending)
    dtype = weights.compute_dtype(manifest.dtype, config, tensors)
    room, gpu_room = manifest.memory // KV_SHARE, granted(manifest, index.nbytes)
    settings = Settings(room, pending.session.model, proof, gpu_room, proofs=proofs)

    def make_module() -> Any:
        net = _empty(manifest, module, config, dtype)
        pending.wait(report)
        weights.bind(net, tensors, dtype)
        return net

    known = _known(manifest, config, tensors, dtype)
    if known is None:
        net = make_module()
        return ModelHandle(
            lambda: net, files, home / "model", lambda: start_engine(lambda: _of(net, files, config, settings), files)
        )
    _follow(known, pending, index)
    if known.proof(settings) is None:
        pending.wait(report)
    else:
        pending.watch(report)
    made = known
    return ModelHandle(
        make_module, files, home / "model", lambda: start_engine(lambda: made.engine(files, config, settings), files)
    )


def granted(manifest: Manifest, nbytes: int) -> int | None:
    """What ``gpu_memory`` leaves on a GPU beside ``nbytes`` of weights; None where nothing is said of it."""
    return None if manifest.gpu_memory is None else max(0, manifest.gpu_memory - nbytes)


def _tensors(index: CheckpointIndex, pending: Weights) -> CheckpointTensors:
    (first, memory), *others = pending.attach().items()
    beside = {rank: other.exporter() for rank, other in others}
    return CheckpointTensors(index, memory.exporter(), first, beside=beside)


def _known(manifest: Manifest, config: Mapping[str, Any], tensors: CheckpointTensors, dtype: Any) -> Known | None:
    if not manifest.engine or manifest.model_loader == "build" or len(tensors.devices) > 1:  # ours computes on one
        return None
    typed = TypedTensors(tensors, dtype)
    return recognise(config, manifest.model_loader, typed, typed.shapes, dtype, tensors.devices[0])


def _follow(known: Known, pending: Weights, index: CheckpointIndex) -> None:
    """Let the layers wait for their blocks."""
    blocks = blocks_of(index, [load.partition for load in pending.loads], known.needs)
    known.decoder.arrival = Layers(pending, blocks, known.decoder.count)


def _empty(manifest: Manifest, module: ModuleType | None, config: Mapping[str, Any], dtype: Any) -> Any:
    if manifest.model_loader != "build":
        return weights.build_known(config, manifest.model_loader, dtype)
    build = getattr(module, "build", None)
    if build is None:
        raise InvalidBundle("model_loader is 'build', but the function's module defines no build()")
    return weights.build_custom(build, config, dtype)


def _of(module: Any, files: Mapping[str, bytes], config: Mapping[str, Any], settings: Settings) -> Chosen:
    if not hasattr(module, "lm_head") and getattr(module, "get_output_embeddings", lambda: None)() is None:
        raise FunctionError(f"{type(module).__name__} generates no text; use model.module")
    return choose_engine(module, files, config, settings)


def start_engine(choose: Callable[[], Chosen], files: Mapping[str, bytes]) -> tuple[EngineLoop, Tokens]:
    """The engine on its thread, and its tokenizer. Raises ``FunctionError`` if it is no causal language model."""
    tokens = _tokens(files)
    chosen = choose()
    loop = EngineLoop(chosen.engine, tokens, proof=chosen.proof, proved_s=chosen.proved_s, release=chosen.release)
    loop.start()
    return loop, tokens


def _tokens(files: Mapping[str, bytes]) -> Tokens:
    if "tokenizer.json" in files:
        return Tokens.from_json(files["tokenizer.json"])
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="sllm-tokenizer-") as name:
        for file, data in files.items():
            (Path(name) / file).write_bytes(data)
        try:
            slow = AutoTokenizer.from_pretrained(name, local_files_only=True)
            return Tokens(slow.backend_tokenizer)
        except Exception as error:  # transformers raises many kinds for files it cannot use
            raise StartFailed(f"the model has no tokenizer that can be used: {error}", stage=SETUP) from error

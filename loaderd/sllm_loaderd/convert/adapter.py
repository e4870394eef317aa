"""Source format: PEFT LoRA adapters, `adapter_config.json` beside `adapter_model.safetensors` or `.bin`.

Tensors keep the names that PEFT gives them; the index says of which base model it is an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from sllm_loaderd.convert.safetensors import SafetensorsSource
from sllm_loaderd.convert.source import SourceExtras, SourceTensor, TensorSource
from sllm_runtime.protocol.checkpoint import AdapterRecord
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel

CONFIG: Final = "adapter_config.json"
STEM: Final = "adapter_model"
_HALF: Final = re.compile(r"(.*\.lora_(?:embedding_)?)([AB])(\.weight)?")


class _Config(msgspec.Struct, frozen=True):
    peft_type: str
    r: int
    lora_alpha: float
    target_modules: tuple[str, ...] | str | None = None
    base_model_name_or_path: str | None = None
    use_rslora: bool = False


class AdapterSource:
    """A LoRA adapter. Raises ``UnsupportedModel`` for other kinds, ``InvalidCheckpoint`` for halves without their
    other half."""

    def __init__(self, directory: Path) -> None:
        self._record = _record(directory / CONFIG)
        self._weights = _weights(directory)
        try:
            _check_pairs(self._weights.tensors)
        except BaseException:
            self.close()
            raise

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self._weights.tensors

    @property
    def ties(self) -> Mapping[str, str]:
        return self._weights.ties

    @property
    def extras(self) -> SourceExtras:
        return SourceExtras(adapter=self._record)

    def read(self, name: str, start: int, view: memoryview) -> None:
        self._weights.read(name, start, view)

    def close(self) -> None:
        self._weights.close()


def _weights(directory: Path) -> TensorSource:
    safe, pickled = directory / f"{STEM}.safetensors", directory / f"{STEM}.bin"
    if safe.is_file():
        return SafetensorsSource([safe])
    from sllm_loaderd.convert.torch_files import TorchSource

    return TorchSource([pickled])


def _record(path: Path) -> AdapterRecord:
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path} is not an adapter's configuration: {error}", field=CONFIG) from error
    if config.peft_type != "LORA":
        raise UnsupportedModel(f"{path}: adapters of type {config.peft_type} are not served, only LORA", field=CONFIG)
    if not config.base_model_name_or_path:
        raise InvalidCheckpoint(f"{path} names no base model; set base_model_name_or_path", field=CONFIG)
    if config.r < 1:
        raise InvalidCheckpoint(f"{path}: rank {config.r} is not 1 or more", field=CONFIG)
    targets = (config.target_modules,) if isinstance(config.target_modules, str) else config.target_modules or ()
    return AdapterRecord(
        base=config.base_model_name_or_path,
        kind="lora",
        rank=config.r,
        alpha=config.lora_alpha,
        targets=tuple(sorted(targets)),
        rslora=config.use_rslora,
    )


def _check_pairs(tensors: Mapping[str, SourceTensor]) -> None:
    """There are some, every A has its B and the other way round; of weights, A [rank, in, …] and B [out, rank, …] fit
    together."""
    if not tensors:
        raise InvalidCheckpoint("the adapter has no tensors: whoever saved it left its weights out", field=STEM)
    for name, tensor in tensors.items():
        match = _HALF.fullmatch(name)
        if match is None:
            continue
        other = f"{match[1]}{'B' if match[2] == 'A' else 'A'}{match[3] or ''}"
        pair = tensors.get(other)
        if pair is None:
            raise InvalidCheckpoint(f"tensor {name!r} has no {other!r}; the adapter is incomplete", field=name)
        a, b = (tensor, pair) if match[2] == "A" else (pair, tensor)
        if match[3] == ".weight" and (len(a.shape) < 2 or len(b.shape) < 2 or a.shape[0] != b.shape[1]):
            text = f"tensors {name!r} and {other!r} have no rank in common: {tensor.shape}, {pair.shape}"
            raise InvalidCheckpoint(text, field=name)

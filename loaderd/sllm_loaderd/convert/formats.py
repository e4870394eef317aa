"""Which format a model's files have, and the source that reads it. One file per format, imported when needed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from sllm_loaderd.convert.source import TensorSource
from sllm_loaderd.files import small_files
from sllm_runtime.protocol.checkpoint import INDEX_NAME, partition_name
from sllm_runtime.protocol.errors import InvalidCheckpoint

_STEMS = (("safetensors", ".safetensors", "model"), ("torch", ".bin", "pytorch_model"))
_NO_WEIGHTS = ("optimizer", "training", "scheduler", "rng_state")
_OTHER_WEIGHTS = (".safetensors", ".gguf", "pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")


def is_converted(names: Collection[str]) -> bool:
    """Whether these are a converted checkpoint's files, be it damaged: others may have an index.json that is none."""
    return INDEX_NAME in names and (
        partition_name(0) in names or not any(name.endswith(_OTHER_WEIGHTS) for name in names)
    )


def source_files(path: Path) -> tuple[str, list[Path]]:
    """Which format a model has (``safetensors``, ``torch``, ``gguf`` or ``adapter``) and its weight files, or its
    shard index. ``path`` is a directory, or one GGUF file.

    Raises ``InvalidCheckpoint`` if there are no weights, or they were converted before.
    """
    if path.is_file() and path.suffix == ".gguf":
        return "gguf", [path]
    if not path.is_dir():
        raise InvalidCheckpoint(f"{path} is no directory; give the directory that holds config.json and weights")
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    if "adapter_config.json" in names and not {"adapter_model.safetensors", "adapter_model.bin"}.isdisjoint(names):
        return "adapter", [path]
    if {INDEX_NAME, partition_name(0)} <= set(names):
        raise InvalidCheckpoint(f"{path} is converted already: deploy it as it is, or convert what it was made of anew")
    for kind, suffix, stem in _STEMS:
        # One file goes before an index, as with transformers, whose save_pretrained leaves that of former shards there.
        for name in (f"{stem}{suffix}", f"{stem}{suffix}.index.json"):
            if name in names:
                return kind, [path / name]
        weights = [name for name in names if name.endswith(suffix) and not name.startswith(_NO_WEIGHTS)]
        if weights:
            return kind, [path / name for name in weights]
    weights = [name for name in names if name.endswith(".gguf")]
    if weights:
        return "gguf", [path / name for name in weights]
    raise InvalidCheckpoint(
        f"{path} has no weights: neither *.safetensors nor pytorch_model*.bin nor *.gguf; it has {names[:8]}"
    )


def open_source(path: Path, *, keep: bool = False) -> TensorSource:
    """The weights of a model, whatever their format. ``keep``: quantised tensors stay packed.

    Raises ``InvalidCheckpoint`` or ``UnsupportedModel``.
    """
    kind, files = source_files(path)
    if kind == "adapter":
        from sllm_loaderd.convert.adapter import AdapterSource

        return AdapterSource(files[0])
    if kind == "gguf":
        from sllm_loaderd.convert.gguf.config import is_label
        from sllm_loaderd.convert.gguf.source import GgufSource

        given = small_files(path) if path.is_dir() else {}
        own = {name for name, data in given.items() if name != "config.json" or not is_label(data)}
        return GgufSource(files, keep=keep, given=own)
    if kind == "torch":
        from sllm_loaderd.convert.torch_files import TorchSource

        return TorchSource(files)
    from sllm_loaderd.convert.safetensors import SafetensorsSource

    return SafetensorsSource(files)

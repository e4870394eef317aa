"""What the model's own module says about its weights: execution order, ties, names, fused tensors.

The module is built on the meta device from config.json (transformers' own classes only, never remote code), and
one forward pass is traced there: no weight is allocated, no number computed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sllm_loaderd.convert.module_plan import Fusion, ModulePlan

log = logging.getLogger(__name__)


def module_plan(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> ModulePlan | None:
    """The plan for a directory with a config.json; None if that is of another library (see ``execution_plan``)."""
    model = _meta_model(directory)
    if model is None:
        return None
    order = _traced(model)
    names = [name for name, _ in _named(model)]
    renamed, fusions = _conversions(model, shapes)
    return ModulePlan(tuple(order or names), order is not None, _tie_groups(model), renamed, fusions)


def _meta_model(directory: Path) -> Any:
    import transformers

    config_path = directory / "config.json"

    try:
        names = json.loads(config_path.read_bytes()).get("architectures") or []
        cls = getattr(transformers, names[0], None) if names and isinstance(names[0], str) else None
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            log.info("architecture %s is not one of transformers: order by offset in the files", names)
            return None
        config: Any = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        config._experts_implementation = "batched_mm"  # the one that runs without data
        with torch.device("meta"):
            model: Any = cls(config)
        model.eval()
        model.tie_weights()
    # Any class of transformers may raise anything on a configuration it does not like: then the files decide.
    except Exception as error:
        log.warning("no module from %s (%s: %s): order by offset", config_path, type(error).__name__, error)
        return None
    return model


def _named(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _tie_groups(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, tensor in _named(model):
        groups.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


class _NoData(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]  # torch is half typed
    """Answers questions about data that a meta tensor has not: a number is 1, one element is not zero."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten._local_scalar_dense.default, aten.item.default):
            return 1
        if func is aten.nonzero.default:
            return torch.empty((1, args[0].dim()), dtype=torch.long, device="meta")
        return func(*args, **(kwargs or {}))


def _traced(model: Any) -> list[str] | None:
    """Names in the order in which a forward pass first uses their modules, or None if it cannot be traced."""
    order: list[str] = []
    hooks = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = [prefix + name for name, _ in _direct(module)]
        if own:
            hooks.append(module.register_forward_pre_hook(_recorder(order, own)))
    try:
        with torch.no_grad(), _NoData():  # type: ignore[no-untyped-call, unused-ignore]
            model(**_inputs(model))
    # A forward pass may raise anything on inputs that do not suit it; the order of registration is the fall-back.
    except Exception as error:
        log.info("forward of %s cannot be traced (%s): order of registration", type(model).__name__, error)
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return list(dict.fromkeys(order))


def _direct(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _recorder(order: list[str], own: list[str]) -> Callable[[Any, Any], None]:
    def record(module: Any, args: Any) -> None:
        order.extend(own)

    return record


def _inputs(model: Any) -> dict[str, Any]:
    name = getattr(model, "main_input_name", "input_ids")
    ids = torch.zeros((1, 8), dtype=torch.long, device="meta")
    config = model.config
    if name == "pixel_values":
        size = getattr(config, "image_size", 224)
        channels = getattr(config, "num_channels", 3)
        high, wide = size if isinstance(size, (tuple, list)) else (size, size)
        return {name: torch.zeros((1, channels, high, wide), device="meta")}
    inputs: dict[str, Any] = {name: ids}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs


def _conversions(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, str], tuple[Fusion, ...]]:
    """transformers' own mapping from the names in files to the names in its modules, as far as bytes can follow it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings: Any = [t for t in transforms if not isinstance(t, WeightConverter)]
    state = {name: tuple(tensor.shape) for name, tensor in _named(model)}
    meta: Any = state
    renamed: dict[str, str] = {}
    groups: dict[str, dict[str, list[str]]] = {}
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, meta)
        if target not in state:
            continue
        if pattern is not None:
            groups.setdefault(target, {}).setdefault(pattern, []).append(name)
        elif target != name and target not in shapes:
            renamed[name] = target
    fusions = [_fusion(target, state[target], parts, by_pattern, shapes) for target, parts in groups.items()]
    return renamed, tuple(fusion for fusion in fusions if fusion is not None)


def _fusion(
    target: str,
    shape: tuple[int, ...],
    parts: Mapping[str, list[str]],
    converters: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> Fusion | None:
    """The fusion, where it is a matter of order alone: stacking, and joining along the outermost dimension."""
    converter = converters[next(iter(parts))]
    operations = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    columns = [parts.get(pattern, []) for pattern in converter.source_patterns]
    if any(len(column) != len(columns[0]) for column in columns):
        return None
    if operations in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        ordered = [name for row in zip(*columns, strict=True) for name in row]
    elif operations == [("Concatenate", 0)]:
        ordered = [name for column in columns for name in column]
    else:
        log.warning("%s is made by %s, which is more than order: its parts keep their names", target, operations)
        return None
    elements = sum(torch.Size(shapes[name]).numel() for name in ordered)
    return Fusion(target, shape, tuple(ordered)) if elements == torch.Size(shape).numel() else None

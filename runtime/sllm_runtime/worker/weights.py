"""From a checkpoint in shared memory to a module: built without data, each tensor bound where its bytes lie.

Parameters are made on the meta device while buffers are computed for real, since no checkpoint holds all of them
(rotary frequencies, position ids). Afterwards nothing may be left on the meta device.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from sllm_runtime.protocol.errors import InvalidCheckpoint, SllmError, UnsupportedModel
from sllm_runtime.worker.tensors import CheckpointTensors, torch_dtype

log = logging.getLogger(__name__)
CONFIG: Final = "config.json"
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_OWN_BLOCK: Final = 1 << 20
_FROM_HEAP: Final = 32 << 20
"""Where glibc's own adjustment ends (M_MMAP_THRESHOLD of mallopt(3)): activations are taken from the heap."""


def read_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The model's config.json; {} where it has none. Raises ``InvalidCheckpoint``."""
    try:
        config = json.loads(files.get(CONFIG, b"{}"))
    except ValueError as error:
        raise InvalidCheckpoint(f"{CONFIG} is not JSON: {error}", field=CONFIG) from error
    if not isinstance(config, dict):
        raise InvalidCheckpoint(f"{CONFIG} is no JSON object", field=CONFIG)
    return config


def compute_dtype(wanted: str, config: Mapping[str, Any], tensors: CheckpointTensors) -> torch.dtype:
    """The manifest's dtype; for ``auto`` the config's, else the one most weights have."""
    if wanted != "auto":
        return torch_dtype(wanted)
    stated = config.get("dtype") or config.get("torch_dtype")
    return torch_dtype(stated) if isinstance(stated, str) else tensors.floating_dtype()


def build_known(config: Mapping[str, Any], loader: str, dtype: torch.dtype) -> nn.Module:
    """The empty module that config.json names, of transformers' own classes. Raises ``UnsupportedModel`` by name."""
    from transformers import CONFIG_MAPPING
    from transformers.initialization import no_init_weights

    architecture, kind = next(iter(config.get("architectures") or []), None), str(config.get("model_type"))
    if (quantised := config.get("quantization_config")) is not None:  # null is what one that is not may say
        raise UnsupportedModel(f"{architecture} is quantised ({quantised.get('quant_method')}); "
                               "deploy the weights it was made from")  # fmt: skip
    if kind not in CONFIG_MAPPING:
        why = "it needs code from its repository, which is never run" if "auto_map" in config else "it is unknown here"
        if architecture or "model_type" in config:
            said = f"architecture {architecture or kind!r} cannot run: {why}"
        else:
            said = f"this model cannot run by itself: it has no {CONFIG} that names an architecture"
        raise UnsupportedModel(
            f"{said}; for a module of your own say model_loader='build' and define build(), which returns it, in the"
            " function's file"
        )
    try:
        typed = CONFIG_MAPPING[kind].from_dict(dict(config))
        cls = _model_class(architecture, typed, loader)
        with empty_parameters(), no_init_weights():
            module: nn.Module = cls._from_config(typed, dtype=dtype)
    except SllmError:
        raise
    except Exception as error:  # a class of transformers may raise anything on a configuration it cannot take
        name, text = architecture or kind, f"{type(error).__name__}: {error}"
        raise UnsupportedModel(f"{name} refuses its config.json: {text}") from error
    return module


def _model_class(architecture: str | None, config: Any, loader: str) -> Any:
    import transformers

    if loader == "causal_lm":
        mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in mapping:
            raise UnsupportedModel(f"{config.model_type} is no causal language model")
        return mapping[type(config)]
    cls = getattr(transformers, architecture or "", None)
    if cls is None and architecture is None and type(config) in transformers.MODEL_MAPPING:
        cls = transformers.MODEL_MAPPING[type(config)]
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise UnsupportedModel(f"architecture {architecture!r} is not one of transformers {transformers.__version__}")
    return cls


def build_custom(build: Callable[..., Any], config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The empty module of the user's ``build()``, which may take the config.json as ``config``."""
    arguments = {"config": dict(config)} if "config" in inspect.signature(build).parameters else {}
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype.is_floating_point and dtype.itemsize > 1 else default)
    try:
        with empty_parameters():
            module = build(**arguments)
    finally:
        torch.set_default_dtype(default)
    if not isinstance(module, nn.Module):
        raise UnsupportedModel(f"build() returned {type(module).__name__}, not a torch.nn.Module")
    return module


def _malloc(own_block: int, keep: int) -> None:
    """Blocks from ``own_block`` bytes are mapped each by itself; ``keep`` free bytes of the heap are kept."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc alone has it
        mallopt(_M_MMAP_THRESHOLD, own_block)
        mallopt(_M_TRIM_THRESHOLD, keep)


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules that this thread makes have parameters on the meta device, and real buffers."""
    register = nn.Module.register_parameter
    owner = threading.get_ident()

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == owner and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    # A module makes each parameter for real before it registers it. Blocks of their own give that memory back at
    # once; from the heap it would add up to the model's size in VmData, which RLIMIT_DATA counts.
    _malloc(_OWN_BLOCK, keep=_OWN_BLOCK)
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        _malloc(_FROM_HEAP, keep=2 * _FROM_HEAP)


def bind(module: nn.Module, tensors: CheckpointTensors, dtype: torch.dtype) -> None:
    """Point every parameter and every buffer the checkpoint holds at its bytes; only another dtype makes a copy.
    Buffers that it does not hold go where the bytes are.

    Raises ``InvalidCheckpoint`` naming tensors that are missing or of another shape, ``UnsupportedModel`` if the bytes
    are on several GPUs.
    """
    device = _one_device(tensors)
    cast = _Casts(module, dtype)
    bound: dict[str, nn.Parameter] = {}
    missing: list[str] = []
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for slots in (part._parameters, part._buffers):
            for leaf, old in slots.items():
                loaded = old is not None and leaf not in part._non_persistent_buffers_set
                record = tensors.find(prefix + leaf) if loaded else None
                if old is None or record is None:
                    missing.extend([prefix + leaf] if old is not None and old.is_meta else [])
                    if old is not None and not old.is_meta and old.device != device:
                        slots[leaf] = old.to(device)
                    continue
                if tuple(old.shape) != record.shape:
                    raise InvalidCheckpoint(f"tensor {record.name!r} has shape {record.shape}, the module wants "
                                            f"{tuple(old.shape)}", field=record.name)  # fmt: skip
                if record.name not in bound:
                    bound[record.name] = cast(prefix + leaf, old.dtype, tensors.tensor(record))
                slots[leaf] = bound[record.name] if slots is part._parameters else bound[record.name].data
    _tie(module, missing)
    _check_complete(module)
    unused = tensors.names - {name for name, _ in _named(module)} - bound.keys()
    if unused:
        log.info("%d tensors of the checkpoint have no place in %s, as %s", len(unused), type(module).__name__,
                 sorted(unused)[:3])  # fmt: skip
    module.eval()


def _one_device(tensors: CheckpointTensors) -> torch.device:
    if len(tensors.devices) > 1:
        named = ", ".join(map(str, tensors.devices))
        raise UnsupportedModel(f"the partitions are on {named}, and a module runs on one of them; deploy the model in "
                               "one partition, or ask for one GPU")  # fmt: skip
    return tensors.devices[0]


class _Casts:
    """Which dtype a tensor of the module is to have: transformers keeps some modules in float32, and a class makes some
    of its tensors in a dtype of their own."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        plan: dict[str, torch.dtype] = getattr(module, "_get_dtype_plan", lambda _: {})(dtype)
        self._plan = [(re.compile(rf"(^|\.){pattern}(\.|$)"), wanted) for pattern, wanted in plan.items()]

    def __call__(self, name: str, made: torch.dtype, tensor: torch.Tensor) -> nn.Parameter:
        wanted = next((dtype for pattern, dtype in self._plan if pattern.search(name)), made)
        have = tensor.dtype
        if wanted.is_floating_point and have.is_floating_point and have.itemsize > 1 and have != wanted:
            tensor = tensor.to(wanted)
        return nn.Parameter(tensor, requires_grad=False)


def _tie(module: nn.Module, missing: list[str]) -> None:
    """What the class itself ties and the checkpoint did not name."""
    tied = getattr(module, "all_tied_weights_keys", None)
    if missing and tied:
        module.tie_weights(missing_keys=set(missing), recompute_mapping=False)  # type: ignore[operator]


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _check_complete(module: nn.Module) -> None:
    empty = [name for name, tensor in _named(module) if tensor.is_meta]
    if empty:
        raise InvalidCheckpoint(
            f"the checkpoint lacks {len(empty)} tensors of {type(module).__name__}: {', '.join(empty[:5])}; convert "
            "the model that these weights belong to",
            field=empty[0],
        )

"""From a described function to its manifest."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sllm import signature
from sllm.function import ModelFunction
from sllm.options import Options
from sllm_runtime.protocol.errors import InvalidManifest, SllmError
from sllm_runtime.protocol.manifest import Manifest


def manifest(function: ModelFunction[Any, Any, Any], entry: str, python: str | None) -> Manifest:
    """The manifest of ``function``, its code found at ``entry``. Raises ``InvalidManifest`` naming the field."""
    fields: dict[str, Any] = {key: value for key, value in function.options.items() if key != "include"}
    unknown = sorted(set(fields) - set(Options.__annotations__))
    if unknown:
        raise InvalidManifest(f"{function.__name__}: there is no option {unknown[0]!r}", field=unknown[0])
    model = fields.get("model")
    fields["model"] = located(str(model), function.source_file()) if model else None
    adapters = fields.pop("adapters", None) or {}
    if not isinstance(adapters, Mapping):
        fields["adapters"] = adapters  # refused below, as every field of a wrong type
    elif adapters:
        source = function.source_file()
        fields["adapters"] = {name: located(str(place), source, "adapters") for name, place in adapters.items()}
    fields["name"] = function.name
    described = fields.get("description") or inspect.getdoc(function.target) or ""
    fields["description"] = described[:2000] if isinstance(described, str) else described
    fields.setdefault("engine", bool(model) and fields.get("model_loader") != "build" and generates(fields["model"]))
    handler = {
        "entry": entry,
        "kind": signature.handler_kind(function.target),
        "streams": signature.streams(function.target),
        "input_schema": signature.input_schema(function.target),
        "python": python,
    }
    try:
        return Manifest.model_validate({"handler": handler, **fields})
    except ValidationError as error:
        raise invalid(function.__name__, error) from error


def located(model: str, source: Path | None, field: str = "model") -> str:
    """``model`` with a directory made absolute (relative to the function's file). Raises ``InvalidManifest``."""
    if "://" in model or model.startswith("sha256:"):
        return model
    base = source.parent if source else Path.cwd()
    path = (base / Path(model).expanduser()).resolve()
    if not path.is_dir():
        there = "is a file" if path.exists() else "is not there"
        raise InvalidManifest(
            f"{field.removesuffix('s')} directory {path} {there}; give a directory (relative to the function's file), "
            "hf://org/name or s3://bucket/prefix",
            field=field,
        )
    return str(path)


def generates(model: str) -> bool:
    """Whether the engine can generate with ``model``: what its config.json says, yes where we cannot look."""
    if "://" in model or not Path(model).is_dir():
        return True
    try:
        architectures = json.loads((Path(model) / "config.json").read_bytes()).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return False
    return any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)


def invalid(name: str, error: ValidationError) -> SllmError:
    """The first problem of a manifest, as a person reads it."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    text = str(first["msg"]).removeprefix("Value error, ")
    where = f"{name}: {field}" if field else name
    if first["type"] in ("tuple_type", "list_type") and isinstance(first.get("input"), str):
        text = f"it is a list of texts; write {field}=['one', 'another']"
    given = "" if isinstance(first.get("input"), dict) else f" (given: {first.get('input')!r:.80})"
    return InvalidManifest(f"{where}: {text}{given}", field=field or None)

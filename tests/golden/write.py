"""Prints an example of every message and record of the protocol that is imported. Run it on a version's own tree when
the next one begins, and keep what it prints:

    PYTHONPATH=<tree>/runtime python tests/golden/write.py >tests/golden/before.json
"""

from __future__ import annotations

import base64
import enum
import importlib
import inspect
import json
import pkgutil
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from sllm_runtime import protocol
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.manifest import Manifest

HANDLER = {"entry": "app:f", "kind": "generator", "streams": True}
MANIFEST = {"name": "f", "handler": HANDLER, "memory": 2**30, "gpu": "L4:2", "env": {"A": "b"}, "concurrency": 3}


def structs() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Every message, as ``module.Class``; not what is only a base of others."""
    names = [found.name for found in pkgutil.walk_packages(protocol.__path__, "sllm_runtime.protocol.")]
    modules = [importlib.import_module(name) for name in sorted(names)]
    found = {
        f"{module.__name__.removeprefix('sllm_runtime.protocol.')}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
    }
    bases = {base for value in found.values() for base in value.__mro__[1:]}
    yield from ((name, value) for name, value in found.items() if value not in bases)


def example(kind: Any, name: str) -> Any:
    """A value of a type with everything in it that may be in it. ``name``: what texts say."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Manifest:
        return Manifest.model_validate(MANIFEST)
    if origin is typing.Annotated:
        return example(inner[0], name)
    if origin in (typing.Union, types.UnionType):
        return example(next(each for each in inner if each is not types.NoneType), name)
    if origin is typing.Literal:
        return inner[-1]
    if origin is tuple:
        wanted = inner[:1] if inner[-1:] == (Ellipsis,) else inner
        return tuple(example(each, name) for each in wanted)
    if origin in (list, frozenset, set):
        return origin([example(inner[0], name)])
    if origin in (dict, Mapping):
        return {example(inner[0], name): example(inner[1], name)}
    if inspect.isclass(kind):
        return _plain(kind, name)
    return None  # Any


def _plain(kind: type[Any], name: str) -> Any:
    if issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(**{field: example(hints[field], field) for field in kind.__struct_fields__})
    if kind is msgspec.Raw:
        return msgspec.Raw(codec.pack(name))
    if issubclass(kind, enum.Enum):
        return list(kind)[-1]
    values: dict[type[Any], Any] = {bool: True, int: 1, float: 1.5, bytes: name.encode(), str: name}
    return values.get(kind, kind())


def document() -> dict[str, Any]:
    """What ``before.json`` holds: of each message its bytes, and what they say."""
    messages = {}
    for name, kind in structs():
        value = example(kind, name)
        messages[name] = {"msgpack": base64.b64encode(codec.pack(value)).decode(), "says": says(value)}
    return {"protocol_version": PROTOCOL_VERSION, "messages": messages}


def says(message: msgspec.Struct) -> Any:
    """What a message says, as JSON has it: keys are texts, and pairs lists."""
    return json.loads(msgspec.json.encode(msgspec.to_builtins(message, enc_hook=_builtin)))


def _builtin(value: Any) -> Any:
    return bytes(value).hex() if isinstance(value, msgspec.Raw) else value.model_dump(mode="json")


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")

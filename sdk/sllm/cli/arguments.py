"""A call's arguments from words of a command line. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sllm_runtime.protocol.errors import InvalidArgument


def document(text: str | bytes) -> dict[str, Any]:
    """A JSON object of arguments. Raises ``InvalidArgument``."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"--args is no JSON: {error}", field="--args") from error
    if not isinstance(found, dict):
        raise InvalidArgument("--args must be a JSON object of named arguments", field="--args")
    return found


def split(words: Sequence[str]) -> dict[str, str]:
    """``key=value`` words. Raises ``InvalidArgument`` naming the word that is none."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, raw = word.partition("=")
        if not equals or not key:
            raise InvalidArgument(f"{word!r} is not key=value", field=word)
        if key in found:
            raise InvalidArgument(f"{key} is there twice; give a list as {key}='[…, …]'", field=key)
        found[key] = raw
    return found


def ambiguous(raw: str) -> bool:
    """Whether a word can be meant as JSON or as text: ``12`` or ``true``, but not ``def``."""
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True


def meant(words: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Each word as its parameter takes it. ``schema``: of all arguments; what is no parameter's name is one of
    ``**kwargs``, whose hint holds for each."""
    further = schema.get("additionalProperties")
    others = further if isinstance(further, Mapping) else None
    schemas, named = schema.get("properties", {}), schema.get("$defs", {})
    return {key: value(raw, schemas.get(key, others), named) for key, raw in words.items()}


def value(raw: str, schema: Mapping[str, Any] | None, named: Mapping[str, Any] | None = None) -> Any:
    """What a word means: text where the parameter takes no other type, else JSON where it is JSON, else text.
    ``named``: ``$defs`` of the whole schema."""
    if schema is not None and types(schema, named or {}) - {"null"} == {"string"}:
        return raw
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def types(schema: Mapping[str, Any], named: Mapping[str, Any]) -> set[str]:
    """JSON types that ``schema`` names; ``?`` stands for what it does not say."""
    said = schema.get("type", [])
    found = {said} if isinstance(said, str) else set(said)
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found |= types(part, named) or {"?"}
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name in named:  # an enumeration, say; one that names itself says nothing more
        found |= types(named[name], {key: each for key, each in named.items() if key != name}) or {"?"}
    return found

"""What OpenAI's routes take and refuse, for the gateway, which looks first, and the worker, which does it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sllm_runtime.protocol.errors import InvalidArgument

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_BAD_WORDS: Final = 64
MAX_WORD: Final = 256
"""Characters of a bad word. Each token of an output is held against every place where one may have begun."""
MAX_BIASES: Final = 1024
"""Ids in ``logit_bias``. Each token of an output is weighed with all of them."""
MAX_STOP_IDS: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_CALLS: Final = 16
"""Calls of functions that one answer makes."""
MAX_REGEX: Final = 16 * 1024
"""Characters of a regular expression."""
MAX_GRAMMAR: Final = 128 * 1024
"""Characters of a schema, or of those of all tools together: reading it holds up the instance's other calls."""
MAX_OUTPUTS: Final = 512
"""Continuations of all prompts of one request: more would leave no room for others in the engine's queue."""
WITHOUT_MEANING: Final = frozenset(
    {"user", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier",
     "prediction"}
)  # fmt: skip
"""OpenAI's fields that change no answer here."""

_MODEL: Final = re.compile(r"([^:]+)(?::v([1-9][0-9]{0,8}))?(?::([^:]+))?\Z")


@dataclass(frozen=True, slots=True)
class ModelName:
    """The parts of ``function``, ``function:v3``, ``function:adapter`` or ``function:v3:adapter``."""

    function: str
    version: int | None = None
    adapter: str | None = None


def model_name(text: str) -> ModelName | None:
    """The parts of a request's ``model``; None where it has none of those forms."""
    found = _MODEL.match(text)
    if found is None:
        return None
    function, version, adapter = found.groups()
    return ModelName(function, int(version) if version else None, adapter)


def check(body: Mapping[str, Any], *, chat: bool) -> None:
    """Raises ``InvalidArgument`` naming the field for what contradicts itself and for what no model here can do, since
    leaving it out would change the answer unsaid. ``body``: a request whose fields have the right types."""
    for field, why in (*_common(body), *(_chat(body) if chat else _completion(body))):
        raise InvalidArgument(f"'{field}': {why}", field=field)


def tools_of(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """The tools that the model is told of: none where ``tool_choice`` says so."""
    return None if body.get("tool_choice") == "none" else body.get("tools") or None


def must_call(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The functions (OpenAI's objects) of which the answer calls one at least, and says nothing else; none where it may
    say what it likes."""
    choice = body.get("tool_choice")
    if not isinstance(choice, Mapping) and choice != "required":
        return ()
    functions = [tool["function"] for tool in body.get("tools") or ()]
    if isinstance(choice, Mapping):
        return [function for function in functions if function["name"] == choice["function"]["name"]][:1]
    return functions


def output_format(body: Mapping[str, Any]) -> str:
    """``text``, ``json_object``, ``json_schema`` or ``regex``: what the output must look like."""
    if body.get("regex") is not None:
        return "regex"
    return str((body.get("response_format") or {}).get("type", "text"))


Complaints = Iterator[tuple[str, str]]


def _common(body: Mapping[str, Any]) -> Complaints:
    if body.get("stream_options") is not None and not body.get("stream"):
        yield "stream_options", "it belongs to a stream; set stream to true"
    yield from _format(body)
    shaped = output_format(body) != "text" or body.get("tool_choice") not in (None, "none", "auto")
    for field in ("ignore_eos", "min_tokens"):
        if shaped and body.get(field):
            yield field, "an output of a given shape ends where the shape ends; leave one of the two out"


def _format(body: Mapping[str, Any]) -> Complaints:
    given = body.get("response_format")
    if given is None:
        return
    if body.get("regex") is not None:
        yield "regex", "response_format says what the output looks like; leave one of the two out"
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        yield "response_format.type", f"{kind!r:.80} is unknown; text, json_object and json_schema are there"
    schema = given.get("json_schema")
    if kind == "json_schema" and not (isinstance(schema, Mapping) and isinstance(schema.get("schema"), Mapping)):
        yield "response_format.json_schema", 'give {"name": …, "schema": {…}}'


def _completion(body: Mapping[str, Any]) -> Complaints:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > MAX_CHOICES and not isinstance(prompt[0], int):
        yield "prompt", f"it has {len(prompt)} prompts, at most {MAX_CHOICES} go in one request"
    elif isinstance(prompt, list) and not isinstance(next(iter(prompt), 0), int):
        count = len(prompt) * (body.get("n") or 1)
        if count > MAX_OUTPUTS:
            yield "n", f"{count} continuations of all prompts, at most {MAX_OUTPUTS} go in one request"
    if body.get("suffix"):
        yield "suffix", "the models here do not fill in; give a prompt alone"
    if body.get("best_of") not in (None, body.get("n") or 1):
        yield "best_of", "what is generated is answered; ask for n and choose the best yourself"


def _chat(body: Mapping[str, Any]) -> Complaints:
    for field, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if body.get(field) is not None:
            yield field, f"it is OpenAI's old name; give {instead}"
    if body.get("modalities") not in (None, ["text"]):
        yield "modalities", "the models here write text alone"
    for field in ("audio", "web_search_options"):
        if body.get(field) is not None:
            yield field, "no model here can do that; leave it out"
    if body.get("top_logprobs") and not body.get("logprobs"):
        yield "top_logprobs", "set logprobs to true as well"
    yield from _tools(body)


def _tools(body: Mapping[str, Any]) -> Complaints:
    names = []
    for number, tool in enumerate(body.get("tools") or ()):
        function = tool.get("function")
        if tool.get("type") != "function":
            yield f"tools[{number}].type", "only 'function' is known"
        elif not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            yield f"tools[{number}].function", "give an object with a name"
        elif not isinstance(function.get("parameters") or {}, Mapping):
            yield f"tools[{number}].function.parameters", "give a JSON schema, an object"
        else:
            names.append(function["name"])
    if body.get("tool_choice") not in (None, "none"):
        yield from _tool_choice(body, names)


def _tool_choice(body: Mapping[str, Any], names: Sequence[str]) -> Complaints:
    choice = body["tool_choice"]
    if not body.get("tools"):
        yield "tool_choice", "there are no tools to choose from"
    if choice != "auto" and output_format(body) != "text":
        yield "tool_choice", "response_format or regex says what the output looks like; leave one of the two out"
    if isinstance(choice, Mapping):
        named = choice.get("function")
        if choice.get("type") != "function" or not isinstance(named, Mapping) or named.get("name") not in names:
            yield "tool_choice", 'give none, auto, required or {"type": "function", "function": {"name": …}} of a tool'
    elif choice not in ("auto", "required"):
        yield "tool_choice", f"{choice!r:.80} is unknown; none, auto and required are there, or one function"

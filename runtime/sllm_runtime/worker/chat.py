"""Chat messages to text, by the model's own template in jinja's sandbox, as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.worker.call import current
from sllm_runtime.worker.tools.forms import Form, form_of
from sllm_runtime.worker.words import sendable

TEMPLATE_FILE: Final = "chat_template.jinja"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_DEFAULT: Final = "default"
_WITH_TOOLS: Final = "tool_use"


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._template, self._variables = _compiled(source)
        self.form: Form | None = form_of(source)
        """How the model writes calls of functions, where that is known."""
        self._special = dict(special)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], *, tools: bool = False) -> ChatTemplate:
        """The template among a model's small files; ``tools``: the one for them, where a model has several. Raises
        ``InvalidRequest`` if there is none."""
        config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
        source: Any = files[TEMPLATE_FILE].decode() if TEMPLATE_FILE in files else config.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get(_WITH_TOOLS, named.get(_DEFAULT)) if tools else named.get(_DEFAULT)
        if not isinstance(source, str):
            raise InvalidRequest(
                "this model has no chat template, so it knows no messages; use /v1/completions with a prompt",
                field="messages",
            )
        return cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt up to the assistant's answer. ``more``: variables of the template's own (``enable_thinking``).

        Raises ``InvalidRequest`` in the template's words, and for what it does not read: the model would not know.
        """
        self._check_read(tools, more or {})
        given = {
            "messages": [_plain(message, number) for number, message in enumerate(messages)],
            "tools": tools,
            **({} if tool_choice is None else {"tool_choice": tool_choice}),
        }
        try:
            text: str = self._template.render({"add_generation_prompt": True, **(more or {}), **self._special, **given})
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error
        except Exception as error:  # a template is a program: it may fail by anything
            why = f"the model's chat template fails: {type(error).__name__}: {error}"
            raise InvalidRequest(why, field="messages") from error
        return sendable(text)  # arguments of earlier calls may hold half an emoji, as JSON lets them

    def _check_read(self, tools: Sequence[Any] | None, more: Mapping[str, Any]) -> None:
        if tools and "tools" not in self._variables:
            raise InvalidRequest("'tools': this model's chat template knows no tools; leave them out", field="tools")
        unread = next((name for name in more if name not in self._variables), None)
        if unread is not None:
            field = f"chat_template_kwargs.{unread}"
            raise InvalidRequest(f"'{field}': this model's chat template has no such variable", field=field)


def _plain(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """As templates expect it: content in parts becomes text, no content at all is left out, and the arguments of
    earlier calls, which OpenAI writes as JSON in a string, are objects."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest("only parts of type 'text' are understood by this model", field="messages")
        plain["content"] = "".join(str(text) for text in texts)
    if "tool_calls" in plain:
        plain["tool_calls"] = [_plain_call(call, number) for call in _listed(plain["tool_calls"], number)]
    return plain


def _listed(calls: Any, number: int) -> list[Any]:
    if isinstance(calls, list):
        return calls
    field = f"messages[{number}].tool_calls"
    raise InvalidRequest(f"'{field}': give a list of calls", field=field)


def _plain_call(call: Any, number: int) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        field = f"messages[{number}].tool_calls"
        raise InvalidRequest(f"'{field}': a call is an object with a function", field=field)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        field = f"messages[{number}].tool_calls"
        raise InvalidRequest(f"'{field}': arguments are no JSON: {error}", field=field) from error
    return {**call, "function": {**function, "arguments": parsed}}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


class _GenerationBlock(Extension):
    """``{% generation %}`` … ``{% endgeneration %}``: marks what an assistant wrote, for training; its text stays."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Names(Namespace):
    """jinja's namespace without attributes that begin with an underscore, by which templates reach Python itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may have a variable called self
        given = dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not store {name!r}: it begins with an underscore")


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[Any, frozenset[str]]:
    """The template, and the variables that it reads."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "namespace": _Names}
    try:
        tree = environment.parse(source)
        return environment.from_string(source), frozenset(meta.find_undeclared_variables(tree))
    except TemplateError as error:
        raise InvalidRequest(f"the model's chat template is broken: {error}", field="messages") from error


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # No HTML escapes, which jinja's own makes: this is a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    """Of when the call was accepted: an instance that goes on with it must have the same prompt."""
    call = current.get()
    created = 0.0 if call is None else call.head.created
    return (datetime.fromtimestamp(created, UTC) if created else datetime.now(UTC)).strftime(pattern)


def _raise(message: str) -> None:
    raise TemplateError(message)

"""Chat messages to text, by the model's own template in jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sllm_runtime.protocol.errors import InvalidRequest

TEMPLATE_FILE: Final = "chat_template.jinja"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._template = _compiled(source)
        self._special = dict(special)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatTemplate:
        """The template among a model's small files. Raises ``InvalidRequest`` if there is none."""
        config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
        source: Any = files[TEMPLATE_FILE].decode() if TEMPLATE_FILE in files else config.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        if not isinstance(source, str):
            raise InvalidRequest(
                "this model has no chat template, so it knows no messages; use /v1/completions with a prompt",
                field="messages",
            )
        return cls(source, _special_tokens(config))

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
        """The prompt up to the assistant's answer. Raises ``InvalidRequest`` in the template's words."""
        try:
            text: str = self._template.render(
                messages=[_joined(message) for message in messages],
                tools=tools,
                add_generation_prompt=True,
                **self._special,
            )
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error
        except (TypeError, ValueError, KeyError) as error:
            why = f"the model's chat template fails: {type(error).__name__}: {error}"
            raise InvalidRequest(why, field="messages") from error
        return text


def _joined(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content in parts, as OpenAI allows it, becomes the text that templates expect."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest("only parts of type 'text' are understood by this model", field="messages")
        return {**message, "content": "".join(str(text) for text in texts)}
    return dict(message)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now(UTC).strftime(pattern)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise InvalidRequest(f"the model's chat template is broken: {error}", field="messages") from error


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # no HTML escapes: this is a prompt


def _raise(message: str) -> None:
    raise TemplateError(message)

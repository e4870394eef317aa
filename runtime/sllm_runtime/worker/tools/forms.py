"""How models write calls of functions, told by their chat templates, and grammars that make them write some."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sllm_runtime.protocol.openai import MAX_CALLS

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
Literal = Callable[[str], str]
"""Text as a grammar has it: a string, or the special token that it is."""


@dataclass(frozen=True, slots=True)
class Form:
    """``marker`` stands before calls. ``written``: one call; ``{name}`` and ``{arguments}`` are to be filled in."""

    marker: str
    written: tuple[str, ...]
    dropped: tuple[str, ...]
    """What stands between calls and is nobody's text; white space too."""
    before: tuple[str, ...] = ()
    between: tuple[str, ...] | None = None
    """None: there is never a second call."""
    after: tuple[str, ...] = ()
    bare: bool = False
    """A call may also stand at the very beginning without the marker."""
    short_ids: bool = False
    """Its template takes ids of nine letters and digits alone."""

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be a special token, which texts leave out."""
        return tuple(part for part in (self.marker, *self.written, *self.dropped) if part.strip("[,] ;"))

    def grammar(self, functions: Sequence[Mapping[str, Any]], literal: Literal, *, several: bool) -> str:
        """A Lark grammar of outputs that call one of ``functions`` (OpenAI's objects), or ``several``, and say nothing
        else. Raises ``ValueError`` for a schema that is no object."""
        more = self.between is not None and several
        again = f" ({_parts(self.between or (), literal)} call){{0,{MAX_CALLS - 1}}}" if more else ""
        lines = [
            f"start: {_parts(self.before, literal)} call{again} {_parts(self.after, literal)}",
            "call: " + " | ".join(f"call_{number}" for number in range(len(functions))),
        ]
        for number, function in enumerate(functions):
            named = {"{name}": json.dumps(function["name"])[1:-1]}
            parts = [
                f"arguments_{number}" if part == "{arguments}" else literal(named.get(part, part))
                for part in self.written
            ]
            lines.append(f"call_{number}: {' '.join(parts)}")
            lines.append(f"arguments_{number}: %json {json.dumps(_schema(function))}")
        return "\n".join(lines) + "\n"


def _parts(texts: Sequence[str], literal: Literal) -> str:
    return " ".join(literal(text) for text in texts) or '""'


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    # White space as `constraints` has it: enough to indent, and no model can go on with it for ever.
    given = function.get("parameters") or _NO_PARAMETERS
    return {**given, "x-guidance": {"whitespace_pattern": r"[ \n\t]{0,24}"}}


HERMES: Final = Form(
    marker="<tool_call>",
    before=("<tool_call>", "\n"),
    written=('{"name": "', "{name}", '", "arguments": ', "{arguments}", "}"),
    between=("\n", "</tool_call>", "\n", "<tool_call>", "\n"),
    after=("\n", "</tool_call>"),
    dropped=("<tool_call>", "</tool_call>"),
)
"""Hermes, Qwen 2.5 and 3."""
MISTRAL: Final = Form(
    marker="[TOOL_CALLS]",
    before=("[TOOL_CALLS]", "["),
    written=('{"name": "', "{name}", '", "arguments": ', "{arguments}", "}"),
    between=(", ",),
    after=("]",),
    dropped=("[TOOL_CALLS]", "[", ",", "]"),
    short_ids=True,
)
"""Mistral up to its tokenizer's third version: a list."""
MISTRAL_ARGS: Final = Form(
    marker="[TOOL_CALLS]",
    before=("[TOOL_CALLS]",),
    written=("{name}", "[ARGS]", "{arguments}"),
    between=("[TOOL_CALLS]",),
    dropped=("[TOOL_CALLS]",),
    short_ids=True,
)
"""Mistral since: name, then arguments."""
LLAMA: Final = Form(
    marker="<|python_tag|>",
    written=('{"name": "', "{name}", '", "parameters": ', "{arguments}", "}"),
    dropped=("<|python_tag|>", ";"),
    bare=True,
)
"""Llama 3.1 to 3.3."""
_SAID_BY: Final = (
    ("<function=", None),  # XML, as Qwen3-Coder writes it: not read here
    ("<tool_call>", HERMES),
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ('"parameters": dictionary of argument name', LLAMA),
)


def form_of(template: str) -> Form | None:
    """The form that the source of a chat template speaks of; None: none that is known."""
    return next((form for sign, form in _SAID_BY if sign in template), None)

"""What a chat request says of tools: how its outputs are read for calls, and whether they must be some."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.openai import MAX_CALLS, must_call, tools_of
from sllm_runtime.worker.constraints import Grammar
from sllm_runtime.worker.engine.text import Decoder
from sllm_runtime.worker.tokens import Tokens, Vocabulary
from sllm_runtime.worker.tools.forms import Form
from sllm_runtime.worker.tools.reader import CallReader


@dataclass(frozen=True, slots=True)
class Calling:
    """Functions that outputs may call, in the model's ``form``. ``decoder`` shows its marks."""

    form: Form
    names: frozenset[str]
    most: int
    decoder: Decoder

    @classmethod
    def of(cls, body: Mapping[str, Any], form: Form | None, tokens: Tokens) -> Calling | None:
        """None: there are no tools, or it is not known how the model calls them, and its text is told as it is."""
        tools = tools_of(body)
        if not tools or form is None:
            return None
        names = frozenset(tool["function"]["name"] for tool in tools)
        return cls(form, names, MAX_CALLS if _several(body) else 1, tokens.showing(form.markers))

    def reader(self, call: str, output: int) -> CallReader:
        """For the ``output``-th of ``call``. Ids of calls follow from both, so that a resumed call tells the same."""

        def id_of(number: int) -> str:
            drawn = hashlib.blake2b(f"{call}/{output}/{number}".encode(), digest_size=12).hexdigest()
            return drawn[:9] if self.form.short_ids else f"call_{drawn}"

        return CallReader(self.form, self.names, id_of, self.most)


def required(body: Mapping[str, Any], form: Form | None, vocabulary: Vocabulary) -> Grammar | None:
    """What outputs look like that must call a function; None where they need not. Raises ``InvalidRequest``."""
    functions = must_call(body)
    if not functions:
        return None
    if form is None:
        raise InvalidRequest(
            "'tool_choice': how this model writes calls is not known here; give auto or none", field="tool_choice"
        )
    named = isinstance(body.get("tool_choice"), Mapping)
    return Grammar.of_calls(form, functions, vocabulary, several=_several(body) and not named)


def _several(body: Mapping[str, Any]) -> bool:
    return body.get("parallel_tool_calls") is not False

"""What OpenAI's routes take: the names of models, and bodies that contradict themselves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.protocol.errors import InvalidArgument
from sllm_runtime.protocol.openai import ModelName, check, model_name, output_format, tools_of

_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
TOOL = {"type": "function", "function": {"name": "f"}}


@given(_NAMES, st.none() | st.integers(1, 10**8), st.none() | _NAMES.filter(lambda name: not name[1:].isdigit()))
def test_names_of_models(function: str, version: int | None, adapter: str | None) -> None:
    parts = [function, *([] if version is None else [f"v{version}"]), *([] if adapter is None else [adapter])]
    assert model_name(":".join(parts)) == ModelName(function, version, adapter)


@pytest.mark.parametrize("text", ["a:v\u0661", "a:v01", "a:v0"])
def test_versions_are_written_in_one_way(text: str) -> None:
    named = model_name(text)
    assert named is not None
    assert named.version is None


@pytest.mark.parametrize("text", ["", ":", "a:", ":a", "a:v1:b:c", "a::b", "a:b:v1", "a:b\n:c:d"])
def test_what_names_no_model(text: str) -> None:
    assert model_name(text) is None


@pytest.mark.parametrize("choice", [None, "none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_choices_of_tools(choice: Any) -> None:
    body = {"tools": [TOOL], "tool_choice": choice}
    check(body, chat=True)
    assert tools_of(body) == (None if choice == "none" else [TOOL])


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({}, "text"),
        ({"response_format": None, "regex": None}, "text"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "json_schema"),
        ({"regex": "", "response_format": None}, "regex"),
    ],
)
def test_shapes(body: dict[str, Any], kind: str) -> None:
    check(body, chat=True)
    check(body, chat=False)
    assert output_format(body) == kind


@pytest.mark.parametrize("schema", [None, 5, {}, {"schema": 5}, {"schema": True}])
def test_a_schema_that_is_none(schema: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check({"response_format": {"type": "json_schema", "json_schema": schema}}, chat=True)
    assert refused.value.field == "response_format.json_schema"

"""Words of a command line as arguments."""

from enum import IntEnum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm import signature
from sllm.cli import arguments
from sllm_runtime.protocol.errors import InvalidArgument


@pytest.mark.parametrize(
    ("raw", "schema", "meant"),
    [
        ("def ", None, "def "),
        ("12", None, 12),
        ("12", {"type": "integer"}, 12),
        ("12", {"type": "string"}, "12"),
        ("true", {"type": "string"}, "true"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "null"),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("12", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 12),
        ("12", {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Other"}]}, 12),
        ('["a"]', {"type": "array"}, ["a"]),
        ("", {"type": "string"}, ""),
        ("a=b", None, "a=b"),
    ],
)
def test_a_word_means_what_its_parameter_takes(raw: str, schema: dict[str, Any] | None, meant: Any) -> None:
    assert arguments.value(raw, schema) == meant


class Bits(StrEnum):
    FOUR = "4"


class Most(IntEnum):
    ONE = 1


def test_a_word_means_what_a_type_takes_that_has_a_name() -> None:
    def f(bits: Bits, maybe: Bits | None, most: Most, either: Bits | Most) -> None: ...

    schema = signature.input_schema(f)
    meant = [arguments.value("4", schema["properties"][name], schema["$defs"]) for name in schema["properties"]]
    assert meant == ["4", "4", 4, 4]


def test_a_word_of_kwargs_means_what_their_hint_takes() -> None:
    def texts(n: int, **more: str) -> None: ...
    def named(**more: Bits) -> None: ...
    def numbers(**more: int) -> None: ...
    def anything(**more: object) -> None: ...

    words = {"n": "2", "zip": "01234", "flag": "true"}
    assert arguments.meant(words, signature.input_schema(texts)) == {"n": 2, "zip": "01234", "flag": "true"}
    assert arguments.meant({"bits": "4"}, signature.input_schema(named)) == {"bits": "4"}
    assert arguments.meant({"bits": "4"}, signature.input_schema(numbers)) == {"bits": 4}
    assert arguments.meant({"bits": "4"}, signature.input_schema(anything)) == {"bits": 4}


@given(st.text())
def test_text_is_never_lost_where_text_is_taken(raw: str) -> None:
    assert arguments.value(raw, {"type": "string"}) == raw
    if not arguments.ambiguous(raw):
        assert arguments.value(raw, None) == raw


def test_split() -> None:
    assert arguments.split(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for word in ("a", "=1"):
        with pytest.raises(InvalidArgument, match="not key=value"):
            arguments.split([word])


@pytest.mark.parametrize("text", ["{", "[1]", "3", '"a"'])
def test_a_document_is_an_object(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--args"):
        arguments.document(text)

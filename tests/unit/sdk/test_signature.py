"""From hints to a call's JSON Schema and kind."""

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from enum import Enum, Flag, IntEnum, StrEnum
from typing import Annotated, Any, Literal, TypedDict, Unpack, cast

import jsonschema_rs
import pytest
import typing_extensions
from pydantic import BaseModel, Field

from sllm import signature
from sllm.model import Model
from sllm.transport import encoded
from sllm_runtime.protocol.errors import InvalidArgument, InvalidManifest
from sllm_runtime.worker.arguments import Arguments


@dataclass
class Point:
    x: int
    y: int = 0


class Words(TypedDict, total=False):
    word: str


class Options(BaseModel):
    words: list[str] = []


def plain(text: str, n: Annotated[int, Field(ge=1)] = 1, *, rest: list[Point] | None = None) -> str:
    return text * n


def untyped(a, b=2):  # type: ignore[no-untyped-def]
    return a, b


def open_ended(text: str, **more: Any) -> str:
    return text


def with_model(model: Model, prompt: str) -> Iterator[str]:
    yield prompt


async def awaited(options: Options) -> None: ...


async def yields(model_dump: int = 1, copy: str = "") -> AsyncIterator[int]:
    yield model_dump


def hands_on() -> Iterator[int]:
    return iter([1])


class Stateful:
    def setup(self, model: Model) -> None: ...

    def __call__(self, text: str) -> Iterator[str]:
        yield text


class Plain:
    def __call__(self, text: str) -> str:
        return text


def points(**more: Point) -> int:
    return len(more)


def named_ones(**more: Unpack[Words]) -> int:
    return len(more)


KINDS = [
    (plain, "function", False),
    (untyped, "function", False),
    (open_ended, "function", False),
    (with_model, "generator", True),
    (awaited, "async_function", False),
    (yields, "async_generator", True),
    (hands_on, "function", True),
    (Stateful, "class", True),
    (Plain, "class", False),
]


@pytest.mark.parametrize(("target", "kind", "streams"), KINDS, ids=lambda value: getattr(value, "__name__", None))
def test_kinds(target: Any, kind: str, streams: bool) -> None:
    assert (signature.handler_kind(target), signature.streams(target)) == (kind, streams)


@pytest.mark.parametrize(
    ("target", "right", "wrong"),
    [
        (plain, {"text": "a", "rest": [{"x": 1}]}, {"text": "a", "n": 0}),
        (plain, {"text": "a", "rest": None}, {"text": "a", "rest": [{"y": 1}]}),
        (plain, {"text": "a"}, {}),
        (plain, {"text": "a"}, {"text": "a", "other": 1}),
        (untyped, {"a": {"any": [1]}}, {"b": 1}),
        (open_ended, {"text": "a", "other": 1}, {"other": 1}),
        (with_model, {"prompt": "a"}, {"prompt": "a", "model": "m"}),
        (awaited, {"options": {"words": ["a"]}}, {"options": {"words": [1]}}),
        (yields, {"model_dump": 1, "copy": "a"}, {"model_dump": "a"}),
        (Stateful, {"text": "a"}, {"text": "a", "self": 1}),
        (hands_on, {}, {"a": 1}),
    ],
)
def test_the_schema_takes_what_the_function_takes(target: Any, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    schema = jsonschema_rs.validator_for(signature.input_schema(target))
    assert schema.is_valid(right)
    assert not schema.is_valid(wrong)


def positional(a: int, /) -> None: ...


def many(*values: int) -> None: ...


def takes_a_function(f: Callable[[], object]) -> None: ...


def unresolved(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821


def wraps_itself() -> None: ...


wraps_itself.__wrapped__ = wraps_itself  # type: ignore[attr-defined]


class Silent:
    """Nothing to call, and no JSON."""


def takes_an_array(text: str, x: Silent, n: int = 1) -> None: ...


def takes_more_arrays(text: str, **more: Silent) -> None: ...


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (positional, "'a' is positional only"),
        (many, "'values' is positional only"),
        (takes_a_function, "the type of parameter 'f', .*Callable.*, cannot come as JSON"),
        (takes_an_array, "parameter 'x', .*Silent, cannot come as JSON; .*list for an array"),
        (takes_more_arrays, "the type of further arguments, .*Silent, cannot come as JSON"),
        (unresolved, "type hints cannot be resolved: name 'Nowhere'"),
        (Silent, "class Silent has no __call__ method"),
        (3, "stands on int 3"),
        (wraps_itself, "wraps_itself: wrapper loop .* set its __wrapped__ to itself"),
        (len, "stands on builtin_function_or_method"),
    ],
)
def test_what_cannot_be_called_is_named(target: Any, said: str) -> None:
    with pytest.raises(InvalidManifest, match=said) as found:
        signature.input_schema(target)
    assert "arbitrary_types_allowed" not in found.value.message  # of pydantic's: there is no model_config here


def test_positional_arguments_get_their_names() -> None:
    assert signature.named(plain, ("a", 2), {"rest": None}) == {"text": "a", "n": 2, "rest": None}
    assert signature.named(with_model, ("a",), {}) == {"prompt": "a"}
    assert signature.named(Stateful, ("a",), {}) == {"text": "a"}
    assert signature.named(open_ended, ("a",), {"b": 1}) == {"text": "a", "b": 1}
    for args, kwargs in ((("a", 1, 2), {}), (("a",), {"text": "b"}), ((), {}), (("a",), {"other": 1})):
        with pytest.raises(TypeError):
            signature.named(plain, args, kwargs)


def fills_in(model: Model, **more: Any) -> str:
    return ""


class Open:
    def __call__(self, **more: Any) -> str:
        return ""


@pytest.mark.parametrize(("target", "filled"), [(fills_in, "model"), (Open, "self")])
def test_what_the_platform_fills_in_is_no_further_argument(target: Any, filled: str) -> None:
    schema = jsonschema_rs.validator_for(signature.input_schema(target))
    assert schema.is_valid({"other": 1})
    assert not schema.is_valid({filled: 1})
    assert jsonschema_rs.validator_for(signature.input_schema(open_ended)).is_valid({"text": "", filled: 1})


def test_further_arguments_are_of_the_type_that_is_hinted() -> None:
    checks = jsonschema_rs.validator_for(signature.input_schema(points), offline=True)
    assert checks.is_valid({"a": {"x": 1}, "b": {"x": 2, "y": 3}})
    assert not checks.is_valid({"a": {"x": 1}, "b": 7})
    assert signature.input_schema(open_ended)["additionalProperties"] is True
    assert signature.input_schema(named_ones)["additionalProperties"] is True
    assert signature.input_schema(plain)["additionalProperties"] is False


class Further(typing_extensions.TypedDict, total=False):
    word: str


def named(text: str, **more: typing_extensions.Unpack[Further]) -> int:
    return len(more)


def test_unpack_of_typing_extensions_is_one() -> None:
    """On Python 3.11 another one than typing's, and the one that pydantic's TypedDict has to come with."""
    assert signature.input_schema(named)["additionalProperties"] is True
    assert Arguments(named).parse(b'{"text":"a","word":"b"}') == {"text": "a", "word": "b"}


class Rights(Flag):
    READ = 1
    WRITE = 2


def flagged(rights: Rights) -> int:
    return rights.value


@pytest.mark.parametrize("rights", [Rights.READ, Rights.READ | Rights.WRITE])
def test_flags_come_together(rights: Rights) -> None:
    body = encoded({"rights": rights})
    assert jsonschema_rs.is_valid(signature.input_schema(flagged), json.loads(body))
    assert Arguments(flagged).parse(body) == {"rights": rights}


@pytest.mark.parametrize("value", [float("nan"), [1.0, float("-inf")], {"a": float("inf")}])
def test_a_number_that_is_no_json_is_not_sent_as_text(value: Any) -> None:
    """A function without hints would be given a list of numbers with the text "NaN" among them."""
    with pytest.raises(InvalidArgument, match="x: JSON has no NaN and no infinity"):
        encoded({"x": value})


def test_what_is_no_dict_of_arguments_is_named() -> None:
    with pytest.raises(InvalidArgument, match="a dict of them by name, not 'text'"):
        encoded(cast(Any, "text"))


def test_text_that_reads_as_such_a_number_is_sent() -> None:
    assert json.loads(encoded({"x": ["NaN", "Infinity", 1e300]})) == {"x": ["NaN", "Infinity", 1e300]}


class Colour(Enum):
    A = "a"


class Text(StrEnum):
    A = "a"


class Number(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("hint", "given"),
    [
        (Literal[Text.A, "b", 2, None], "a"),
        (Literal[Number.ONE], 1),
        (dict[Colour, str], {"a": "b"}),
        (dict[int, str], {"1": "b"}),
    ],
)
def test_what_can_be_deployed_can_be_called(hint: Any, given: Any) -> None:
    def function(value: Any) -> None: ...

    function.__annotations__["value"] = hint
    body = {"value": given}
    assert jsonschema_rs.is_valid(signature.input_schema(function), body)
    Arguments(function).parse(json.dumps(body).encode())


class CallsItself:
    def __call__(self, x: int) -> int:
        return x


CallsItself.__call__.__wrapped__ = CallsItself.__call__  # type: ignore[attr-defined]


@pytest.mark.timeout(60)
def test_a_class_whose_call_wraps_itself_is_named_as_well() -> None:
    with pytest.raises(InvalidManifest, match=r"wrapper loop .* set its __wrapped__ to itself"):
        signature.input_schema(CallsItself)


class OfTyping(TypedDict):
    a: int


def takes_a_dict_of_typing(x: OfTyping) -> None: ...


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="a TypedDict of typing is as good there")
def test_what_pydantic_knows_to_do_about_a_type_is_said() -> None:
    """TypedDict is what is asked for, and what was given: on Python 3.11 it has to be another module's."""
    with pytest.raises(InvalidManifest, match=r"typing_extensions\.TypedDict"):
        signature.input_schema(takes_a_dict_of_typing)

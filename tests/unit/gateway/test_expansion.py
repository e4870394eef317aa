"""What a schema asks for is known before it is asked."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sllm_gateway.arguments import CHECKS, EXPLAINED, Arguments
from sllm_gateway.expansion import DEPTH, MOST, Expansion, expansion, extent
from sllm_runtime.protocol.errors import InvalidArgument, InvalidManifest
from sllm_runtime.protocol.limits import MIB
from tests.fixtures.memory import growth


def doubled(times: int, last: Any = None) -> dict[str, Any]:
    """A schema of so many lines that applies ``last`` 2 ** times."""
    defs = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n - 1}"}] * 2} for n in range(1, times + 1)}
    return {"$ref": f"#/$defs/a{times}", "$defs": {**defs, "a0": last or {"type": "object"}}}


TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}},
            "additionalProperties": False,
        }
    },
}


def applied(schema: Any, part: Any, value: Any) -> int:
    """How many schemas are applied to ``value`` and what is in it by who looks at all that ``part`` names."""
    if not isinstance(part, dict):
        return 1
    same = [*part.get("allOf", ()), *part.get("anyOf", ())]
    if "$ref" in part:
        same.append(schema["$defs"][part["$ref"].rpartition("/")[2]])
    count = 1 + sum(applied(schema, each, value) for each in same)
    if isinstance(value, dict):
        for key, inner in value.items():
            mine = part.get("properties", {})
            wanted = [mine[key]] if key in mine else [part[word] for word in ("additionalProperties",) if word in part]
            count += sum(applied(schema, each, inner) for each in wanted)
    if isinstance(value, list):
        wanted = [part[word] for word in ("items", "contains") if word in part]
        count += sum(applied(schema, each, inner) for each in wanted for inner in value)
    return count


def values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values, inner))


def parts(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    named = st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    words = {"allOf": some, "anyOf": some, "properties": named}
    return st.fixed_dictionaries(
        {}, optional={**words, "additionalProperties": inner, "items": inner, "contains": inner}
    )


PARTS = st.recursive(
    st.just({}) | st.just(True) | st.sampled_from("xyz").map(lambda name: {"$ref": f"#/$defs/{name}"}),
    parts,
    max_leaves=4,
)
SCHEMAS = st.builds(
    lambda whole, defs: {"allOf": [whole], "$defs": defs}, PARTS, st.fixed_dictionaries(dict.fromkeys("xyz", PARTS))
)
VALUES = st.recursive(
    st.none(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner), max_leaves=6
)


@given(SCHEMAS, VALUES)
def test_no_more_is_applied_than_was_said(schema: dict[str, Any], value: Any) -> None:
    told = expansion(schema)
    assume(told is not None)
    assert told is not None
    assert extent(value)[0] == values(value) - 1
    assert applied(schema, schema, value) <= told.cost(*extent(value))


def checks(schema: Any) -> tuple[int, ...]:
    told = expansion(schema)
    assert told is not None
    return told.checks


def test_how_often_parts_name_each_other_counts() -> None:
    assert 2**20 < checks(doubled(20))[-1] < 2**24
    assert checks(doubled(40)) == (MOST,)
    tree = checks(TREE)
    assert tree[0] < 10
    assert tree[3] < 5 * tree[0], "a value has one left and one right"
    assert tree[-1] == MOST, "as often as trees lie in trees"
    chain = {f"a{n}": {"$ref": f"#/$defs/a{n - 1}"} for n in range(1, 1000)}
    assert checks({"$ref": "#/$defs/a999", "$defs": {**chain, "a0": {}}}) == (1001,)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/none"},
        {"$ref": "other"},
        {"allOf": [{"$ref": "#"}]},
        {"properties": {"a": {"$dynamicRef": "#a"}}},
        {"items": {"$id": "other", "$ref": "#/$defs/a"}},
        {"unevaluatedProperties": False},
        {"allOf": [{"const": n} for n in range(10_000)]},
    ],
)
async def test_what_cannot_be_told_is_left_to_the_function(schema: dict[str, Any]) -> None:
    assert expansion(schema) is None
    with contextlib.suppress(InvalidManifest):  # what is not whole in itself
        arguments = Arguments(schema)
        arguments.require_bounded()
        assert await arguments.check(b'{"a": 1}') == b'{"a": 1}'


def test_how_deep_values_lie() -> None:
    found = [extent(value) for value in (1, [], {"a": 1}, {"a": [1]}, [[[]], 1])]
    assert found == [(0, 0), (0, 0), (1, 1), (2, 2), (3, 2)]
    nested: list[Any] = []
    for _ in range(1000):
        nested = [nested]
    assert extent(nested) == (DEPTH + 1, DEPTH + 1)


async def test_what_would_take_hours_is_left_to_the_function() -> None:
    refused = {"type": "object", "required": ["x"]}
    with pytest.raises(InvalidArgument, match="not valid"):
        await Arguments(doubled(8, refused)).check(b"")
    exploding = Arguments(doubled(40, refused))
    assert await exploding.check(b"") == b"{}"
    assert await exploding.check(b'{"a": 1}') == b'{"a": 1}'
    with pytest.raises(InvalidArgument, match="JSON object"):
        await exploding.check(b"[]")


async def test_the_more_there_is_the_more_may_be_looked_at() -> None:
    """Many values times many parts is as long as many parts."""
    some = {"properties": {"a": {"items": {"anyOf": [{"const": n} for n in range(1900)]}}}}
    arguments = Arguments(some)
    arguments.require_bounded()
    with pytest.raises(InvalidArgument):
        await arguments.check(b'{"a": [-1]}')
    large = b'{"a": [' + b"-1," * 10_000 + b"-1]}"
    assert await arguments.check(large) is large


def lists(*kinds: str) -> dict[str, Any]:
    return {"anyOf": [{"type": "array", "items": {"type": kind}} for kind in kinds]}


@pytest.mark.parametrize(
    ("of_a", "union"),
    [
        ({"type": "array", "items": {"type": "integer"}}, 0),
        ({"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, 3),
        (lists("integer", "null"), MOST),
    ],
)
async def test_where_it_is_wrong_is_said_where_that_takes_no_time(of_a: Any, union: int) -> None:
    """Of a union all that is wrong by any of its branches would be told."""
    schema = {"properties": {"a": of_a}}
    assert expansion(schema) == Expansion(checks(schema), union)
    arguments = Arguments(schema)
    for count in (10, 2 * EXPLAINED):
        body = b'{"a": [' + b"1," * count + b'"x"]}'
        with pytest.raises(InvalidArgument) as wrong:
            await arguments.check(body)
        says = {0: f"a[{count}]", 3: f"a[{count}]", MOST: "a"}[union]
        assert wrong.value.field == (None if union == MOST and count > 10 else says)


async def test_a_tree_is_checked_as_deep_as_it_is() -> None:
    arguments = Arguments(TREE)
    arguments.require_bounded()
    with pytest.raises(InvalidArgument, match=r"left\.right\.wrong"):
        await arguments.check(b'{"left": {"right": {"wrong": {}}}}')


@pytest.mark.parametrize("whole", [{"$ref": "#/$defs/a30"}, {"properties": {"a": {"$ref": "#/$defs/a30"}}}])
def test_what_takes_too_long_for_one_argument_is_refused(whole: dict[str, Any]) -> None:
    schema = {**whole, "$defs": doubled(30)["$defs"]}
    with pytest.raises(InvalidManifest, match=f"more than {CHECKS} comparisons") as wrong:
        Arguments(schema).require_bounded()
    assert wrong.value.field == "handler.input_schema"


ANY_TEXT = "".join(random.Random(1).choices("ab", k=2**18))
BACK_AND_FORTH = r"^(?:(?:a|aa)+(?!x)b|a*)$"


@pytest.mark.parametrize(
    ("pattern", "text"), [(BACK_AND_FORTH, "a" * 22), (r"^[ab]*a[ab]{3000}$", ANY_TEXT), (r"^\w*a$", "ba" * 2**17)]
)
async def test_what_a_regular_expression_costs_is_bounded(pattern: str, text: str) -> None:
    """One of 22 letters takes 3 ms by the first: a body of 32 MiB an hour in which nothing else runs; the 256 KiB of
    the second text take seconds."""
    arguments = Arguments({"properties": {"a": {"items": {"type": "string", "pattern": pattern}}}})
    arguments.require_bounded()
    body = b'{"a": [' + b", ".join([b'"%b"' % text.encode()] * (2**18 // len(text))) + b"]}"
    began = time.process_time()
    with contextlib.suppress(InvalidArgument):
        await arguments.check(body)
    assert time.process_time() - began < 0.5


async def test_a_plain_regular_expression_is_looked_at_here() -> None:
    arguments = Arguments({"properties": {"a": {"pattern": "^[a-z0-9]{1,61}$"}}, "patternProperties": {"^x": False}})
    for wrong in (b'{"a": "B"}', b'{"x": 1}'):
        with pytest.raises(InvalidArgument):
            await arguments.check(wrong)
    assert await arguments.check(b'{"a": "b"}')


async def test_what_is_wrong_of_a_large_value_is_not_held_many_times() -> None:
    """An error has a copy of the value, and each branch of a union one more: of 4 MiB that took 800 MiB."""
    kinds = [{"properties": {"kind": {"const": number}}, "type": "object"} for number in range(50)]
    arguments = Arguments({"properties": {"a": {"anyOf": kinds}}})
    arguments.require_bounded()
    with growth() as grown, pytest.raises(InvalidArgument):
        await arguments.check(b'{"a": "%b"}' % (b"b" * 2**23))
    assert grown.nbytes < 200 * MIB


async def test_what_is_wrong_and_nested_deeply_is_the_callers_doing() -> None:
    arguments = Arguments({"properties": {"a": {"items": {"type": "integer"}}}})
    with pytest.raises(InvalidArgument):
        await arguments.check(b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}")

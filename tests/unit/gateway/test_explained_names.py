"""What is wrong of a union's branch has the value once for each name that lacks, or once: that has to have room."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sllm_gateway.arguments import EXPLAINED_BYTES, Arguments
from sllm_gateway.expansion import expansion
from sllm_runtime.protocol.errors import InvalidArgument
from tests.fixtures.memory import growth

NAMES = [f"p{number}" for number in range(300)]
PROPERTIES = {name: {"type": "string"} for name in NAMES}
MODEL: dict[str, Any] = {"type": "object", "properties": PROPERTIES, "required": NAMES}
SCHEMA = {"type": "object", "properties": {"x": {"anyOf": [MODEL, {"type": "null"}]}}, "required": ["x"]}


NEVER: dict[str, Any] = {"type": "object", "properties": {"x": {"anyOf": [False] * 300}}, "required": ["x"]}
"""A branch that is ``false`` says so of the value as any other does."""


@pytest.mark.parametrize("schema", [SCHEMA, NEVER])
def test_of_what_nothing_fits_no_more_is_told_than_has_room(schema: dict[str, Any]) -> None:
    body = json.dumps({"x": {"junk": "a" * 1_300_000}}).encode()
    arguments = Arguments(schema)
    with growth() as grown, pytest.raises(InvalidArgument):
        arguments.check_now(body)
    assert grown.nbytes < 30 * EXPLAINED_BYTES, f"{grown.nbytes >> 20} MiB"


def test_a_name_that_lacks_counts_where_it_is_told_of() -> None:
    told, plain = expansion(SCHEMA), expansion(MODEL)
    assert told is not None
    assert told.copies(1) > len(NAMES)
    assert plain is not None
    assert plain.copies() == 1, "of what is no union the first alone is told"

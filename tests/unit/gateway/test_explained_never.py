"""A branch that is ``false`` says so of the value as any other does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sllm_gateway.arguments import EXPLAINED_BYTES, Arguments
from sllm_runtime.protocol.errors import InvalidArgument
from tests.fixtures.memory import growth

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"anyOf": [False] * 300}}, "required": ["x"]}


def test_of_branches_that_nothing_fits_no_more_is_told_than_has_room() -> None:
    body = json.dumps({"x": {"junk": "a" * 1_300_000}}).encode()
    arguments = Arguments(SCHEMA)
    with growth() as grown, pytest.raises(InvalidArgument):
        arguments.check_now(body)
    assert grown.nbytes < 30 * EXPLAINED_BYTES, f"{grown.nbytes >> 20} MiB"

"""What is wrong is told of a body of an ordinary size, whatever unions the function's types have."""

from __future__ import annotations

import json

import pytest

from sllm.signature import input_schema
from sllm_gateway.arguments import Arguments
from sllm_runtime.protocol.errors import InvalidArgument


def answer(prompt: str, tags: list[str] | None = None, n: int = 1) -> str:
    return prompt


@pytest.mark.parametrize("size", [500, 2_000, 100_000])
async def test_which_argument_is_wrong_is_told_beside_an_optional_list(size: int) -> None:
    with pytest.raises(InvalidArgument) as wrong:
        await Arguments(input_schema(answer)).check(json.dumps({"prompt": "a" * size, "n": "x"}).encode())
    assert wrong.value.field == "n"

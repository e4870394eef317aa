"""Completes Python source with the demo model."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from sllm import Model, model_function


@model_function(model="model", cpu=1, memory="1GiB", keep_alive="10s")
def coder(
    model: Model,
    prompt: Annotated[str, Field(min_length=1)] = "def ",
    max_tokens: Annotated[int, Field(ge=1, le=2047)] = 128,
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0,
    seed: int | None = None,
) -> Iterator[str]:
    """Goes on from `prompt` as CPython's standard library would; streams pieces of text. Temperature 0 is greedy."""
    yield from model.generate(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)

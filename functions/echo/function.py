"""The smallest function: arguments in, one JSON value out."""

from typing import Annotated

from pydantic import Field

from sllm import model_function


@model_function(memory="256MiB")
def echo(text: str, times: Annotated[int, Field(ge=1, le=1000)] = 1) -> dict[str, str | int]:
    """Answers `text`, repeated, and its length in characters."""
    said = " ".join([text] * times)
    return {"text": said, "length": len(said)}

"""A function: its typed parameters are a call's arguments, what it returns is the answer."""

from sllm import model_function


@model_function(memory="256MiB")
def hello(name: str = "world") -> str:
    """Greets `name`."""
    return f"Hello, {name}!"

"""Goes on until it has all its tokens, whatever they are: for models of random weights."""

from collections.abc import Iterator

from sllm import Model, model_function


@model_function(model="model", cpu=1, memory="2GiB")
def unending(model: Model, prompt: str, max_tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """Pieces of text."""
    yield from model.generate(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)

"""Text from a language model, piece by piece as it is generated."""

from collections.abc import Iterator

from sllm import Model, model_function


# A directory in Hugging Face layout beside this file, or "hf://org/name@revision", or "s3://bucket/prefix".
@model_function(model="model", memory="2GiB", keep_alive="5m")
def chat(model: Model, prompt: str, max_tokens: int = 256, temperature: float = 0.7) -> Iterator[str]:
    """Answers `prompt`. The OpenAI routes serve the same model under this function's name."""
    messages = [{"role": "user", "content": prompt}]
    yield from model.generate(messages, max_tokens=max_tokens, temperature=temperature)

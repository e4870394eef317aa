"""Sentence vectors from an encoder: a class that is set up once, a model that generates nothing."""

from typing import Annotated

from pydantic import Field

from sllm import Model, model_function

MAX_TOKENS = 256
Texts = Annotated[list[str], Field(min_length=1, max_length=256)]


@model_function(model="model", cpu=1, memory="1GiB")
class Embed:
    """Unit vectors for texts: the mean of the encoder's last hidden states."""

    def setup(self, model: Model) -> None:
        self.module = model.module.eval()
        self.tokenizer = model.tokenizer

    def __call__(self, texts: Texts) -> list[list[float]]:
        """One vector of 128 floats and length 1 for each text; texts are cut at 256 tokens."""
        import torch

        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            hidden = self.module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (hidden.float() * mask).sum(1) / mask.sum(1).clamp(min=1)
        vectors: list[list[float]] = torch.nn.functional.normalize(mean, dim=-1).tolist()
        return vectors

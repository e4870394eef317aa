"""Greedy generation with transformers alone: what the peers run, and what ours is compared with."""

from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Greedy:
    """A model loaded as its documentation says. One thread, as the platform gives an instance with ``cpu=1``."""

    def __init__(self, directory: str) -> None:
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").train(False)

    def stream(self, prompt: str, count: int) -> Iterator[str]:
        """Up to ``count`` pieces of text, one per token."""
        ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        cache = None
        with torch.inference_mode():
            for _ in range(count):
                out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
                yield str(self.tokenizer.decode(ids[0]))

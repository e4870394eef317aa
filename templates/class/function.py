"""A class: `setup` prepares an instance once, `__call__` answers each call."""

from sllm import Model, model_function


# Any transformers model that is no language model: an encoder, a classifier. Leave `model` out if there is none.
@model_function(model="model", engine=False, memory="2GiB")
class Classify:
    """The likeliest label of a text."""

    def setup(self, model: Model) -> None:
        self.module = model.module.eval()
        self.tokenizer = model.tokenizer

    def __call__(self, text: str) -> dict[str, str | float]:
        """The label and its probability."""
        import torch

        inputs = self.tokenizer(text, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            chances = self.module(**inputs).logits[0].float().softmax(-1)
        best = int(chances.argmax())
        return {"label": self.module.config.id2label[best], "probability": float(chances[best])}

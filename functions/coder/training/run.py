"""One run of a recipe: the model, its optimiser, how far it is, and the file that carries them between processes."""

import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from functions.coder.training.corpus import Corpus

log = logging.getLogger("coder")


@dataclass(frozen=True)
class Recipe:
    """All that decides the weights, besides the corpus and the libraries. Each field is an option of the script."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 704
    positions: int = 2048
    seq: int = 512  # tokens per example
    batch: int = 2  # examples per step
    steps: int = 4000
    warmup: int = 200  # first steps
    decay: int = 1200  # last steps
    peak_lr: float = 2e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    bf16: int = 1  # 1: autocast to bf16, master weights stay float32
    threads: int = 2
    seed: int = 20241
    checkpoint_every: int = 200  # steps


@dataclass
class Progress:
    """What a checkpoint carries besides model and optimiser."""

    step: int = 0
    seconds: float = 0.0
    loss: float = math.nan  # nats per token, moving average over about 50 steps


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh float32 model. Its random state is that of torch's default generator."""
    config = LlamaConfig(
        vocab_size=recipe.vocab,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # 1.2 x the flash kernel on a CPU at these sizes, forward and backward
    # Each layer adds twice to the residual stream: scaled so that its variance does not grow with depth (GPT-2, 2.3).
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_((2 * recipe.layers) ** -0.5)
    return model


def build_optimizer(recipe: Recipe, model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW; vectors (the norms) are not decayed."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.98), fused=True)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Up in a line, level, then down to nothing in a line.

    As good as a cosine at this size, and the level part does not know how long the run will be: a run can be given
    more or fewer `steps` until its decay begins, and stays the run that a fresh start with those steps would be.
    """
    up = (step + 1) / max(1, recipe.warmup)
    down = (recipe.steps - step) / max(1, recipe.decay)
    return recipe.peak_lr * min(1.0, up, down)


def example_starts(recipe: Recipe, tokens: int, step: int) -> list[int]:
    """Where the examples of a step begin: within an epoch each window once, in a new order and phase every epoch."""
    windows = (tokens - 1) // recipe.seq - 1  # one window is spent on the phase
    if windows < 1:
        raise SystemExit(f"corpus of {tokens} tokens is too small for examples of {recipe.seq}")
    starts = []
    for example in range(step * recipe.batch, (step + 1) * recipe.batch):
        epoch, place = divmod(example, windows)
        draw = torch.Generator().manual_seed(recipe.seed + 1 + epoch)
        phase = int(torch.randint(recipe.seq, (1,), generator=draw))
        starts.append(phase + recipe.seq * int(torch.randperm(windows, generator=draw)[place]))
    return starts


def batch_loss(recipe: Recipe, model: LlamaForCausalLM, ids: torch.Tensor, starts: list[int]) -> torch.Tensor:
    """Mean next-token loss in nats of the windows at `starts`; scalar."""
    windows = torch.stack([ids[start : start + recipe.seq + 1] for start in starts])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(recipe.bf16)):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def held_out_loss(recipe: Recipe, model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Mean loss in nats per token over the whole windows of the held-out files."""
    starts = list(range(0, len(ids) - recipe.seq - 1, recipe.seq))
    if not starts:
        return math.nan
    with torch.no_grad():
        losses = [float(batch_loss(recipe, model, ids, [start])) for start in starts]
    return sum(losses) / len(losses)


class Run:
    """Model, optimiser and progress, and the one file they are kept in between processes."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, work: Path) -> None:
        self.model = build_model(recipe, tokenizer)
        self.optimizer = build_optimizer(recipe, self.model)
        self.progress = Progress()
        self.path = work / "checkpoint.pt"
        self.recipe = recipe
        self.key = json.dumps([asdict(recipe) | {"steps": None}, corpus.digest], sort_keys=True)
        if self.path.exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self.path, weights_only=True)
        if state["key"] != self.key:
            raise SystemExit(f"{self.path} belongs to another recipe or corpus: remove it, or give another --work")
        decaying = state["progress"]["step"] > min(state["steps"], self.recipe.steps) - self.recipe.decay
        if decaying and state["steps"] != self.recipe.steps:
            raise SystemExit(f"{self.path} is past the level part of its {state['steps']} steps: give --steps that")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        log.info("going on from step %d of %s", self.progress.step, self.path)

    def save(self) -> None:
        """Atomic: a run killed while it saves goes on from the checkpoint before."""
        state = {
            "key": self.key,
            "steps": self.recipe.steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)

"""Trains the demo encoder: which end of a piece of source belongs to which beginning (InfoNCE over a batch of pairs).

    python -m functions.embed.train --out functions/embed/model

Corpus and tokenizer are those of the model `coder`. One seed, a fixed number of steps and threads: the same
interpreter, libraries and kind of CPU give the same bytes. It takes about five minutes, so it keeps no checkpoint.
"""

import argparse
import hashlib
import json
import logging
import platform
import re
import sysconfig
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy, normalize
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from functions.coder.training.corpus import read_sources, sources_digest, train_tokenizer
from functions.coder.training.publish import tidy_tokenizer_config

log = logging.getLogger("embed")

PIECE = re.compile(r"^(?=(?:async def|def|class|    def) )", re.MULTILINE)
HELD_OUT = 256  # pairs that are never trained on
CARD = Path(__file__).with_name("card.md")
Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Recipe:
    """All that decides the weights, besides the corpus and the libraries. Each field is an option of the script."""

    vocab: int = 4096
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    intermediate: int = 256
    positions: int = 256
    head: int = 32  # tokens of a piece's beginning
    tail: int = 64  # tokens of its end
    batch: int = 64  # pairs
    steps: int = 600
    warmup: int = 50
    peak_lr: float = 2e-3
    temperature: float = 0.07
    threads: int = 2
    seed: int = 20242


def pairs_of(tokenizer: PreTrainedTokenizerFast, texts: list[str], recipe: Recipe) -> list[Pair]:
    """Beginning and end, as token ids, of each function or class that is long enough to have both."""
    pieces = [piece for text in texts for piece in PIECE.split(text)]
    rows = tokenizer(pieces)["input_ids"]
    shortest = 2 * recipe.head
    return [(row[: recipe.head], row[recipe.head :][-recipe.tail :]) for row in rows if len(row) >= shortest]


def padded(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, int64 [rows, longest]."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def vectors(model: BertModel, rows: list[list[int]], pad: int) -> torch.Tensor:
    """Unit vectors [rows, hidden]: the mean of the last hidden states."""
    ids, mask = padded(rows, pad)
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weight = mask.unsqueeze(-1)
    return normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


def similarities(model: BertModel, pairs: list[Pair], pad: int) -> torch.Tensor:
    """Cosine of each beginning with each end, [pairs, pairs]; the right ones stand on the diagonal."""
    heads = vectors(model, [head for head, _ in pairs], pad)
    return heads @ vectors(model, [tail for _, tail in pairs], pad).T


def build_model(recipe: Recipe, pad: int) -> BertModel:
    torch.manual_seed(recipe.seed)
    return BertModel(
        BertConfig(
            vocab_size=recipe.vocab,
            hidden_size=recipe.hidden,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            intermediate_size=recipe.intermediate,
            max_position_embeddings=recipe.positions,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=pad,
        )
    )


def train(recipe: Recipe, model: BertModel, pairs: list[Pair], pad: int) -> float:
    """Runs all steps; returns the last step's loss in nats."""
    draw = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak_lr, weight_decay=0.01, fused=True)
    loss = torch.tensor(0.0)
    for step in range(recipe.steps):
        rate = min((step + 1) / max(1, recipe.warmup), (recipe.steps - step) / recipe.steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_lr * rate
        chosen = torch.randint(len(pairs), (recipe.batch,), generator=draw).tolist()
        scores = similarities(model, [pairs[i] for i in chosen], pad) / recipe.temperature
        loss = cross_entropy(scores, torch.arange(recipe.batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            log.info("step %d/%d loss %.3f", step + 1, recipe.steps, float(loss.detach()))
    return float(loss.detach())


def right(model: BertModel, pairs: list[Pair], pad: int) -> float:
    """Share of beginnings whose own end is the nearest of all ends."""
    with torch.no_grad():
        nearest = similarities(model, pairs, pad).argmax(1)
    return float((nearest == torch.arange(len(pairs))).float().mean())


def export(model: BertModel, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], out: Path) -> None:
    """Writes the Hugging Face directory in bf16; each file appears whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as name:
        made = Path(name)
        model.bfloat16().save_pretrained(made)
        tokenizer.save_pretrained(made, save_jinja_files=False)
        tidy_tokenizer_config(made / "tokenizer_config.json", record["recipe"]["positions"])
        record["weights"] = "sha256:" + hashlib.sha256((made / "model.safetensors").read_bytes()).hexdigest()
        (made / "training.json").write_text(json.dumps(record, indent=2) + "\n")
        (made / "README.md").write_text(CARD.read_text().format_map(record))
        for path in sorted(made.iterdir()):
            path.chmod(0o644)
            path.replace(out / path.name)


def parse() -> tuple[argparse.Namespace, Recipe]:
    parser = argparse.ArgumentParser(description="Train the demo encoder; each field of the recipe is an option.")
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--out", type=Path, required=True, help="the model directory to write")
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = parser.parse_args()
    return options, Recipe(**{field.name: getattr(options, field.name) for field in fields(Recipe)})


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options, recipe = parse()
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    sources = read_sources(options.corpus)
    texts = [text for _, text in sources]
    tokenizer = train_tokenizer(texts, recipe.vocab)
    pad = int(tokenizer.pad_token_id)
    pairs = pairs_of(tokenizer, texts, recipe)
    model = build_model(recipe, pad)
    loss = train(recipe, model, pairs[:-HELD_OUT], pad)
    record: dict[str, Any] = {
        "recipe": asdict(recipe),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "corpus": f"sha256:{sources_digest(sources)}",
        "pairs": len(pairs),
        "held_out": HELD_OUT,
        "loss": round(loss, 4),
        "right": round(right(model, pairs[-HELD_OUT:], pad), 4),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    export(model, tokenizer, record, options.out)
    log.info("wrote %s, loss %s, right %s", options.out, record["loss"], record["right"])


if __name__ == "__main__":
    main()

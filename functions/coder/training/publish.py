"""Writes a run as a Hugging Face directory with its record (`training.json`) and its model card (`README.md`)."""

import hashlib
import json
import math
import platform
import tempfile
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from functions.coder.training.corpus import Corpus
from functions.coder.training.run import Run, held_out_loss

PROMPTS = ("def ", "class Queue:\n    def __init__(self", "import os\n\n\ndef read_file(path):\n")
SAMPLE_TOKENS = 80
CARD = Path(__file__).with_name("card.md")


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """The prompt and what the model greedily makes of it."""
    encoded = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**encoded, max_new_tokens=SAMPLE_TOKENS, do_sample=False)  # type: ignore[misc]
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def record_of(run: Run, corpus: Corpus, weights: Path) -> dict[str, Any]:
    """What went in and what came out. Losses are nats per token; `None` where nothing was held out."""
    recipe, progress = run.recipe, run.progress
    loss = held_out_loss(recipe, run.model, corpus.held_out)
    return {
        "recipe": asdict(recipe),
        "parameters": sum(weight.numel() for weight in run.model.parameters()),
        "corpus": {
            "digest": f"sha256:{corpus.digest}",
            "files": corpus.files,
            "bytes": corpus.nbytes,
            "tokens": len(corpus.train),
            "held_out_tokens": len(corpus.held_out),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "steps": progress.step,
        "tokens": progress.step * recipe.batch * recipe.seq,
        "seconds": round(progress.seconds),
        "train_loss": round(progress.loss, 4),
        "held_out_loss": None if math.isnan(loss) else round(loss, 4),
        "weights": "sha256:" + hashlib.sha256(weights.read_bytes()).hexdigest(),
    }


def card_of(record: dict[str, Any], samples: list[str]) -> str:
    """The model card: card.md with the run's figures and samples filled in."""
    figures = {
        "millions": f"{record['parameters'] / 1e6:.1f}",
        "corpus_files": record["corpus"]["files"],
        "corpus_tokens": f"{record['corpus']['tokens'] / 1e6:.2f}",
        "python": record["versions"]["python"],
        "steps": record["steps"],
        "tokens": f"{record['tokens'] / 1e6:.1f}",
        "minutes": f"{record['seconds'] / 60:.0f}",
        "train_loss": record["train_loss"],
        "held_out_loss": record["held_out_loss"],
        "seq": record["recipe"]["seq"],
        "positions": record["recipe"]["positions"],
        "samples": "\n\n".join(f"```python\n{text.rstrip()}\n```" for text in samples),
    }
    return CARD.read_text().format_map(figures)


def tidy_tokenizer_config(path: Path, positions: int) -> None:
    """Names the class every transformers since 4.0 knows, and the length the model has positions for."""
    config = json.loads(path.read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
    path.write_text(json.dumps(config, indent=2) + "\n")


def export(run: Run, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, out: Path) -> dict[str, Any]:
    """Writes the directory and returns what training.json holds. Each file appears whole or not at all."""
    model = deepcopy(run.model).bfloat16()
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as name:
        made = Path(name)
        model.save_pretrained(made)
        tokenizer.save_pretrained(made, save_jinja_files=False)
        tidy_tokenizer_config(made / "tokenizer_config.json", run.recipe.positions)
        record = record_of(run, corpus, made / "model.safetensors")
        samples = [sample(model, tokenizer, prompt) for prompt in PROMPTS]
        (made / "training.json").write_text(json.dumps(record, indent=2) + "\n")
        (made / "README.md").write_text(card_of(record, samples))
        for path in sorted(made.iterdir()):
            path.chmod(0o644)  # safetensors writes for its owner only
            path.replace(out / path.name)
    return record

"""Trains the demo model `coder` from nothing but the running interpreter's standard library.

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8000000000 \\
    python -m functions.coder.train --work /tmp/coder --out functions/coder/model

(The two variables keep glibc from giving each step's buffers back and faulting them in again: 1.2 x the speed. On a
machine that others use too, OMP_WAIT_POLICY=passive keeps a thread from spinning while the other waits for its core.)

The same Python, torch, transformers, tokenizers, CPU kind and recipe give the same weights, bit for bit: one seed,
a fixed number of steps and threads, and batches that are a function of the step alone. The state is saved
every `checkpoint_every` steps under --work, so a run that broke off goes on from there and ends in the same
weights. `--export` writes the last saved state to --out and stops.

The result is a Hugging Face directory (bf16, tied embeddings, byte-level BPE), with `training.json`, which records what
went in and what came out, and a model card.
"""

import argparse
import logging
import math
import sysconfig
import time
from dataclasses import fields
from pathlib import Path

import torch

from functions.coder.training.corpus import Corpus, build_corpus
from functions.coder.training.publish import export
from functions.coder.training.run import Recipe, Run, batch_loss, example_starts, learning_rate

log = logging.getLogger("coder")


def train_step(run: Run, corpus: Corpus) -> float:
    """One optimiser step; returns its loss in nats per token."""
    recipe, step = run.recipe, run.progress.step
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(recipe, step)
    loss = batch_loss(recipe, run.model, corpus.train, example_starts(recipe, len(corpus.train), step))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), recipe.clip)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def train(run: Run, corpus: Corpus) -> None:
    """Goes on from where the run stands until `recipe.steps`; saves on the way and at the end."""
    recipe, progress = run.recipe, run.progress
    began = time.monotonic() - progress.seconds
    while progress.step < recipe.steps:
        loss = train_step(run, corpus)
        progress.loss = loss if math.isnan(progress.loss) else 0.98 * progress.loss + 0.02 * loss
        progress.step += 1
        progress.seconds = time.monotonic() - began
        if progress.step % 10 == 0:
            rate = progress.step * recipe.batch * recipe.seq / progress.seconds
            log.info("step %d/%d loss %.3f %.0f tok/s", progress.step, recipe.steps, progress.loss, rate)
        if progress.step % recipe.checkpoint_every == 0 or progress.step == recipe.steps:
            run.save()


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Recipe]:
    parser = argparse.ArgumentParser(description="Train the demo model; each field of the recipe is an option.")
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--work", type=Path, required=True, help="where the run keeps its checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the model directory to write")
    parser.add_argument("--export", action="store_true", help="write the last checkpoint to --out and stop")
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = parser.parse_args(arguments)
    return options, Recipe(**{field.name: getattr(options, field.name) for field in fields(Recipe)})


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options, recipe = parse(arguments)
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer, corpus = build_corpus(options.corpus, recipe.vocab)
    log.info("corpus of %d files, %d tokens, sha256 %s", corpus.files, len(corpus.train), corpus.digest[:16])
    torch.manual_seed(recipe.seed)
    run = Run(recipe, tokenizer, corpus, options.work)
    if not options.export:
        train(run, corpus)
    record = export(run, tokenizer, corpus, options.out)
    log.info("wrote %s, loss %s, held out %s", options.out, record["train_loss"], record["held_out_loss"])


if __name__ == "__main__":
    main()

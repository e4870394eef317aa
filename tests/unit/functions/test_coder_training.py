"""How the demo model is made: the same bytes twice, also when a run breaks off."""

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functions.coder.train import main, train, train_step
from functions.coder.training.corpus import Corpus, build_corpus, read_sources
from functions.coder.training.run import Recipe, Run, example_starts, learning_rate

ROOT = Path(__file__).parents[3]
TINY = Recipe(
    vocab=300, hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32, positions=64, seq=16, batch=2,
    steps=6, warmup=2, decay=2, threads=1, checkpoint_every=100,
)  # fmt: skip
SOURCE = "def add(a, b):\n    return a + b\n\n\nclass Thing:\n    size = 3\n"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A standard library of three files and things that are no part of the corpus."""
    root = tmp_path / "lib"
    for name in ("a.py", "json/b.py", "z.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(SOURCE * 20)
    for name in ("test/t.py", "site-packages/s.py", "json/tests/u.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("nothing to learn here\n")
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    return root


def start(recipe: Recipe, library: Path, work: Path) -> tuple[Run, Corpus]:
    work.mkdir(exist_ok=True)
    tokenizer, corpus = build_corpus(library, recipe.vocab)
    torch.manual_seed(recipe.seed)
    return Run(recipe, tokenizer, corpus, work), corpus


def weights(run: Run) -> list[torch.Tensor]:
    return list(run.model.state_dict().values())


def test_corpus_is_the_sources_in_order_without_tests_and_other_encodings(library: Path) -> None:
    assert [name for name, _ in read_sources(library)] == ["a.py", "json/b.py", "z.py"]


def test_directory_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"no Python source under {tmp_path}"):
        read_sources(tmp_path)


@pytest.fixture
def own_modes() -> Iterator[None]:
    """What the script sets for its whole process is set back."""
    threads, uninitialized = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = uninitialized  # type: ignore[attr-defined]


@pytest.mark.usefixtures("own_modes")
def test_script_gives_the_same_bytes_twice(library: Path, tmp_path: Path) -> None:
    """Once as a process, once in one that has done other things before."""
    recipe = "--vocab 300 --hidden 16 --layers 1 --heads 2 --kv-heads 1 --intermediate 32 --positions 128 --seq 16"

    def arguments(name: str) -> list[str]:
        options = ["--corpus", library, "--work", tmp_path / f"{name}-work", "--out", tmp_path / name]
        return [*map(str, options), *recipe.split(), "--steps", "3", "--threads", "1"]

    argv = [sys.executable, "-m", "functions.coder.train", *arguments("one")]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, timeout=100)
    main(arguments("two"))
    one, two = (json.loads((tmp_path / name / "training.json").read_text()) for name in ("one", "two"))
    assert one["weights"] == two["weights"]
    assert one["corpus"] == two["corpus"]
    assert one["steps"] == 3
    assert math.isfinite(one["train_loss"])


def advance(run: Run, corpus: Corpus, steps: int) -> None:
    for _ in range(steps):
        train_step(run, corpus)
        run.progress.step += 1


def test_run_that_broke_off_ends_in_the_same_weights(library: Path, tmp_path: Path) -> None:
    whole, corpus = start(TINY, library, tmp_path / "whole")
    train(whole, corpus)
    broken, _ = start(TINY, library, tmp_path / "broken")
    advance(broken, corpus, 3)
    broken.save()
    advance(broken, corpus, 1)  # lost when it dies
    again, _ = start(TINY, library, tmp_path / "broken")
    assert again.progress.step == 3
    train(again, corpus)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(again), strict=True))


def test_run_can_be_lengthened_until_its_decay_begins(library: Path, tmp_path: Path) -> None:
    short, corpus = start(TINY, library, tmp_path)
    advance(short, corpus, TINY.steps - TINY.decay)
    short.save()
    longer, _ = start(replace(TINY, steps=9), library, tmp_path)
    assert longer.progress.step == 4
    advance(short, corpus, 1)
    short.save()
    with pytest.raises(SystemExit, match="past the level part of its 6 steps"):
        start(replace(TINY, steps=9), library, tmp_path)


def test_checkpoint_of_another_recipe_is_refused(library: Path, tmp_path: Path) -> None:
    start(TINY, library, tmp_path)[0].save()
    with pytest.raises(SystemExit, match="belongs to another recipe or corpus"):
        start(replace(TINY, seed=1), library, tmp_path)


def test_learning_lowers_the_loss(library: Path, tmp_path: Path) -> None:
    run, corpus = start(replace(TINY, steps=40), library, tmp_path)
    first = train_step(run, corpus)
    advance(run, corpus, 38)
    assert train_step(run, corpus) < 0.7 * first


@given(st.integers(10, 500), st.integers(0, 50), st.integers(0, 50))
def test_rate_never_exceeds_its_peak_and_ends_near_nothing(steps: int, warmup: int, decay: int) -> None:
    recipe = Recipe(steps=steps, warmup=warmup, decay=decay)
    rates = [learning_rate(recipe, step) for step in range(steps)]
    assert all(0 < rate <= recipe.peak_lr for rate in rates)
    assert decay == 0 or rates[-1] <= 1.001 * recipe.peak_lr / decay


@given(st.integers(100, 3000), st.integers(4, 32), st.integers(1, 4))
def test_an_epoch_shows_each_window_once(tokens: int, seq: int, batch: int) -> None:
    recipe = Recipe(seq=seq, batch=batch)
    windows = (tokens - 1) // seq - 1
    starts = [s for step in range(-(-windows // batch)) for s in example_starts(recipe, tokens, step)][:windows]
    assert all(start >= 0 and start + seq + 1 <= tokens for start in starts)
    assert Counter(start // seq for start in starts).most_common(1)[0][1] == 1
    assert len({start % seq for start in starts}) == 1


def test_corpus_smaller_than_an_example_is_refused() -> None:
    with pytest.raises(SystemExit, match="corpus of 20 tokens is too small"):
        example_starts(Recipe(seq=16), 20, 0)

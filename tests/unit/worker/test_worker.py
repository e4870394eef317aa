from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.worker.harness import Worker, bundle_of, manifest


def test_a_generator_streams_tokens_of_a_model(
    worker: Worker, loader: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    source = "def fn(model, prompt: str, n: int = 8):\n    yield from model.generate(prompt, max_tokens=n)\n"
    worker.start(
        manifest(kind="generator", streams=True, model="m", engine=True),
        bundle_of({"user.py": source}),
        workdir=tmp_path,
        session=loader.grant(models("llama")),
    )
    answer = worker.run({"prompt": "def f"})
    assert answer.end is not None
    assert answer.end.error is None
    assert len(answer.outputs) == 8
    assert answer.end.usage is not None
    assert (answer.end.usage.prompt, answer.end.usage.completion) == (5, 8)

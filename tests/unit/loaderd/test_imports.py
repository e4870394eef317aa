"""What is imported where: the daemon and its clients stay light, or they would start slowly and be big."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "boto3", "huggingface_hub", "safetensors", "nats")


@pytest.mark.parametrize("module", ["sllm_loaderd.__main__", "sllm_loaderd.client", "sllm_loaderd.commands"])
def test_importing_it_brings_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"

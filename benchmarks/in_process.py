"""The worker's engine without a platform around it: ``python -m benchmarks.in_process MODEL``.

For every line ``{"prompt", "max_tokens"}`` answers ``{"first_ms", "text"}``: from the call of ``generate`` to its first
piece of text. One thread, as an instance with ``cpu=1`` has.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from sllm_runtime.worker.engine.choice import Settings, choose_engine
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.handle import ModelHandle
from sllm_runtime.worker.model import start_engine
from sllm_runtime.worker.tokens import Tokens


def main() -> None:
    """Until stdin ends."""
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    module: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    module.eval()
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix == ".json"}
    config = json.loads(files["config.json"])
    with tempfile.TemporaryDirectory(prefix="bi-") as name:
        settings = Settings(kv_bytes=256 * 2**20)

        def engine() -> tuple[EngineLoop, Tokens]:
            return start_engine(lambda: choose_engine(module, files, config, settings), files)

        handle = ModelHandle(lambda: module, files, Path(name), engine)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            began, first, pieces = time.perf_counter(), 0.0, []
            for piece in handle.generate(asked["prompt"], max_tokens=asked["max_tokens"], temperature=0.0):
                first = first or time.perf_counter()
                pieces.append(piece)
            print(json.dumps({"first_ms": (first - began) * 1e3, "text": "".join(pieces)}), flush=True)
        handle.close()


if __name__ == "__main__":
    main()

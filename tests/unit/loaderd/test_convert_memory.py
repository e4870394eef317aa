"""Conversion streams: what it holds does not grow with the model. In a process with a limit on its data."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sllm_loaderd.verify import validate_checkpoint
from sllm_runtime.protocol.limits import MIB

LIMITED = """
import resource, sys
from pathlib import Path
import numpy, torch
from sllm_loaderd.convert import convert_directory
from sllm_loaderd.convert.torch_files import TorchSource
from sllm_loaderd.convert.gguf.source import GgufSource

source, target, room = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
lines = Path("/proc/self/status").read_text().splitlines()
data = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data + room if room else int(sys.argv[4]), -1))
convert_directory(source, target)
"""
WAIT = 110


def convert_within(source: Path, target: Path, *, room: int = 0, limit: int = 0, give_up_s: float = WAIT) -> None:
    """Convert with `room` bytes of private writable memory more than the imports take, or with `limit` in all."""
    command = [sys.executable, "-c", LIMITED, str(source), str(target), str(room), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=give_up_s, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def sparse_safetensors(path: Path, nbytes: int) -> None:
    """Four tensors of zeros that take no space."""
    part = nbytes // 4
    header = {f"layers.{n}.w": {"dtype": "BF16", "shape": [part // 2], "data_offsets": [n * part, (n + 1) * part]}
              for n in range(4)}  # fmt: skip
    raw = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + 4 * part)


def torch_file(path: Path, nbytes: int) -> None:
    """A matrix, and the same storage turned, of which no copy may be made as a whole."""
    base = torch.zeros(nbytes // 4096, 1024)
    torch.save({"a": base, "turned": base.t()}, path / "pytorch_model.bin")


@pytest.mark.parametrize("make", [sparse_safetensors, torch_file])
def test_a_model_is_never_in_memory_as_a_whole(make: Callable[[Path, int], None], tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    make(tmp_path / "source", 160 * MIB)
    convert_within(tmp_path / "source", tmp_path / "checkpoint", room=80 * MIB)
    assert validate_checkpoint(tmp_path / "checkpoint").index.nbytes >= 160 * MIB


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_gigabytes_convert_with_512_mib_of_data(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    sparse_safetensors(tmp_path / "source", 4096 * MIB)
    convert_within(tmp_path / "source", tmp_path / "checkpoint", limit=512 * MIB, give_up_s=850)
    assert (tmp_path / "checkpoint" / "partition_0.bin").stat().st_size == 4096 * MIB
    shutil.rmtree(tmp_path / "checkpoint")

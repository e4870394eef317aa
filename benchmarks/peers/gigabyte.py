"""The synthetic model in a plain script: ``gigabyte.py DIRECTORY STEP``; prints the same digest."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

tensors = load_file(Path(sys.argv[1]) / "model.safetensors")
total = 0
for number in range(len(tensors)):
    tensor = tensors[f"tensors.{number}"].view(torch.int16).flatten()[:: int(sys.argv[2])]
    total += (number + 1) * int(tensor.sum(dtype=torch.int64))
print(json.dumps({"piece": str(total)}), flush=True)
print(json.dumps({"done": True}), flush=True)
sys.stdin.read()  # until somebody has looked what it has used

"""``load_torch.py mmap|read``: torch.load of ``pytorch_model.bin``."""

import sys
from typing import Any

import torch
from loading import Loaded, all_of, serve


def load(order: dict[str, Any]) -> Loaded:
    file = order["directory"] + "/pytorch_model.bin"
    return all_of(torch.load(file, weights_only=True, mmap=sys.argv[1] == "mmap"))


serve(load)

"""``load_safetensors.py load_file|safe_open``: safetensors' own two ways."""

import sys
from typing import Any

from loading import Loaded, all_of, serve
from safetensors import safe_open
from safetensors.torch import load_file


def load(order: dict[str, Any]) -> Loaded:
    path = order["directory"] + "/" + order["file"]
    if sys.argv[1] == "load_file":
        return all_of(load_file(path, device=order.get("device", "cpu")))
    with safe_open(path, framework="pt", device=order.get("device", "cpu")) as file:
        return all_of({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - it is no mapping


serve(load)

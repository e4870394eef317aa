"""instanttensor: made for GPUs; says what it says where there is none."""

from typing import Any

from instanttensor import safe_open
from loading import Loaded, all_of, serve


def load(order: dict[str, Any]) -> Loaded:
    with safe_open(
        order["directory"] + "/model.safetensors", framework="pt", device=order.get("device", "cpu")
    ) as file:
        return all_of({name: tensor.clone() for name, tensor in file.tensors()})


serve(load)

"""fastsafetensors: its loader for one process (no GPUDirect storage)."""

from typing import Any

from fastsafetensors import SafeTensorsFileLoader, SingleGroup
from loading import Loaded, serve


def load(order: dict[str, Any]) -> Loaded:
    loader = SafeTensorsFileLoader(SingleGroup(), order.get("device", "cpu"), nogds=True)
    loader.add_filenames({0: [order["directory"] + "/model.safetensors"]})
    buffers = loader.copy_files_to_device()
    order["keep"] = (loader, buffers)  # its tensors are views of these
    tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    return tensors, list(tensors.values())


serve(load)

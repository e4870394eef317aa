"""runai-model-streamer: tensors as they come; they are views of its buffers, so each is copied, as its loaders do."""

from typing import Any

from loading import Loaded, all_of, serve
from runai_model_streamer import SafetensorsStreamer


def load(order: dict[str, Any]) -> Loaded:
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(order["directory"] + "/model.safetensors")
        return all_of({name: _own(tensor, order) for name, tensor in streamer.get_tensors()})


def _own(tensor: Any, order: dict[str, Any]) -> Any:
    return tensor.to(order["device"]) if "device" in order else tensor.clone()


serve(load)

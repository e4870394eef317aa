"""tensorizer: its deserializer into memory, of the file ``load_forms.py`` made."""

from typing import Any

from loading import Loaded, all_of, serve
from tensorizer import TensorDeserializer


def load(order: dict[str, Any]) -> Loaded:
    loader = TensorDeserializer(order["directory"] + "/model.tensors", device="cpu", lazy_load=False)
    return all_of(dict(loader.items()))


serve(load)

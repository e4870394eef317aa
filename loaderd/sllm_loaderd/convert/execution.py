"""In which order a model uses its tensors, by what is cheapest to ask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sllm_loaderd.convert.families import known_plan
from sllm_loaderd.convert.module_plan import ModulePlan

_CONFIG: Final = "config.json"


def execution_plan(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> ModulePlan | None:
    """The plan for a model directory whose files hold tensors of these ``shapes``; None if its architecture is
    unknown here (no config.json, or one of another library), and then the order of the files has to do."""
    config = directory / _CONFIG
    if not config.is_file():
        return None
    known = known_plan(config.read_bytes(), shapes.keys())
    if known is not None:
        return known
    from sllm_loaderd.convert.module import module_plan  # torch and transformers: seconds of a processor

    return module_plan(directory, shapes)

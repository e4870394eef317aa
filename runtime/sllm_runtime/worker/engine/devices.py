"""Devices that compute nothing more for their process: an illegal access, a device-side assert or an ECC error that
cannot be corrected stays in its context, and every later call raises it again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sllm_runtime.protocol.errors import InstanceLost


def ask(device: torch.device) -> None:
    """Raises where ``device`` computes nothing more for this process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def why_broken(device: torch.device, asked: Callable[[], None]) -> str:
    """What keeps it from computing more, if ``asked`` raises; else nothing."""
    try:
        asked()
    except Exception as error:
        return f"{device} computes nothing more in this process: {str(error).partition(chr(10))[0]}"
    return ""


def lost(why: str, error: Exception) -> InstanceLost:
    """What ends this process, where a step raised ``error`` and its device is broken."""
    return InstanceLost(f"{why}; a step failed before: {type(error).__name__}")

"""Our client: grant before, then session, load, bind, all blocks ready. Runs in the project's own environment."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loading import PAGE, Loaded, serve

from sllm_loaderd.client import LoaderControl, LoaderSession
from sllm_loaderd.devices.tensors import bind

DEADLINE_S = 120.0


def prepare(order: dict[str, Any]) -> Callable[[], Loaded]:
    """The sandbox's connection, which an invoker makes before the worker wants it; ends with this process.

    ``populated``: nothing is left to do, the tensors are there and every page of them was read.
    """
    fd = asyncio.run(_grant(order))
    if not order.get("populated"):
        return lambda: _load(fd, order)
    loaded = _load(fd, order)
    for part in loaded[1]:
        part.reshape(-1).view(torch.uint8)[::PAGE].sum()
    return lambda: loaded


async def _grant(order: dict[str, Any]) -> int:
    pidfd = os.pidfd_open(os.getpid())
    try:
        async with LoaderControl(Path(order["socket"])) as control:
            return await control.grant(f"b{os.getpid()}", order["model"], pidfd=pidfd)
    finally:
        os.close(pidfd)


def _load(fd: int, order: dict[str, Any]) -> Loaded:
    session = LoaderSession(fd)
    loading = session.load(device=order.get("device", "cpu"))
    tensors = bind(loading, DEADLINE_S)
    loading.wait_all(DEADLINE_S)
    return tensors, [tensors[record.name] for record in loading.index().tensors]


if __name__ == "__main__":
    serve(lambda prepared: prepared(), prepare)

"""Our client: grant before, then session, load, bind, all blocks ready. Runs in the project's own environment.

``load_ours.py [peft]``: peft is imported for orders that go ``into`` its modules.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loading import Loaded, read, serve

from sllm_loaderd.client import LoaderControl, LoaderSession
from sllm_loaderd.client.cuda_driver import import_driver
from sllm_loaderd.devices.tensors import bind
from sllm_runtime.platform import descriptors

if "peft" in sys.argv[1:]:
    import load_peft

DEADLINE_S = 120.0


def prepare(order: dict[str, Any]) -> Callable[[], Loaded]:
    """The sandbox's connection, which an invoker makes before the worker wants it; ends with this process.

    ``populated``: nothing is left to do, the tensors are there and every byte of them was read. ``adapter``: that one
    is loaded, beside ``model``, for which the sandbox is. ``into``: and put into the modules of peft.
    """
    # A worker has it before it has threads, which those of CUDA are here: then it takes 10 ms.
    descriptors.make_room(descriptors.OF_WORKER)
    fd = asyncio.run(_grant(order))
    if order.get("into"):
        base = load_peft.base_of(order["into"])
        return lambda: load_peft.fill(base, order["into"], _load(fd, order)[0])
    if not order.get("populated"):
        return lambda: _load(fd, order)
    loaded = _load(fd, order)
    read(loaded[1])  # all of it: one byte a page would leave a part of what is read next in the processor's caches
    return lambda: loaded


def before(order: dict[str, Any]) -> None:
    """The base model that an adapter goes into is there before, and what a worker's fork server has imported."""
    if order.get("device", "").startswith("cuda"):
        import_driver()
    if order.get("into"):
        load_peft.base_of(order["into"])


async def _grant(order: dict[str, Any]) -> int:
    pidfd = os.pidfd_open(os.getpid())
    try:
        async with LoaderControl(Path(order["socket"])) as control:
            adapters = [order["adapter"]] if "adapter" in order else []
            return await control.grant(f"b{os.getpid()}", order["model"], adapters=adapters, pidfd=pidfd)
    finally:
        os.close(pidfd)


def _load(fd: int, order: dict[str, Any]) -> Loaded:
    session = LoaderSession(fd)
    loading = session.load(device=order.get("device", "cpu"), adapter=order.get("adapter", ""))
    tensors = bind(loading, DEADLINE_S)
    loading.wait_all(DEADLINE_S)
    return tensors, [tensors[record.name] for record in loading.index().tensors]


if __name__ == "__main__":
    serve(lambda prepared: prepared(), prepare, before)

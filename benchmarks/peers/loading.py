"""What the programs that load a checkpoint share: imports are made once, each load has a process of its own.

A program says ``{"ready": true}``, then answers each line of JSON on stdin. For one it forks; the child loads and then
reads one byte of each page of each tensor (``read_all``: every byte), so that what was only mapped is there too. Both
are in ``seconds``; the loading alone is ``loaded_s``. CPU seconds, page faults and peak memory are those of the child.
"""

import gc
import hashlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

PAGE = 4096
Loaded = tuple[Mapping[str, torch.Tensor], Sequence[torch.Tensor]]
"""Tensors by the source's names, and those that hold all bytes once."""

_PRACTICE = [torch.zeros(PAGE, dtype=torch.uint8) for _ in range(1000)]
"""Read before the time begins, by all alike."""


def serve(
    load: Callable[[Any], Loaded],
    prepare: Callable[[dict[str, Any]], Any] = lambda order: order,
    before: Callable[[dict[str, Any]], None] = lambda order: None,
) -> None:
    """Answer orders until stdin ends. ``prepare`` is not in the time; what it returns is what ``load`` gets. ``before``
    is called before the fork: what it leaves behind is there for all later loads."""
    torch.set_num_threads(1)
    _say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        before(order)
        gc.collect()
        gc.freeze()  # a collection in the child would write to every object, and so copy every page, of its parent
        child = os.fork()
        if child == 0:
            _child(load, prepare, order)
        _, status = os.waitpid(child, 0)
        if status:
            _say({"error": f"the loading process ended with status {status}"})


def _child(load: Callable[[Any], Loaded], prepare: Callable[[dict[str, Any]], Any], order: dict[str, Any]) -> None:
    """Load, say what it took, end. What goes wrong is said too."""
    try:
        if (device := order.get("device", "cpu")).startswith("cuda"):
            torch.zeros(1, device=device)  # its context is there before, for all alike
        _say(_measure(load, prepare(order), order))
    except BaseException as error:
        traceback.print_exc()
        _say({"error": f"{type(error).__name__}: {error}"[:500]})
    finally:
        sys.stderr.flush()
        os._exit(0)


def _measure(load: Callable[[Any], Loaded], prepared: Any, order: dict[str, Any]) -> dict[str, Any]:
    if order.get("read_all"):
        read(_PRACTICE)  # a forked child's first calls copy the interpreter's pages, which is not the tensors' time
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    tensors, parts = load(prepared)
    if order.get("device", "cpu").startswith("cuda"):
        torch.cuda.synchronize()
    loaded = time.perf_counter()
    at_load = resource.getrusage(resource.RUSAGE_SELF)
    touched = read(parts) if order.get("read_all") else _touch(parts)
    ended = time.perf_counter()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "began": began,
        "seconds": ended - began,
        "loaded_s": loaded - began,
        "cpu_s": _cpu(after) - _cpu(before),
        "loaded_cpu_s": _cpu(at_load) - _cpu(before),
        "minor_faults": after.ru_minflt - before.ru_minflt,
        "major_faults": after.ru_majflt - before.ru_majflt,
        "touch_faults": after.ru_minflt + after.ru_majflt - at_load.ru_minflt - at_load.ru_majflt,
        "peak_rss_mib": after.ru_maxrss / 1024,
        "touched": touched,
        "digest": _digest(tensors, order["names"]) if "names" in order else "",
    }


def _cpu(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def _touch(parts: Sequence[torch.Tensor]) -> int:
    """The sum of one byte of each page's worth of every tensor."""
    return sum(int(part.reshape(-1).view(torch.uint8)[::PAGE].sum(dtype=torch.int64)) for part in parts if part.numel())


def read(parts: Sequence[torch.Tensor]) -> int:
    """The sum of all bytes, as numbers of eight of them, and of what is left over at an end."""
    total = 0
    for part in parts:
        data = part.reshape(-1).view(torch.uint8)
        whole = data.numel() // 8 * 8
        total += int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum(dtype=torch.int64))
    return total


def _digest(tensors: Mapping[str, torch.Tensor], names_file: str) -> str:
    """SHA-256 over names and bytes, in the order of the source's list."""
    made = hashlib.sha256()
    with open(names_file) as file:
        names = json.load(file)
    for name in names:
        made.update(name.encode())
        made.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def all_of(tensors: Mapping[str, torch.Tensor]) -> Loaded:
    """For those whose tensors share no memory."""
    return tensors, list(tensors.values())


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()

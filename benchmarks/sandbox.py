"""``python -m benchmarks.sandbox``: what it costs to run a function in a container.

- ``start``: from the wish for a sandbox to a function in it that is ready, by each kind of sandbox alone, with no
  platform around it. The function is ``functions/echo``, its bundle is at hand, it has no model. ``take_ms`` of that
  passes until there is a worker that has said hello, ``limits_ms`` until it has its limits, ``worker_ms`` until the
  function is ready. ``bare process``: a Python is started that imports what a worker imports. ``warm process pool``: a
  worker that the fork server has forked waits. ``cold container``: only the image is there. ``created, not started``:
  the engine's `create` is done. ``paused``: a worker waits in a container that the engine has paused. ``warm container
  pool``: a worker waits in a container. Engines that do not work here are listed with what they said.
- ``call``, measured with ``start``: from a call's being sent to its end, at the worker's socket; median of forty.
- ``idle``, measured with ``start``: milliseconds of CPU that a warm container's processes use in a second while they
  wait: what pausing would save.
- ``demo``: ``functions/coder`` as in ``cold_start``'s ``warm_pool``, through two whole platforms in turn, of which one
  runs its functions in containers: request to first token at the client, nothing of the function running, pools full,
  weights in memory. The texts are compared.
- ``relay``: a stream of a token each 10 ms out of a container: from the moment it was made to its arrival, median of
  each stream, behind the invoker (at NATS, beside the gateway) and at an HTTP client; and what lies below that: at the
  worker's socket with no platform, and over NATS alone, published by who observes it.
- ``memory``: ten functions in containers with one model of 1 GB (256 MiB with ``--quick``), each of which has read
  every byte: PSS of the mappings of weights, of the ten workers and of loaderd together; and what else each has. Ten
  others in each round.

CPU seconds beside ``start`` are those of the sandbox and of all that made it, also before somebody asked; the memory
there and beside ``call`` and ``idle`` is the sandbox's. Beside ``demo`` and ``relay`` they are the platform's (podman's
containers are below it, docker's are not and missing), and at the worker's socket this benchmark's own.

Kinds take turns, and each round begins with another one. The page cache holds all files; nobody else runs but what is
measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import sandbox_platform, sandbox_starts
from benchmarks.runner import Run, main

CASES: Final = ("start", *sandbox_platform.CASES)


def measure(run: Run, cases: Sequence[str]) -> None:
    """Each kind by itself, then what needs a platform."""
    with tempfile.TemporaryDirectory(prefix="bx-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        if "start" in cases:
            with run.attempt("start"):
                sandbox_starts.measure(run, directory)
        if wanted := [case for case in sandbox_platform.CASES if case in cases]:
            sandbox_platform.measure(run, directory, wanted)


if __name__ == "__main__":
    sys.exit(main("sandbox", CASES, measure))

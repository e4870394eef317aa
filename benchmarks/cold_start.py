"""``python -m benchmarks.cold_start``: from a request to its first token when nothing of the function runs.

The function is ``functions/coder`` (7 M parameters, engine-backed, one thread), its prompt ``def ``, eight tokens,
greedy. Every time runs from before the request's first byte is sent, over a connection that is open, to the first
event with text at the client; the stages are those of the call's timeline. Systems take turns, and each round begins
with another one. Unless a case says otherwise the page cache holds all files, and nobody else runs but the systems
themselves, which are idle.

- ``warm_pool``: no instance of the function; the pool is full (two sandboxes); its weights are in the node's memory.
  Samples beyond the rounds give p99. Beside it in the same rounds: ``plain script`` (python starts, imports,
  from_pretrained, first token), ``ray serve`` with min_replicas=0 and no replica, ``bentoml``, which outside its
  makers' cloud does not scale to zero: its server is started for the call.
- ``pool_empty``: the fork server was killed just before the request, so nothing is imported anywhere; beside it
  ``bare import``, the start of a python that imports torch and what else a start with our engine needs of others' code,
  with the garbage collector at rest, as in the fork server. A node starts a fork server that ended the first time again
  at once. Judged only in a run that measures ``warm_pool`` too; if the difference is far below zero, the reference is
  wrong and the aim missed.
- ``pool_none``: a platform without a warm pool (SLLM_POOL_SIZE=0); the fork server runs.
- ``twenty``: twenty functions at once, each with no instance, two sandboxes in the pool; to the last one's first token.
- ``gigabyte``: a model of 1 GiB whose first token depends on every tensor. Not in memory (the loader was told to drop
  it), its file out of the page cache (proven by mincore) and read past that just before, for all alike. Beside it the
  disk's limits as in ``load``, of which the fastest counts, and ``plain script`` (safetensors, its own file as cold).
- ``platform``: from the start of ``sllm up`` until a function without a model, deployed on it, has answered; Ray and
  Serve with the same function beside it. ``ready_s``: until it said that it is ready, its warm pool not yet full.

The text of every system is compared with the first; another one is an error.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import cold_cases, cold_gigabyte
from benchmarks.runner import Run, main

CASES: Final = ("warm_pool", "twenty", "pool_empty", "pool_none", "gigabyte", "platform")


def measure(run: Run, cases: Sequence[str]) -> None:
    """Each case with a platform of its own kind."""
    with tempfile.TemporaryDirectory(prefix="bc-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        pooled = [case for case in cases if case in cold_cases.WITH_POOL]
        if pooled:
            cold_cases.with_pool(run, directory, pooled)
        for case, unit, work in (
            ("pool_empty", "ms", cold_cases.pool_empty),
            ("pool_none", "ms", cold_cases.without_pool),
            ("gigabyte", "ms", cold_gigabyte.measure),
            ("platform", "s", cold_cases.platform),
        ):
            if case in cases:
                with run.attempt(case, unit):
                    work(run, directory)


if __name__ == "__main__":
    sys.exit(main("cold_start", CASES, measure))

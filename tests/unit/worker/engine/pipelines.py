"""Pipelines whose stages behind the head are processes of their own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from sllm_runtime.worker.engine.ours.edge import Edges, dtype_name
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.numerics import EXACT, GPU_EXACT
from sllm_runtime.worker.engine.ours.pipeline.head import Pipeline
from sllm_runtime.worker.engine.ours.scheduler import Limits
from tests.fixtures.engine_parts import KV_BYTES, PATIENCE_S
from tests.fixtures.nursery import Nursery
from tests.unit.worker.engine import stand_in
from tests.unit.worker.engine.driver import decoder, names_of
from tests.unit.worker.engine.stand_in import RowByRow


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """As between nodes, with buffers that hold little."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
    for each in (one, two):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    return one, two


@dataclass
class Made:
    """A pipeline: its engine, and the processes of the stages behind the head."""

    core: OurEngine
    pipeline: Pipeline
    pids: list[int]
    logits: list[torch.Tensor] = field(default_factory=list)


@contextlib.contextmanager
def stages(
    nursery: Nursery, name: str, *cuts: int, depth: int | None = None, dtype: torch.dtype = torch.float32,
    limits: Limits | None = None, tcp: bool = False, pipes: tuple[int, ...] = (), kv: int = KV_BYTES,
    stage: Mapping[str, Any] | None = None, accelerated: bool = False,
) -> Iterator[Made]:  # fmt: skip
    """Stages at ``cuts``, the first here. ``pipes``: that layers of the last one come through; ``stage``: what it is
    told beside or in place of the rest; ``accelerated``: as GPUs have them, but over tensors on the CPU."""
    borders = list(pairwise(cuts))
    pairs = [tcp_pair() if tcp else socket.socketpair() for _ in borders]
    pids = []
    try:
        for number, (low, high) in enumerate(borders[1:], 1):
            fds = [pairs[number - 1][1].fileno(), pairs[number][0].fileno()]
            asked = {"model": name, "low": low, "high": high, "dtype": dtype_name(dtype), "accelerated": accelerated}
            if number == len(borders) - 1:
                fds += pipes
                asked |= stage or {}
            pids.append(nursery.fork("tests.fixtures.engine_parts:stage", fds, **asked))
        edges = Edges(pairs[-1][1], pairs[0][0], patience_s=PATIENCE_S)
        for before, behind in pairs:
            if behind is not pairs[-1][1]:
                behind.close()
            if before is not pairs[0][0]:
                before.close()
        limits = limits or Limits()
        made = stand_in.decoder(name, dtype, RowByRow()) if accelerated else decoder(name, dtype)
        level = GPU_EXACT if accelerated else EXACT
        pipeline = Pipeline(
            made, level, cuts[1], edges, depth=depth or len(borders), kv_bytes=kv, fingerprint="same", limits=limits,
            names=names_of(name, 0, cuts[1], dtype),
        )  # fmt: skip
        with contextlib.closing(pipeline):
            core = OurEngine(made, frozenset(), level, kv, proven=True, limits=limits, runner=pipeline)
            yield Made(core, pipeline, pids)
    finally:
        for pair in pairs:
            for each in pair:
                each.close()

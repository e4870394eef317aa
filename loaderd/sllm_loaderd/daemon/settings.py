"""The daemon's settings: command line over environment, read once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from sllm_loaderd.pipeline import Pipeline
from sllm_runtime.platform.control_groups import memory
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol.limits import CHUNK_BYTES
from sllm_runtime.protocol.quantities import Bytes, show_bytes


def _half_of_memory(known: dict[str, Any]) -> int:
    return (known.get("memory") or memory()) // 2


class LoaderSettings(Settings):
    """Sizes are bytes."""

    node: str = Field(min_length=1)
    data: Path
    """Models, cache and records; one loaderd at a time."""
    socket: Path
    """The control socket, made with mode 0600."""
    chunk_bytes: int = Field(CHUNK_BYTES, ge=4096, le=2**30, multiple_of=4096)
    memory: Bytes | None = Field(None, gt=0)
    """Of the node, as its invoker is told (``SLLM_MEMORY``), which offers what the pool leaves of it; None: the
    machine's."""
    pool_bytes: int = Field(default_factory=_half_of_memory, gt=0)
    """Most memory for chunks."""
    prefault_bytes: int | None = Field(None, ge=0)
    """Free chunks kept with their pages in place; None: what the largest model needs that is not in memory."""
    huge_pages: bool = True
    """Chunks have pages of 2 MiB where the kernel gives them; as root, it is set to do so."""
    ssd_bytes: int | None = Field(None, ge=0)
    """Most bytes for copies of remote models below ``data``; None: half of what the disk has for them, 0: no copies."""
    peer_listen: str = ""
    """``host:port`` at which this node's models are served to the other nodes; empty: they are not."""
    peer_token: str = Field("", repr=False)
    """What the nodes of a cluster sign what they ask each other with; no flag, since everybody reads command lines."""
    io_threads: int = Field(4, ge=1, le=64)
    """Threads that read the disk: reads in flight, one chunk each."""
    remote_threads: int = Field(8, ge=1, le=64)
    """Threads, and so connections, for each remote path."""
    bulk: bool = True
    direct: bool = True
    pinned: bool = True
    overlap: bool = True
    """Parts of the pipeline: see ``Pipeline``. Off only to show what each is worth."""
    integrity: bool = True
    """Each chunk's digest is compared while it is loaded. Off: a disk or a network that damages bytes goes unseen."""
    fake_devices: str = ""
    """``4x2GiB@8GB/s``: devices in shared memory behind links of that bandwidth, called ``fake:0`` …; empty: none."""
    cuda_devices: str = ""
    """``all`` or the numbers of GPUs (``0,2``), called ``cuda:0`` …; empty: none, and CUDA is not imported."""
    convert: Literal["now", "later", "never"] = "now"
    """When safetensors are converted, unless a registration says it. The same on all nodes of a cluster."""
    conversions: int = Field(1, ge=1, le=16)
    """Conversions at a time; others wait, with all that they fetch on this machine."""
    listing_timeout: float = Field(120.0, gt=0)
    """Seconds within which a remote source says what it has, when a model is registered."""

    @field_validator("pool_bytes")
    @classmethod
    def _leaves_some(cls, pool: int, known: ValidationInfo) -> int:
        has = known.data.get("memory") or memory()
        if pool >= has:
            raise ValueError(
                f"{show_bytes(pool)} of the {show_bytes(has)} that this node has (SLLM_MEMORY) leave no function any"
            )
        return pool

    @property
    def pipeline(self) -> Pipeline:
        """Which parts of it are on."""
        return Pipeline(self.bulk, self.direct, self.io_threads, self.pinned, self.overlap, self.integrity)


_FLAGS = (
    "node", "data", "socket", "chunk_bytes", "pool_bytes", "prefault_bytes", "huge_pages", "ssd_bytes", "peer_listen",
    "io_threads", "remote_threads", "convert", "conversions", "listing_timeout", "bulk", "direct", "pinned", "overlap",
    "integrity", "fake_devices", "cuda_devices",
)  # fmt: skip


def read_settings(arguments: Sequence[str] | None = None) -> LoaderSettings:
    """Settings from the command line (``--pool-bytes N`` …) over ``SLLM_*``. Raises ``InvalidRequest``."""
    parser = argparse.ArgumentParser(prog="python -m sllm_loaderd", description="The model loader of one node.")
    for name in _FLAGS:
        parser.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS)
    return LoaderSettings.load(**vars(parser.parse_args(arguments)))

"""What ``@model_function`` takes: the manifest's fields as typed keyword arguments, so that editors complete them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from sllm_runtime.protocol.manifest import Dtype

Size = int | str
"""Bytes, or text as ``"2GiB"``."""
Duration = float | str
"""Seconds, or text as ``"5m"``."""


class Options(TypedDict, total=False):
    """Keyword arguments of ``@model_function``; see ``sllm_runtime.protocol.manifest.Manifest`` for meanings."""

    name: str
    description: str
    model: str
    adapters: Mapping[str, str]
    model_loader: Literal["auto", "causal_lm", "build"]
    engine: bool
    gpu: str | Sequence[str] | None
    gpu_memory: Size
    cpu: float
    memory: Size
    labels: Mapping[str, str]
    parallelism: Mapping[str, int]
    dtype: Dtype
    keep_alive: Duration
    """Or ``"load-time"``."""
    min_instances: int
    max_instances: int
    concurrency: int
    timeout: Duration
    idle_timeout: Duration
    startup_timeout: Duration
    queue_timeout: Duration
    max_queue: int
    retries: int
    resumable: bool
    priority: int
    slo: Mapping[str, Duration]
    network: bool
    env: Mapping[str, str]
    secrets: Sequence[str]
    requirements: Sequence[str]
    image: str
    include: Sequence[str]
    """Further files of the bundle (patterns relative to the function's file); not part of the manifest."""

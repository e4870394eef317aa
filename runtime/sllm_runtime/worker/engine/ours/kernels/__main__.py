"""Compile the kernels for this processor, unless they are there: ``python -m …engine.ours.kernels``."""

from __future__ import annotations

import logging

from sllm_runtime.worker.engine.ours.kernels.loaded import kernels

logging.basicConfig(format="kernels: %(message)s")
kernels()

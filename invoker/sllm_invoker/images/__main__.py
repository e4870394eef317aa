"""``python -m sllm_invoker.images``: one layer as a tar stream on stdout, or the layers' digests as JSON. A process of
its own, so that reading a gigabyte takes nothing from a node's calls."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from sllm_invoker.images import archive, base, contents, requirements
from sllm_invoker.images.compiled import compiled
from sllm_invoker.images.entries import Layer
from sllm_runtime.protocol.errors import SllmError

_COMPILE_S: Final = 300.0


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="What a base image of this machine holds.")
    parser.add_argument("what", choices=("digests", "system", "ours", "requirements"))
    parser.add_argument("requirements", nargs="*", help="what pip is to lay over the base")
    options = parser.parse_args()
    what = options.what
    if what in ("digests", "ours"):
        _compile_kernels()
    if what == "digests":
        sys.stdout.buffer.write(msgspec.json.encode(contents.digests()) + b"\n")
    elif what == "system":
        archive.write(contents.system(), sys.stdout.buffer)
    else:
        with tempfile.TemporaryDirectory(prefix="sllm-image-") as scratch:
            layer = _ours(Path(scratch)) if what == "ours" else requirements.layer(options.requirements, Path(scratch))
            archive.write(layer, sys.stdout.buffer)
    return 0


def _compile_kernels() -> None:
    """Of the engine, which become part of ours: a container's root is read-only. Where it cannot be done a worker says
    so and tries it itself."""
    subprocess.run([sys.executable, "-m", "sllm_runtime.worker.engine.ours.kernels"], timeout=_COMPILE_S, check=False)


def _ours(scratch: Path) -> Layer:
    layer = contents.ours()
    return replace(layer, files=compiled(layer.files, scratch))


def run() -> int:
    """``main``, with an error of ours as one JSON document on stderr."""
    try:
        return main()
    except SllmError as error:
        sys.stderr.buffer.write(msgspec.json.encode(error.body()))
        return base.REFUSED


if __name__ == "__main__":
    sys.exit(run())

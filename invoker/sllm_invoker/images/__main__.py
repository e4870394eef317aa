"""``python -m sllm_invoker.images``: one layer as a tar stream on stdout, or the layers' digests as JSON. A process of
its own, so that reading a gigabyte takes nothing from a node's calls."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec

from sllm_invoker.images import archive, contents
from sllm_invoker.images.compiled import compiled


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="What a base image of this machine holds.")
    parser.add_argument("what", choices=("digests", "system", "ours"))
    what = parser.parse_args().what
    if what == "digests":
        sys.stdout.buffer.write(msgspec.json.encode(contents.digests()) + b"\n")
    elif what == "system":
        archive.write(contents.system(), sys.stdout.buffer)
    else:
        with tempfile.TemporaryDirectory(prefix="sllm-image-") as scratch:
            layer = contents.ours()
            layer = replace(layer, files=compiled(layer.files, Path(scratch)))
            archive.write(layer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main())

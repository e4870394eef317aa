"""Try the engines of this machine as a node would (``probe``): says which one runs containers and how, or why none."""

from __future__ import annotations

import asyncio
import sys

from sllm_invoker.containers import probe
from sllm_runtime.protocol.errors import Unavailable


def main() -> int:
    """0: one works."""
    try:
        engine = asyncio.run(probe.find())
    except Unavailable as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    sys.stdout.write(f"{' '.join((engine.kind, *engine.options))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

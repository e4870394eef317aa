"""What every nats-server of ours is told, wherever it runs: limits, and what an acknowledgement means.

python -m sllm_runtime.platform.nats_settings STORE BYTES     as a file that a configuration includes
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from sllm_runtime.protocol.limits import MIB

MEMORY_LIMIT: Final = 256 * MIB
LIMITS: Final[dict[str, Any]] = {
    "max_payload": MIB,
    "max_control_line": 4096,
    "max_pending": 64 * MIB,
    "write_deadline": "10s",
    # A client that a link has silently dropped is gone in as long as it takes to find that out itself (``connection``);
    # by default it would be a subscriber for up to six minutes, and be asked in its turn.
    "ping_interval": "5s",
    "ping_max": 2,
}


def jetstream(store: str, most: int) -> dict[str, Any]:
    """Streams in the directory ``store``, of ``most`` bytes in all."""
    return {
        "store_dir": store,
        "max_memory_store": MEMORY_LIMIT,
        "max_file_store": most,
        # What is acknowledged is on the disk, also when the machine loses its power. Streams that need no such promise
        # say so (``platform/streams.py``).
        "sync_interval": "always",
    }


def main(arguments: list[str]) -> int:
    """The command line above. The exit status."""
    match arguments:
        case [store, most] if most.isdecimal():
            sys.stdout.write(json.dumps({**LIMITS, "jetstream": jetstream(store, int(most))}, indent=1) + "\n")
        case _:
            sys.stderr.write((__doc__ or "") + "\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

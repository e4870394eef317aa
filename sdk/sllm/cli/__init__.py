"""The ``sllm`` command. Results on stdout, everything else on stderr; ``--json`` for programs."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit; Ctrl-C counts from here, and is answered when no import is under way."""
    try:
        from sllm.cli import ctrl_c

        ctrl_c.prepare()
        from sllm.cli.main import main as run

        try:
            run()
        finally:
            ctrl_c.leave()
    except KeyboardInterrupt:
        sys.exit(130)

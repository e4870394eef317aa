"""`python -m sllm_loaderd --node ID --data DIR --socket PATH`: the loader daemon of one node."""

from __future__ import annotations

import functools
import sys

from sllm_loaderd.daemon.server import run
from sllm_loaderd.daemon.settings import read_settings
from sllm_runtime.platform.daemon import run_daemon
from sllm_runtime.platform.process import step_back
from sllm_runtime.platform.telemetry import configure_logging
from sllm_runtime.protocol.errors import InvalidRequest


def main() -> int:
    """Exit status: 0 stopped as asked, 1 an error, 2 wrong settings."""
    try:
        settings = read_settings()
    except InvalidRequest as error:
        sys.stderr.write(f"sllm-loaderd: {error.message}\n")
        return error.exit_code
    step_back()
    configure_logging("loaderd", settings.node, settings)
    return run_daemon(functools.partial(run, settings), title=f"sllm-loaderd {settings.node}")


if __name__ == "__main__":
    sys.exit(main())

"""`python -m sllm_loaderd --node ID --data DIR --socket PATH`: the loader daemon of one node."""

from __future__ import annotations

import functools
import logging
import sys

from sllm_loaderd.daemon.server import run
from sllm_loaderd.daemon.settings import read_settings
from sllm_runtime.platform.daemon import run_daemon
from sllm_runtime.protocol.errors import InvalidRequest


def main() -> int:
    """Exit status: 0 stopped as asked, 1 an error, 2 wrong settings."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = read_settings()
    except InvalidRequest as error:
        logging.error("%s", error)
        return error.exit_code
    return run_daemon(functools.partial(run, settings), title=f"sllm-loaderd {settings.node}")


if __name__ == "__main__":
    sys.exit(main())

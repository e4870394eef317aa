"""A worker with nothing around it: ``python -m benchmarks.bare_worker --fd N`` imports what a worker needs and speaks
to whoever holds the other end of socket N."""

from __future__ import annotations

import argparse
import os
import socket

from sllm_runtime.platform.process import die_with_parent
from sllm_runtime.worker.imports import preload

if __name__ == "__main__":
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    sock = socket.socket(fileno=parser.parse_args().fd)
    import_s = preload()  # before anything that imports numpy: it says that there is to be one thread
    from sllm_runtime.worker.main import main

    os._exit(main(sock, import_s))

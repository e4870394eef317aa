"""``make demo``: ends with what started it, and at a Ctrl-C, from its first moment on; then it does the main job.

What is imported here is light: importing the job takes a second, in which ``make`` may be killed.
"""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path

INTERRUPTED = 130
"""Exit status."""


def main() -> None:
    """Leaves with exit status 0 done, 1 failed or orphaned, 130 interrupted."""
    started_by = os.getppid()
    # Nothing is begun yet that would have to be stopped.
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from sllm_runtime.platform.process import PARENT, die_with_parent

    # Make's shell knows whose child it was, also if that has died since: it must be our parent still.
    parent = os.environ.pop(PARENT, "")
    die_with_parent(signal.SIGTERM, int(parent) if parent else started_by)
    runpy.run_path(str(Path(__file__).with_name("main_job.py")), run_name="__main__")


if __name__ == "__main__":
    main()

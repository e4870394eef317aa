"""A function's secrets as files, each of its own user alone, below the directory of its instance."""

from __future__ import annotations

import os
from pathlib import Path

from sllm_runtime.protocol.secrets import SECRETS_DIR, Secrets


def lay(secrets: Secrets, directory: Path) -> None:
    """Make ``directory`` with a file for each of ``secrets``, and tell the function of it. None: nothing is made."""
    if not secrets.values:
        os.environ.pop(SECRETS_DIR, None)
        return
    directory.mkdir(mode=0o700)
    for name, value in secrets.values.items():
        with open(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400), "wb") as file:
            file.write(value)
    os.environ[SECRETS_DIR] = str(directory)

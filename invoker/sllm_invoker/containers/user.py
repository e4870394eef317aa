"""Who containers run as."""

from __future__ import annotations

import os
from typing import Final

from sllm_invoker.containers.arguments import User
from sllm_invoker.containers.engine import Engine

NOBODY: Final = 65534
PROCESSES: Final = 32768
"""RLIMIT_NPROC counts over all containers of one user: the limit of each is its control group's."""


def user_here(engine: Engine) -> User:
    """Nobody where we are root, else ourselves, since we own the directory that they are given."""
    uid = os.geteuid()
    if uid == 0:
        return User(uid=NOBODY, gid=NOBODY)
    return User(uid=uid, gid=os.getegid(), kept=engine.kind == "podman")

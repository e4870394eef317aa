"""Secrets of functions: what they are called, how much they hold, how they travel. Their values stand in no record, no
log, no environment and no command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

SECRET_NAME: Final = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]{0,62}\Z")
"""Also the name of a file."""
MAX_SECRET: Final = 16 * 1024
"""Bytes of a value."""
MAX_SECRETS: Final = 16
"""Of one function: together they fit into one message."""
MAX_STORED: Final = 1000
"""Of a platform."""
SEALING_KEY_BYTES: Final = 32
"""Of the key that secrets in the state are sealed with."""
SECRETS_DIR: Final = "SLLM_SECRETS_DIR"
"""Variable in which a function finds the directory that has a file for each of its secrets."""


def secret_name(value: str) -> str:
    """``value``, checked. Raises ``ValueError``."""
    if not SECRET_NAME.match(value):
        raise ValueError(
            f"{value!a:.80} is no secret's name: letters, digits, '_' and '-', no digit or '-' first, at most 63"
        )
    return value


def secret_names(value: tuple[str, ...]) -> tuple[str, ...]:
    """What a manifest may name. Raises ``ValueError``."""
    if len(value) > MAX_SECRETS:
        raise ValueError(f"{len(value)} secrets are named, at most {MAX_SECRETS} go with a function")
    if len(set(value)) != len(value):
        raise ValueError("a secret is named twice")
    return tuple(secret_name(name) for name in value)


class Secrets(msgspec.Struct, frozen=True):
    """Values by name, as they travel from the controller to a node and from there to a worker."""

    values: Mapping[str, bytes] = {}

    def __repr__(self) -> str:
        return f"Secrets({sorted(self.values)})"

"""Which functions have which secrets. Pure."""

from __future__ import annotations

from collections import defaultdict

from sllm_runtime.control.view import View
from sllm_runtime.protocol.errors import Conflict


def every(view: View) -> dict[str, tuple[str, ...]]:
    """By secret, the functions whose active version names it, or one that is being deployed."""
    found: dict[str, set[str]] = defaultdict(set)
    active = {(name, record.active) for name, record in view.functions.items() if record.active is not None}
    for key in active | view.trials:
        version = view.versions.get(key)
        for secret in version.manifest.secrets if version is not None else ():
            found[secret].add(key[0])
    return {secret: tuple(sorted(names)) for secret, names in found.items()}


def of(view: View, secret: str) -> tuple[str, ...]:
    """The functions that ``every`` has for it."""
    return every(view).get(secret, ())


def unneeded(view: View, secret: str) -> None:
    """Raise ``Conflict`` while an active version could not start without it."""
    names = of(view, secret)
    if names:
        raise Conflict(f"secret {secret} is needed by {', '.join(names)}; deploy these without it first")

"""Which functions have which secrets. Pure."""

from __future__ import annotations

from collections import defaultdict

from sllm_runtime.control.view import View
from sllm_runtime.protocol.errors import Conflict


def every(view: View) -> dict[str, tuple[str, ...]]:
    """By secret, the functions whose active version names it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, record in sorted(view.functions.items()):
        version = view.versions.get((name, record.active)) if record.active is not None else None
        for secret in version.manifest.secrets if version is not None else ():
            found[secret].append(name)
    return {secret: tuple(names) for secret, names in found.items()}


def of(view: View, secret: str) -> tuple[str, ...]:
    """The functions whose active version names it."""
    return every(view).get(secret, ())


def unneeded(view: View, secret: str) -> None:
    """Raise ``Conflict`` while an active version could not start without it."""
    names = of(view, secret)
    if names:
        raise Conflict(f"secret {secret} is needed by {', '.join(names)}; deploy these without it first")

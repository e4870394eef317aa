"""An engine's own images: what is there, and how one of ours comes to be there. Nothing is fetched from a registry."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from sllm_invoker.images import places
from sllm_runtime.protocol.errors import Unavailable

IMPORT_S: Final = 600.0
"""A gigabyte to a slow disk, which the engine reads, writes and takes digests of."""
BUILD_S: Final = 600.0
KEPT: Final = "168h"
_UNKNOWN: Final = ("image not known", "no such image", "invalid reference format")


class Commands(Protocol):
    """An engine's command line."""

    @property
    def kind(self) -> str:
        """``podman`` or ``docker``."""

    async def command(self, *words: str, data: bytes | None = None, within_s: float = 60.0) -> str:
        """What the command prints. Raises ``Unavailable`` with the engine's last words."""


class Store:
    """The images of one engine, as the user that this process is."""

    def __init__(self, engine: Commands) -> None:
        self._engine = engine

    async def has_image(self, reference: str) -> bool:
        name, _, digest = reference.partition("@")
        if not digest or self._engine.kind != "podman":
            return bool((await self._engine.command("images", "--quiet", reference)).strip())
        # Podman runs what is named by its digest, and lists nothing by that name.
        said = await self._engine.command("images", "--format", "{{.RepoDigests}}", name)
        return any(each.strip("[]").endswith(f"@{digest}") for each in said.split())

    async def identity(self, reference: str) -> str:
        """By the words by which the engine runs it: a list of images has all tags of a name."""
        try:
            said = await self._engine.command("image", "inspect", "--format", "{{.Id}}", reference)
        except Unavailable as error:
            if any(words in error.message.lower() for words in _UNKNOWN):
                return ""
            raise
        return said.strip()

    async def prune(self) -> None:
        """Remove images of ours that are older than KEPT and that no container runs from. Those that somebody has built
        over ours have our label as well, and a name of their own (docker's filter knows no names)."""
        named = ("--filter", f"reference={places.REPOSITORY}-*") if self._engine.kind == "podman" else ()
        filters = ("--filter", f"label={places.LABEL}", "--filter", f"until={KEPT}")
        await self._engine.command("image", "prune", "--all", "--force", *filters, *named, within_s=BUILD_S)

    async def import_image(self, reference: str, archive: Path, changes: Sequence[str]) -> None:
        """An image of one layer: what the tar file ``archive`` holds."""
        words = [word for change in changes for word in ("--change", change)]
        await self._engine.command("import", *words, str(archive), reference, within_s=IMPORT_S)

    async def build_image(self, reference: str, context: Path) -> None:
        """What ``context``'s Containerfile says, with no network."""
        local = ("--pull=never",) if self._engine.kind == "podman" else ()  # docker looks here first by itself
        file = str(context / places.CONTAINERFILE)
        words = ("build", "--quiet", *local, "--network", "none", "--tag", reference, "--file", file, str(context))
        await self._engine.command(*words, within_s=BUILD_S)

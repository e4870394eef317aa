"""The image of a function: the base, the base with what its ``requirements`` add, or one that it names."""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from sllm_invoker.images import places
from sllm_invoker.images.base import LAYER, PRODUCER, Base, Images, Report, alone, describe, write
from sllm_invoker.images.requirements import checked
from sllm_runtime.protocol.errors import ImageFailed, Unavailable

log = logging.getLogger(__name__)

SHORT: Final = "[0-9a-f]{1,11}"
"""Engines show twelve digits of an id, and take any number."""

PIP_S: Final = 900.0


class FunctionImages:
    """Each image is made once for each digest of its contents, and kept by the engine."""

    def __init__(
        self, images: Images, base: Base, scratch: Path, env: Mapping[str, str], producer: Sequence[str] = PRODUCER
    ) -> None:
        """``env``: pip's, with the index settings and proxies of whoever runs this node. It is no image's."""
        self._images, self._base, self._scratch = images, base, scratch
        self._env = dict(env)
        self._producer = tuple(producer)

    async def ensure(self, image: str | None, requirements: Sequence[str], report: Report = lambda _: None) -> str:
        """The image's name. Raises ``ImageFailed`` with pip's last words, or where an image that is named is not in the
        engine's own store; ``Unavailable``."""
        if image is not None:
            return await self._named(image, requirements)
        below = await self._base.ensure(report)
        wanted = checked(requirements)
        if not wanted:
            return below
        digest = hashlib.sha256("\n".join((below, *wanted)).encode()).hexdigest()
        reference = places.reference("function", digest)
        if await self._images.has_image(reference):
            return reference
        async with alone(self._scratch, report):
            if not await self._images.has_image(reference):
                report(f"requirements: {', '.join(wanted)}")
                await self._build(reference, below, wanted)
        return reference

    async def _named(self, image: str, requirements: Sequence[str]) -> str:
        if requirements:
            raise ImageFailed("image and requirements do not go together: install them in the image", field="image")
        # Its name may be another's by the next start. A list has none by its id, and knows what words do not say.
        try:
            found = "" if image.startswith("-") else await self._images.identity(image)
        except Unavailable:
            if await self._images.has_image(image):
                raise
            found = ""
        if found and re.fullmatch(SHORT, image) and not await self._images.has_image(image):
            found = ""  # a name that is not here, and by chance how another image's id begins
        if not found:
            text = f"image {image!a:.200} is not on this node: pull or load it with the node's container engine"
            raise ImageFailed(text, field="image")
        return found

    async def _build(self, reference: str, below: str, wanted: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory(prefix="image-", dir=self._scratch) as scratch:
            context = Path(scratch)
            describe(context, places.over(below, LAYER, "function"))
            await write((*self._producer, "requirements", *wanted), self._env, context / LAYER, PIP_S)
            await self._images.build_image(reference, context)
        log.info("made the image %s: %s", reference, ", ".join(wanted))

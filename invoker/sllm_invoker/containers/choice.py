"""Which driver a node's sandboxes come from: what its settings ask for, and what this machine can do."""

from __future__ import annotations

import ipaddress
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from sllm_invoker import machine
from sllm_invoker.containers import probe
from sllm_invoker.containers.arguments import Owner
from sllm_invoker.containers.driver import ContainerDriver, Sizes
from sllm_invoker.containers.engine import Engine
from sllm_invoker.images.base import Base
from sllm_invoker.images.functions import FunctionImages
from sllm_invoker.images.store import Store
from sllm_invoker.settings import InvokerSettings
from sllm_runtime.protocol.errors import InvalidRequest, Unavailable

log = logging.getLogger(__name__)

COMMAND: Final = ("python", "-m", "sllm_runtime.worker.container")
"""What an image runs: the Python that its PATH leads to."""


def for_development(settings: InvokerSettings) -> bool:
    """Whether the whole cluster is this machine's own, as ``sllm up`` starts it: its NATS is."""
    urls = [url.strip() for url in (settings.nats_url or "").split(",") if url.strip()]
    return all(_is_here(urlsplit(url if "//" in url else f"//{url}").hostname) for url in urls)


def _is_here(host: str | None) -> bool:
    if host is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def engine_for(settings: InvokerSettings, warn: Callable[[str], None] = log.warning) -> Engine | None:
    """The engine that sandboxes run on; ``None``: they are processes. ``warn`` hears where that is less than isolation.

    Raises ``InvalidRequest`` where isolation is required and not asked for, ``Unavailable`` where it cannot be had:
    ``auto`` does without on a machine for development alone.
    """
    wanted = settings.sandbox
    if wanted == "process":
        if settings.require_isolation:
            raise InvalidRequest(
                "SLLM_REQUIRE_ISOLATION is set, and processes isolate nobody: set SLLM_SANDBOX to auto",
                field="SLLM_SANDBOX",
            )
        if not for_development(settings):
            warn(
                "FUNCTIONS ARE NOT ISOLATED: SLLM_SANDBOX is process, and this node is one of a cluster of machines."
                " SLLM_SANDBOX=auto has them in containers, SLLM_REQUIRE_ISOLATION=true refuses this"
            )
        return None
    try:
        engine = await probe.find(wanted)
    except Unavailable as error:
        if wanted != "auto" or settings.require_isolation:
            raise
        if not for_development(settings):
            raise Unavailable(
                f"{error.message}; this node is one of a cluster of machines, where functions are isolated unless"
                " SLLM_SANDBOX=process says otherwise"
            ) from error
        warn(
            f"FUNCTIONS ARE NOT ISOLATED: sandboxes are processes, fit for a machine for development alone"
            f" ({error.message}). SLLM_REQUIRE_ISOLATION=true refuses this"
        )
        return None
    log.info("sandboxes are containers of %s", " ".join(engine.words))
    return engine


def images(settings: InvokerSettings, engine: Engine, environment: Mapping[str, str]) -> FunctionImages:
    """Images for functions; ``environment``: with the settings of pip's index, for our own program alone."""
    store, scratch = Store(engine), settings.home / "images"
    return FunctionImages(store, Base(store, scratch, environment), scratch, environment)


def driver(settings: InvokerSettings, engine: Engine, made: FunctionImages) -> ContainerDriver:
    """Containers of ``settings.image``, else of the base image, or of what ``made`` makes for a function."""
    place = settings.data_dir.absolute()
    sizes = Sizes(
        memory=settings.container_memory,
        cpu=machine.cores(),
        pids=settings.container_pids,
        tmp=settings.container_tmp,
    )
    owner = Owner(node=settings.node, place=str(place), boot=uuid.uuid4().hex)

    async def image() -> str:
        if settings.image:
            return settings.image
        return await made.ensure(None, (), lambda step: log.info("image: %s", step))

    return ContainerDriver(engine, image, COMMAND, owner, place / "sandboxes", sizes)

"""The invoker's settings, read once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from sllm_invoker.fork_server import ZYGOTE
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol.limits import OVERDUE_S
from sllm_runtime.protocol.quantities import Bytes
from sllm_runtime.protocol.subjects import TOKEN
from sllm_runtime.protocol.worker import Preload, Private


class InvokerSettings(Settings):
    """``SLLM_NODE``, ``SLLM_DATA_DIR`` and ``SLLM_LOADERD_SOCKET`` are needed; the rest has defaults."""

    told_empty = frozenset({"gpus"})

    node: str = Field(pattern=TOKEN)
    data_dir: Path
    """Work directories, cached bundles and logs of this node alone."""
    loaderd_socket: Path
    pool_size: int = Field(default=2, ge=0, le=256)
    """Warm sandboxes that wait."""
    pool_kinds: int = Field(default=4, ge=0, le=64)
    """Kinds of containers with an image or devices of their own of which one waits, those that were asked for last.
    None where ``pool_size`` is 0."""
    pool_floor: Bytes = Field(default=256 * 2**20, ge=0)
    """Bytes of available memory below which no sandbox waits."""
    refill_delay: float = Field(default=0.3, ge=0)
    """Seconds the pool waits after a start before it forks again."""
    cpu: float | None = Field(default=None, gt=0)
    """Cores; default: what this process may use."""
    cpu_overcommit: float = Field(default=8.0, ge=1)
    """Functions that are kept alive idle most of the time, so their cores may be promised this many times."""
    memory: Bytes | None = Field(default=None, gt=0)
    """Bytes; default: what this process may use."""
    gpus: str | None = None
    """``"L4:24GiB,L4:24GiB"``; default: what the driver lists; ``""`` none."""
    labels: str = ""
    """``"zone=a,disk=nvme"``"""
    fork_server: tuple[str, ...] = ZYGOTE
    """Command that makes warm workers; ``--fd N`` is added."""
    preload: Preload = "all"
    """``"engine"``: the fork server does not import transformers, and workers whose model or code wants it do."""
    isolate: bool = True
    """A PID and a mount namespace for sandboxes, where the kernel permits them."""
    private: tuple[Path, ...] = ()
    """What functions must not see, beside what this node knows itself: other identities, tokens, other nodes' data."""
    sandbox: Literal["auto", "podman", "docker", "process"] = "process"
    """What functions run in. ``auto``: a container where an engine works, else, saying so loudly, a process; this on a
    machine for development alone (``containers.choice.for_development``)."""
    require_isolation: bool = False
    """Nothing but containers: where none can be had the node does not start."""
    image: str = ""
    """Of containers; default: made of this installation."""
    container_memory: Bytes = Field(default=1 << 30, ge=64 * 2**20)
    """Bytes that a container may use beside what the function that it runs has: Python, torch, /tmp."""
    container_tmp: Bytes = Field(default=512 * 2**20, ge=2**20)
    """Bytes of a container's /tmp, where the function's code lies as well."""
    container_pids: int = Field(default=256, ge=16, le=65536)
    """Processes and threads of one container."""
    name_wait: float = Field(default=OVERDUE_S, ge=0)
    """Seconds that a node listens whether its name is another one's before it takes part."""
    loader_wait: float = Field(default=5.0, ge=0)
    """Seconds to wait for the node's loaderd before it takes part: what memory is left for instances loaderd says."""
    node_drain: float = Field(default=0.0, ge=0)
    """Seconds that instances have to leave when this node is stopped: the controller moves what can move."""
    bundle_cache: Bytes = Field(default=1000 * 2**20, ge=0)
    """Bytes of bundles kept on disk."""

    def hidden(self) -> Private:
        """What sandboxes do not see: everything of the platform but the directories that are theirs."""
        credentials = (self.identity_file, self.nats_creds, self.nats_key)
        known = (self.home, self.data_dir, self.loaderd_socket, *credentials, *self.private)
        own = (self.data_dir / "work", self.data_dir / "tmp")
        hide = tuple(str(path.absolute()) for path in known if path is not None)
        return Private(hide=hide, keep=tuple(str(path.absolute()) for path in own))

"""Source: a model of another node's loaderd, `peer://host:port/<digest>`; ``sllm_loaderd.peer`` serves it."""

from __future__ import annotations

from collections.abc import Mapping

from sllm_loaderd.sources.http import HttpSource
from sllm_loaderd.sources.remote import Remote
from sllm_runtime.protocol.checkpoint import digest_hex
from sllm_runtime.protocol.errors import InvalidCheckpoint
from sllm_runtime.protocol.loader import path_of


def peer_source(rest: str, token: str) -> HttpSource:
    """The model at ``rest``, `host:port/sha256:<hex>`; requests carry ``token``. Raises ``InvalidCheckpoint``."""
    address, _, digest = rest.partition("/")
    if not address or not digest:
        raise InvalidCheckpoint(f"peer://{rest}: give peer://host:port/sha256:<digest>", field="model")

    def sign(method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        return {**headers, "Authorization": f"Bearer {token}"}

    remote = Remote(path_of(f"peer://{rest}"), sign, remedy="the nodes need the same SLLM_PEER_TOKEN")
    return HttpSource(f"peer://{rest}", remote, f"http://{address}/models/{digest_hex(digest)}")

"""Source: a model of another node's loaderd, `peer://host:port/<digest>`; ``sllm_loaderd.peer`` serves it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from sllm_loaderd.peer.signature import Asked, address_of, authorization
from sllm_loaderd.sources.connection import split_url
from sllm_loaderd.sources.http import HttpSource
from sllm_loaderd.sources.remote import Remote
from sllm_runtime.protocol.checkpoint import digest_hex
from sllm_runtime.protocol.errors import InvalidCheckpoint
from sllm_runtime.protocol.loader import path_of

_REMEDY: Final = (
    "the nodes need the same SLLM_PEER_TOKEN, clocks that agree, and addresses that nobody translates between them"
)


def peer_source(rest: str, token: str) -> HttpSource:
    """The model at ``rest``, `host:port/sha256:<hex>`; ``token`` signs the requests. Raises ``InvalidCheckpoint``."""
    address, _, digest = rest.partition("/")
    if not address or not digest:
        raise InvalidCheckpoint(f"peer://{rest}: give peer://host:port/sha256:<digest>", field="model")

    def sign(method: str, url: str, headers: Mapping[str, str], to: Any) -> Mapping[str, str]:
        asked = Asked(method, split_url(url)[1], headers.get("Range", ""), address_of(to))
        return {**headers, "Authorization": authorization(token, asked, time.time())}

    remote = Remote(path_of(f"peer://{rest}"), sign, remedy=_REMEDY, direct=True)
    return HttpSource(f"peer://{rest}", remote, f"http://{address}/models/{digest_hex(digest)}")

"""What a start costs others that lack a place. Pure.

While an instance starts nobody is served in its place. Where more versions lack an instance than their servers have
places, each second of a start there is one more that those wait who have their weights there: in the mean, one of its
instances ends in as much less time as there are more of them. So a start from afar is worth less than its own seconds
say while others could be served from near.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Final

from sllm_runtime.control.fits import Need
from sllm_runtime.control.scheduling.index import Servers
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.view import EMPTY, Key, View

MOST: Final = 256
"""Versions that lack instances and are looked at: where so many do, all servers are crowded."""


def crowd(key: Key, view: View, servers: Servers) -> Mapping[str, int]:
    """Instances that versions other than ``key`` lack, by each server that has their weights."""
    if not view.lacking:
        return EMPTY
    found = Counter[str]()
    for other, count in islice(view.lacking.items(), MOST):
        model = view.model_of(other) if other != key else None
        if model is None:
            continue
        near = {server.name for server in (*servers.in_dram(model.digest), *servers.on_ssd(model.digest))}
        for name in near:
            found[name] += count
    return found


def delay_s(server: Server, need: Need, crowd: Mapping[str, int], seconds: float) -> float:
    """Seconds that a start which takes so many on ``server`` costs those of the ``crowd`` there."""
    others = crowd.get(server.name, 0)
    if not others:
        return 0.0
    short = others + 1 - server.places(need) - len(server.yielding)
    return seconds * max(short, 0) / max(len(server.instances), 1)

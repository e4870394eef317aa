"""How long a start takes on a server: q + n/b (ServerlessLLM, section 6.1), beside what the sandbox takes meanwhile."""

from __future__ import annotations

from sllm_runtime.control.scheduling.learned import Learned
from sllm_runtime.control.scheduling.prediction import Estimate, Tier, reading
from sllm_runtime.control.scheduling.servers import Server
from sllm_runtime.control.view import Key
from sllm_runtime.protocol.loader import unused_bandwidth
from sllm_runtime.protocol.records import ModelRecord


def estimate(
    server: Server, key: Key, model: ModelRecord | None, learned: Learned, release: float = 0.0, *, device: bool = False
) -> Estimate:
    """Of a start of version ``key`` with ``model`` on ``server``, which has room or will after ``release`` seconds.
    ``device``: its weights go on to an accelerator."""
    tier, queue, coming, read = _weights(server, model, server.link if device else 0.0)
    warm = server.warm > 0
    return Estimate(
        tier=tier,
        warm=warm,
        sandbox=learned.sandbox_s(server.name, warm, server.status.sandbox_s),
        imports=learned.import_s(key),
        queue=queue,
        coming=coming,
        read=read,
        setup=learned.setup_s(key),
        release=release,
        lead=learned.lead_s(key, tier),
        rest=learned.rest_s(key, tier, queue + coming + read),
    )


def _weights(server: Server, model: ModelRecord | None, link: float) -> tuple[Tier, float, float, float]:
    """Where the weights are, and seconds of what is being served, of what comes before, and of reading."""
    if model is None:
        return "none", 0.0, 0.0, 0.0
    path = server.path(model)
    if path is None:
        return "dram", 0.0, 0.0, reading(model, 0.0, link)
    bandwidth = path.bandwidth or unused_bandwidth(path.path)
    tier: Tier = "ssd" if model.digest in server.stored.ssd else "remote"
    return tier, path.queued / bandwidth, server.coming / bandwidth, reading(model, bandwidth, link)

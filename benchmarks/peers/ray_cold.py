"""Ray Serve with the model and ``min_replicas=0``: ``ray_cold.py PORT TMPDIR MODEL``.

Prints ``{"ready": true}``; for every line on stdin waits until no replica runs and prints ``{"replicas": 0}``.
"""

import json
import sys
import time

import ray_serving
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

AUTOSCALING = {
    "min_replicas": 0,
    "initial_replicas": 0,
    "max_replicas": 1,
    "upscale_delay_s": 0,
    "downscale_delay_s": 0.5,
    "downscale_to_zero_delay_s": 0.5,
    "metrics_interval_s": 0.1,
    "look_back_period_s": 0.3,
}
ZERO_S = 60


@serve.deployment(autoscaling_config=AUTOSCALING, graceful_shutdown_wait_loop_s=0.1, ray_actor_options={"num_cpus": 1})
class Coder:
    """Loads when it starts."""

    def __init__(self, model: str) -> None:
        from greedy import Greedy

        self.greedy = Greedy(model)

    async def __call__(self, request: Request) -> StreamingResponse:
        asked = await request.json()
        return StreamingResponse(self.greedy.stream(asked["prompt"], asked["count"]), media_type="text/plain")


def replicas() -> int:
    """Of the one deployment, in any state."""
    deployment = serve.status().applications["coder"].deployments["Coder"]
    return sum(deployment.replica_states.values())


def main() -> None:
    """Serve until stdin ends."""
    port, scratch, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    ray_serving.start(Coder.bind(model), "coder", port, scratch)
    for _ in sys.stdin:
        until = time.monotonic() + ZERO_S
        while (left := replicas()) and time.monotonic() < until:
            time.sleep(0.1)
        print(json.dumps({"replicas": left}), flush=True)
    ray_serving.stop()


main()

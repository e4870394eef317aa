"""Ray Serve with the scripted tokens: ``ray_stream.py PORT TMPDIR``; prints ``{"ready": true}``, ends with stdin."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import ray_serving
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse


async def tokens(count: int, interval: float) -> AsyncIterator[str]:
    """As benchmarks/functions/paced/function.py: the load generator checks that they are the same."""
    began = time.monotonic_ns()
    for index in range(count):
        due = began + round(index * interval * 1e9) if interval else time.monotonic_ns()
        if (wait := due - time.monotonic_ns()) > 0:
            await asyncio.sleep(wait / 1e9)
        yield f"t{index}@{due}."


@serve.deployment(max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.1})
class Paced:
    """One replica that streams."""

    async def __call__(self, request: Request) -> StreamingResponse:
        asked = await request.json()

        async def events() -> AsyncIterator[str]:
            async for token in tokens(asked["count"], asked["interval"]):
                yield f'data: "{token}"\n\n'
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


def main() -> None:
    """Serve until stdin ends."""
    port, scratch = int(sys.argv[1]), sys.argv[2]
    ray_serving.start(Paced.bind(), "paced", port, scratch)
    sys.stdin.read()
    ray_serving.stop()


main()

"""Ray Serve with many models and few slots: ``ray_slots.py PORT TMPDIR SLOTS DIRECTORY URL``; ends with stdin.

One deployment with a replica for each slot, each of which holds one model and works on one call (``serve.multiplexed``:
Serve sends a call to a replica that has its model, else another one drops its own, least recently used first, and loads
it). A model is named ``cache-N``: read from DIRECTORY, on this machine's disk; or ``store-N``: its files are fetched
from URL each time, and removed once it is loaded. Processes are there, with torch and transformers imported.
"""

import asyncio
import os
import shutil
import sys
import tempfile
import urllib.request

import ray_serving
from greedy import Greedy
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

FETCH_S = 300


@serve.deployment(max_ongoing_requests=1, max_queued_requests=-1, ray_actor_options={"num_cpus": 0.01})
class Slot:
    """Holds one model."""

    def __init__(self, directory: str, url: str) -> None:
        self.directory, self.url = directory, url
        Greedy(directory)  # what is imported at the first load is imported now

    @serve.multiplexed(max_num_models_per_replica=1)
    async def model(self, name: str) -> Greedy:
        return await asyncio.to_thread(self.load, name)

    def load(self, name: str) -> Greedy:
        if name.startswith("cache-"):
            return Greedy(self.directory)
        with tempfile.TemporaryDirectory() as fetched:
            for file in os.listdir(self.directory):
                self.fetch(file, fetched)
            return Greedy(fetched)

    def fetch(self, file: str, directory: str) -> None:
        source = urllib.request.urlopen(f"{self.url}/{file}", timeout=FETCH_S)
        with source, open(os.path.join(directory, file), "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)

    async def __call__(self, request: Request) -> StreamingResponse:
        asked = await request.json()
        greedy = await self.model(serve.get_multiplexed_model_id())
        return StreamingResponse(greedy.stream(asked["prompt"], asked["count"]), media_type="text/plain")


def main() -> None:
    """Serve until stdin ends."""
    port, scratch, slots, directory, url = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
    application = Slot.options(num_replicas=slots).bind(directory, url)
    ray_serving.start(application, "slots", port, scratch)
    sys.stdin.read()
    ray_serving.stop()


main()

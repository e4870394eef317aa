"""Ray Serve on one port of this machine, with nothing that a benchmark does not need."""

import json
from typing import Any

import ray
from ray import serve


def start(application: Any, name: str, port: int, scratch: str) -> None:
    """Serve ``application`` at ``/stream``; prints ``{"ready": true}`` when it does."""
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=256 * 2**20,
        _temp_dir=scratch,
        logging_level="warning",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port, "access_log": False})
    serve.run(application, name=name, route_prefix="/stream")
    print(json.dumps({"ready": True}), flush=True)


def stop() -> None:
    """End all of it."""
    serve.shutdown()
    ray.shutdown()

"""boto3's own managed transfer of one object into a memory file, in the project's environment.

An order has ``endpoint``, ``bucket``, ``key``. One line of JSON for each line on stdin: seconds, CPU seconds, bytes.
"""

import json
import os
import sys
import time
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig

MIB = 2**20


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """One download by eight threads in parts of 8 MiB, to memory that nobody else has."""
    client = boto3.client("s3", endpoint_url=order["endpoint"])
    settings = TransferConfig(multipart_threshold=8 * MIB, multipart_chunksize=8 * MIB, max_concurrency=8)
    fd = os.memfd_create("boto3")
    with os.fdopen(fd, "wb") as file:
        os.posix_fallocate(fd, 0, order["nbytes"])
        began, cpu = time.perf_counter(), time.process_time()
        client.download_fileobj(order["bucket"], order["key"], file, Config=settings)
        file.flush()
        took = time.perf_counter() - began
        return {"seconds": took, "cpu_s": time.process_time() - cpu, "nbytes": os.fstat(fd).st_size}


if __name__ == "__main__":
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), flush=True)

"""What a worker writes to its two pipes: lines of its instance's log, up to the last that it wrote."""

from __future__ import annotations

import asyncio

from sllm_invoker.logs import InstanceLog, PipeReader
from sllm_invoker.sandbox import Sandbox


class Output:
    """Copies a worker's stdout and stderr to its instance's log, from its construction on."""

    def __init__(self, sandbox: Sandbox, log: InstanceLog) -> None:
        self._sandbox = sandbox
        self._pipes = (PipeReader(sandbox.stdout, log, "stdout"), PipeReader(sandbox.stderr, log, "stderr"))

    def drain(self) -> None:
        """Take what is there of a worker that is dead. Repeatable."""
        for pipe in self._pipes:
            pipe.stop()

    async def silence(self) -> None:
        """Kill the worker, then take what it still had written."""
        self._sandbox.kill()
        await asyncio.shield(self._sandbox.exited)
        self.drain()

"""Which checks there are, and in which order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from sllm.cli.context import Target
from sllm.doctor import containers, kernel, machine, nats, software, storage
from sllm.doctor.finding import Check, Finding


def run(target: Target) -> Iterator[Finding]:
    """Each check's finding as it comes; ``target``: the platform whose gateway is asked. What only the platform needs
    is looked at where it can run."""
    gateway = partial(software.gateway, target)
    everywhere: tuple[Check, ...] = (software.python, software.system, software.extras, gateway)
    for check in everywhere:
        yield check()
    if not kernel.on_linux():
        return
    server = software.installed("server")
    gpu = machine.has_gpu()
    here: tuple[Check, ...] = (
        software.port,
        storage.space,
        storage.direct_io,
        kernel.memory,
        kernel.memfd,
        kernel.huge_pages,
        kernel.open_files,
        kernel.sandboxes,
        lambda: kernel.locked_memory(gpu),
        lambda: nats.nats(needed=server),
        machine.gpu,
        containers.engine,
        lambda: containers.control_groups(os.geteuid()),
        lambda: containers.user_namespaces(os.geteuid(), containers.user_name()),
        lambda: containers.gpu_names(gpu),
    )
    for check in here:
        yield check()

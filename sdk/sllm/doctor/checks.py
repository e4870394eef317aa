"""Which checks there are, and in which order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from sllm.doctor import containers, kernel, machine, nats, software, storage
from sllm.doctor.finding import Check, Finding


def run(url: str | None = None, token: str | None = None, profile: str | None = None) -> Iterator[Finding]:
    """Each check's finding as it comes; the gateway that is asked is that of ``Client``'s arguments. What only the
    platform needs is looked at where it can run."""
    gateway = partial(software.gateway, url, token, profile)
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
        storage.locks,
        storage.temporary,
        kernel.memory,
        kernel.memfd,
        kernel.pidfd,
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

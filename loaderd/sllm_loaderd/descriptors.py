"""The descriptors this process needs: each chunk is one."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> int:
    """Take as many descriptors as the hard limit allows. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard

"""A node that has no descriptor left tries again and again to make a sandbox, and loses none by that."""

from __future__ import annotations

import errno
import os

import pytest

from sllm_invoker.process_driver import ProcessDriver
from tests.fixtures.invoker import SCRIPTED


async def test_what_was_opened_for_a_sandbox_that_cannot_be_made_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ProcessDriver(dict(os.environ), argv=SCRIPTED, isolate=False)
    await driver.start()
    try:
        before, pipe2, made = set(os.listdir("/proc/self/fd")), os.pipe2, list[int]()

        def one(flags: int) -> tuple[int, int]:
            if len(made) % 4 == 2:  # room for a socket pair and one pipe
                made.extend((-1, -1))
                raise OSError(errno.EMFILE, "Too many open files")
            made.extend(ends := pipe2(flags))
            return ends

        monkeypatch.setattr(os, "pipe2", one)
        for _ in range(5):
            with pytest.raises(OSError, match="Too many open files"):
                await driver.create("a")
        assert set(os.listdir("/proc/self/fd")) == before
    finally:
        monkeypatch.undo()
        await driver.close()

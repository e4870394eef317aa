"""Those who want to be told: all of them, whatever one of them does."""

import pytest

from sllm_runtime.platform.callbacks import Callbacks


async def test_one_that_fails_or_takes_itself_off_keeps_nobody_from_being_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callbacks, told = Callbacks(), list[str]()

    def once() -> None:
        told.append("once")
        off()

    async def fails() -> None:
        told.append("fails")
        raise ValueError("not now")

    off = callbacks.add(once)
    callbacks.add(fails)
    last = callbacks.add(lambda: told.append("last"))
    await callbacks.run()
    assert told == ["once", "fails", "last"]
    assert "ValueError: not now" in caplog.text
    off()
    last()
    await callbacks.run()
    assert told[3:] == ["fails"]

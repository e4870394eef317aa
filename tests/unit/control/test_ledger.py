"""Who waits for the store."""

import pytest

from sllm_runtime.control import ledger
from sllm_runtime.control.changes import Write
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import Unavailable
from tests.fixtures.nats import CONTROLLER, Nats, nats  # noqa: F401 - a fixture is used by being here


async def test_on_a_full_disk_nobody_waits_long_and_the_disk_is_named(
    nats: Nats,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "FULL_S", 0.01)
    full = ledger.Ledger(StateStore(await nats.bus(CONTROLLER)), lambda: "the disk of /x is full")
    full.take([Write("functions.x", None)])
    with pytest.raises(Unavailable, match="cannot be stored now: the disk of /x is full"):
        await full.settled(3600)
    assert full.waiting == 1, "it is written later"

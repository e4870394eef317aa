"""The view that a new controller makes of the store."""

import asyncio
import threading
from typing import Any, cast

from sllm_runtime.control import restore
from sllm_runtime.platform.state import Records, StateStore
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.records import FunctionRecord
from tests.fixtures.waiting import GIVE_UP_S

CHAT = FunctionRecord(function="chat", active=None, last_version=0)


class Many(Records):
    """So many that who reads them is not done before others had their turn."""

    turn = threading.Event()

    def list(self, prefix: str, type_: type[Any]) -> dict[str, Any]:
        assert self.turn.wait(GIVE_UP_S), "nobody else had a turn"
        return super().list(prefix, type_)


class Store:
    async def everything(self) -> Records:
        return Many({"functions.chat": codec.to_json(CHAT)})


async def test_a_new_leader_renews_its_lease_while_it_reads_what_is_stored() -> None:
    reading = asyncio.create_task(restore.read(cast(StateStore, Store())))
    await asyncio.sleep(0)  # it has begun
    Many.turn.set()
    assert (await reading).functions == {"functions.chat": CHAT}

"""The LoRA adapters of an instance: loaderd brings one when a call first names it, and the least recently used that
nobody uses is given up when their room is needed. What the engine keeps are copies, so loaderd may evict it at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from sllm_runtime.protocol.errors import (
    DeadlineExceeded,
    InstanceLost,
    InvalidRequest,
    ModelNotFound,
    OutOfMemory,
    UnsupportedModel,
)
from sllm_runtime.worker.arriving import Weights
from sllm_runtime.worker.engine.base import AdapterTable
from sllm_runtime.worker.engine.ours.adapter import Adapter
from sllm_runtime.worker.tensors import CheckpointTensors

CONFIG: Final = "adapter_config.json"
SHARE: Final = 8
"""Adapters that nobody uses may take this part of the manifest's memory."""
_AT_ONCE: Final = 32
"""Loads that are asked for together; the others wait for their turn. loaderd takes 64 of a sandbox, of which one that
was given up counts until it has ended."""
Load = Callable[[str], Adapter]
"""By digest; blocks. Raises the load's error."""


@dataclass(slots=True)
class _Held:
    there: Future[Adapter] = field(default_factory=Future)
    users: int = 0

    def __post_init__(self) -> None:
        self.there.set_running_or_notify_cancel()  # who waits and is cancelled does not cancel it for the others

    @property
    def idle(self) -> bool:
        return not self.users and self.there.done()


class Adapters:
    """Thread-safe. ``digests`` by the names that calls choose them by; ``room``: bytes that they may take together, or
    more while more are in use; ``timeout_s``: how long a load may take.

    Each load has a thread of its own, one at a time for each name: who waits for a slow one keeps no thread from those
    who want another, or none."""

    def __init__(self, digests: Mapping[str, str], load: Load, room: int, timeout_s: float) -> None:
        self._digests = digests
        self._load = load
        self._room = room
        self._timeout_s = timeout_s
        self._turns = threading.Semaphore(_AT_ONCE)
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        """The least recently used first."""

    @classmethod
    def none(cls) -> Adapters:
        """Of a model that has none."""

        def load(digest: str) -> Adapter:
            raise ModelNotFound(f"nothing brings {digest} here")

        return cls({}, load, 0, 0.0)

    @contextlib.asynccontextmanager
    async def held(self, name: str, table: AdapterTable | None) -> AsyncIterator[None]:
        """``name`` is in the engine's ``table`` inside this block. A cancelled call leaves its load to whoever is next.
        Raises ``ModelNotFound``, ``InvalidRequest`` if the engine runs none, ``DeadlineExceeded``, and what made the
        load fail."""
        held = self._wanted(name, table)
        try:
            await self._arrival(name, held)
            yield
        finally:
            with self._lock:
                held.users -= 1
                self._make_room(table)

    @property
    def present(self) -> tuple[str, ...]:
        """Those in memory, the least recently used first."""
        with self._lock:
            return tuple(name for name, held in self._held.items() if held.there.done())

    def _wanted(self, name: str, table: AdapterTable | None) -> _Held:
        """One user more; the first brings it."""
        if name not in self._digests:
            known = ", ".join(sorted(self._digests)) or "none"
            raise ModelNotFound(f"this model has no adapter {name!r:.100}; there are: {known}", field="model")
        if table is None:
            raise InvalidRequest("the engine of this model runs no adapters; name the model alone", field="model")
        with self._lock:
            held = self._held.get(name)
            if held is None:
                held = _Held()
                bring = threading.Thread(
                    target=self._bring, args=(name, held, table), name=f"adapter {name}", daemon=True
                )
                bring.start()  # it takes the lock when it is done
                self._held[name] = held
            held.users += 1
            self._held.move_to_end(name)
        return held

    async def _arrival(self, name: str, held: _Held) -> None:
        there = asyncio.wrap_future(held.there)
        try:
            done, _ = await asyncio.wait((there,), timeout=self._timeout_s)
        finally:
            there.cancel()  # whoever goes before it is done
        if not done:
            text = f"adapter {name!r} did not come in {self._timeout_s:g} s"
            raise DeadlineExceeded(text, stage="weights")
        there.result()

    def _bring(self, name: str, held: _Held, table: AdapterTable) -> None:
        try:
            with self._turns:
                adapter = self._load(self._digests[name])
            table.put(name, adapter)
        except BaseException as error:  # it reaches everybody who waits
            with self._lock:
                del self._held[name]
            held.there.set_exception(error)
            return
        with self._lock:
            held.there.set_result(adapter)
            self._make_room(table)  # those who wanted it may have gone

    def _make_room(self, table: AdapterTable | None) -> None:
        taken = {name: held.there.result().nbytes for name, held in self._held.items() if held.there.done()}
        for name in [name for name in taken if self._held[name].idle]:
            if sum(taken.values()) <= self._room or table is None:
                return
            table.drop(name)
            del self._held[name], taken[name]


def loader(model: Weights, timeout_s: float) -> Load:
    """Loads by the session of ``model``, which has the rights to them. One whose loaderd has gone brings nothing more:
    then it ``fails``."""

    def load(digest: str) -> Adapter:
        try:
            return bring(digest)
        except InstanceLost as error:
            model.fail(error)
            raise
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
                text = f"this instance has no room for an adapter ({str(error)[:200]})"
                raise OutOfMemory(f"{text}; raise memory=... in @model_function") from error
            raise

    def bring(digest: str) -> Adapter:
        coming = model.session.load(adapter=digest)
        try:
            index, files = coming.index(timeout_s), coming.files(timeout_s)
            if index.adapter is None:
                raise UnsupportedModel(f"{digest} is a model of its own, no adapter")
            tensors = CheckpointTensors(index, coming.attach(timeout_s).exporter())
            coming.wait_all(timeout_s)
            records = {name: record for name in tensors.names if (record := tensors.find(name)) is not None}
            return Adapter.read(
                digest,
                index.adapter,
                files.get(CONFIG, b""),
                frozenset(records),
                lambda name: tensors.tensor(records[name]),
            )
        finally:
            coming.detach()

    return load

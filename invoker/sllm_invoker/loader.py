"""This node's loaderd, as the invoker uses it: one connection, made anew when loaderd was started again.

What loaderd has handed to sandboxes is kept here as well, so that it outlives loaderd: the next one gets it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

from sllm_invoker.preparation import Report
from sllm_loaderd.client import KeptChunks, LoaderControl
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import InstanceLost, ModelNotFound, NotFound, SllmError, Unavailable
from sllm_runtime.protocol.limits import MAX_MESSAGE
from sllm_runtime.protocol.loader import CPU, CUDA, FAKE, START, ModelInfo, Status, place_of
from sllm_runtime.protocol.node import Ok, Progress
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.timeline import CONVERT

log = logging.getLogger(__name__)

CONNECT_S: Final = 30.0
"""A request waits this long for a loaderd that is being started."""
RETRY_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
STATUS_S: Final = 1.0
BUSY_S: Final = 0.1
"""Between looks at loaderd while it brings what a start waits for; at its beginning and at its end as well."""
_AGAIN: Final = 3
"""A status is asked for so often at most, where loads begin all the while: told with one that may be in it as well, the
next start would wait for that twice."""
_SOURCES_BYTES: Final = MAX_MESSAGE // 2
MOST_FETCHES: Final = 15
"""Models that are brought at a time, beyond which those that nobody waits for any more are given up, the one left first
before the others: one fewer than loaderd makes together, so that a registration stands in line behind none of them."""


@dataclass(eq=False)
class _Fetch:
    """A model on its way to this node, and who waits for it."""

    task: asyncio.Task[SllmError | None] = field(init=False)
    reports: list[Report] = field(default_factory=list)
    last: Progress | None = None

    def tell(self, progress: Progress) -> None:
        self.last = progress
        for report in self.reports:
            report(progress)


class Loader:
    """``run`` keeps the connection; everything else waits for it up to CONNECT_S and then raises ``Unavailable``."""

    def __init__(self, socket: Path, on_change: Callable[[], None] = lambda: None) -> None:
        self._socket = socket
        self._on_change = on_change
        self._control: LoaderControl | None = None
        self._connected = asyncio.Event()
        self._tasks = Tasks("loader")
        self._held: set[str] = set()
        """Sandboxes that were given a session and live."""
        self._ended: set[str] = set()
        """Those of them that ended and loaderd was not told, mostly since it was away; it may be the same one."""
        self._unseen: dict[tuple[str, int], bool] = {}
        """Loads that ``status`` does not have, by sandbox and rank; whether loaderd has begun them since."""
        self._loads: dict[str, set[asyncio.Task[None]]] = {}
        """What was begun ahead of each sandbox that lives."""
        self._begun = False
        self._looked = -inf
        self._kept = KeptChunks()
        self._fetches: dict[str, _Fetch] = {}
        """Models that are being brought, by digest; of those that nobody waits for, the one left first is first."""
        self.status: Status | None = None
        """What loaderd last said of itself; None while it is away."""

    async def run(self) -> None:
        """Connect, and again whenever the connection ends, until cancelled."""
        failures = 0
        while True:
            control = LoaderControl(self._socket, self._kept)
            try:
                await control.open()
                await self._bring_back(control)
                await self._tell_ended(control)
                await self._refresh(control)  # who is told that it is there may ask for its devices
                self._control, failures = control, 0
                self._connected.set()
                log.info("connected to loaderd at %s", self._socket)
                await self._watch(control)
                log.warning("loaderd at %s is gone", self._socket)
            except SllmError as error:
                if failures == len(RETRY_S):
                    log.warning("%s", error.message)
                failures += 1
            finally:
                self._connected.clear()
                self._control, self.status = None, None
                await control.close()
            self._on_change()
            await asyncio.sleep(RETRY_S[min(max(failures, 1), len(RETRY_S)) - 1])

    async def there(self, within_s: float) -> None:
        """Wait until it was first heard, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._connected.wait()

    async def _bring_back(self, control: LoaderControl) -> None:
        """What an earlier loaderd handed out, before anything else is asked for: it is memory that is in use."""
        self._kept.living(self._held)
        for batch in self._kept.batches():
            try:
                answer = await control.adopt(batch)
            except Unavailable:
                raise  # gone again: the next one gets it
            except (SllmError, OSError) as error:  # none of ours is left to send them by
                log.warning("loaderd does not take back what it gave: %s", error)
                self._kept.drop(batch.ids)
            else:
                self._kept.drop(set(batch.ids).difference(answer.ids, answer.counted))
        for kept in self._kept.devices():
            try:
                answer = await control.adopt_device(kept)
            except Unavailable:
                raise
            except (SllmError, OSError) as error:
                log.warning("loaderd does not take back memory on %s: %s", kept.memory.device, error)
                self._kept.drop([kept.memory.id])
            else:
                self._kept.drop({kept.memory.id}.difference(answer.ids, answer.counted))

    async def _tell_ended(self, control: LoaderControl) -> None:
        while self._ended:  # also those that end meanwhile
            holder = next(iter(self._ended))
            await control.gone(holder)
            self._ended.discard(holder)

    async def _watch(self, control: LoaderControl) -> None:
        """Ask for the status regularly until the connection ends; what could not be said of sandboxes is said again."""
        while not control.lost.is_set():
            await self._refresh(control)
            await self._tell_ended(control)
            try:
                async with asyncio.timeout(STATUS_S):
                    await control.lost.wait()
            except TimeoutError:
                continue

    async def _refresh(self, control: LoaderControl) -> None:
        for _ in range(_AGAIN):
            begun = self._loading()
            self._looked = asyncio.get_running_loop().time()
            status = await control.status(begun=self._begun)
            if self._loading() <= begun:  # else whether it has those that have begun meanwhile is not to be known
                break
        for load in begun:
            self._unseen.pop(load, None)
        before, self.status = self.status, status
        if before is None or _shown(status) != _shown(before):
            self._on_change()

    def _loading(self) -> set[tuple[str, int]]:
        """Of ``_unseen``, those that loaderd has begun."""
        return {load for load, is_so in self._unseen.items() if is_so}

    async def _look(self, control: LoaderControl) -> None:
        """What loaderd does is another thing now: see it before STATUS_S is over."""
        try:
            await self._refresh(control)
        except SllmError as error:
            log.debug("loaderd's status: %s", error.message)  # ``run`` hears of it too

    @property
    def shown(self) -> set[str]:
        """Living sandboxes whose loads ``status`` has, waiting, under way or done."""
        return self._held - {holder for holder, _ in self._unseen}

    def begun(self) -> None:
        """The node has: from their next status on, this loaderd and those to come may measure disk and stores.

        Before (interpreters import from the same disk, on every core) they would say a tenth of what loads get.
        """
        self._begun = True

    async def _there(self) -> LoaderControl:
        try:
            async with asyncio.timeout(CONNECT_S):
                while self._control is None:
                    await self._connected.wait()
        except TimeoutError as error:
            raise Unavailable(f"loaderd at {self._socket} cannot be reached; it should be running") from error
        return self._control

    # --- starts ---------------------------------------------------------------------------------------
    async def grant(
        self,
        model: ModelRecord,
        holder: str,
        report: Report,
        *,
        partitions: Sequence[int] | None = None,
        adapters: Sequence[ModelRecord] = (),
        devices: Sequence[str] = (CPU,),
    ) -> int:
        """A descriptor for the sandbox ``holder`` with rights to ``model`` (to ``partitions``; ``None``: all of them)
        and ``adapters``, on ``devices``.

        A model that this node lacks is made from its sources first. Loading has begun when this returns, each partition
        to its own device (``place_of``). Adapters are brought and loaded when the sandbox asks for them, which it does
        for those that calls name. The caller owns the descriptor, and says ``gone`` in any case. Raises
        ``InstanceLost`` when loaderd goes away meanwhile, which is no fault of the model's.
        """
        control = await self._there()
        ranks = range(len(model.partitions)) if partitions is None else partitions
        digests = [adapter.digest for adapter in adapters]
        sources = _sources(adapters)
        self._held.add(holder)  # loaderd may have granted what is cancelled meanwhile: it is told ``gone`` all the same
        self._unseen.update({(holder, rank): False for rank in ranks})
        grant = partial(control.grant, holder, model.digest, ranks, adapters=digests, devices=devices, sources=sources)
        try:
            fd = await self._granted(control, grant, (model, *adapters), sources, report)
        except Unavailable as error:
            if control.lost.is_set():
                raise InstanceLost(error.message) from error
            raise
        for rank in ranks:
            load = self._load(control, holder, model.digest, rank, place_of(rank, devices))
            self._loads.setdefault(holder, set()).add(self._tasks.start(load, f"load {model.digest}"))
        return fd

    async def _granted(
        self,
        control: LoaderControl,
        grant: Callable[[], Awaitable[int]],
        models: Sequence[ModelRecord],
        sources: Collection[str],
        report: Report,
    ) -> int:
        """What ``grant`` returns, with those of ``models`` brought first that this node lacks and has no source for."""
        try:
            return await grant()
        except NotFound:
            report(Progress(stage=CONVERT))
            known = {*await control.models([record.digest for record in models]), *sources}
            for lacking in (record for record in models if record.digest not in known):
                await self._brought(control, lacking, report)
            return await grant()

    async def _load(self, control: LoaderControl, holder: str, digest: str, rank: int, device: str) -> None:
        """Begin a load that the sandbox will join; what fails here fails there, and is told there."""
        load = holder, rank

        def on_progress(stage: str, done: int, total: int) -> None:
            begins = self._unseen.get(load) is False
            if begins:
                self._unseen[load] = True
            now = asyncio.get_running_loop().time()
            if done < total and (begins or now >= self._looked + BUSY_S):  # of its end is told below
                self._looked = now
                self._tasks.start(self._look(control), "status")

        try:
            await control.prefetch(digest, rank, device=device, priority=START, report=on_progress)
        except SllmError as error:
            log.info("loading %s ahead of its sandbox: %s", digest, error.message)
        if load in self._unseen:  # one that failed has told nothing
            self._unseen[load] = True
        await self._look(control)

    async def devices(self, gpus: Sequence[int]) -> tuple[str, ...]:
        """What an instance with these GPUs may load to: memory, and those of them that loaderd serves, as themselves or
        by the fake devices of their numbers."""
        if not gpus:
            return (CPU,)
        await self._there()
        there = {device.name for device in self.status.devices} if self.status is not None else set()
        names = [next((name for kind in (CUDA, FAKE) if (name := f"{kind}:{gpu}") in there), "") for gpu in gpus]
        return (CPU, *filter(None, names))

    async def _brought(self, control: LoaderControl, model: ModelRecord, report: Report) -> None:
        """Have a model that this node lacks: once for all who ask, and to its end when they have given up. A conversion
        may take longer than a start, and would never end if each start began it anew."""
        digest = model.digest
        fetch = self._fetches.get(digest)
        if fetch is None:
            fetch = self._fetches[digest] = _Fetch()
            fetch.task = self._tasks.start(self._fetch(control, model, fetch.tell), f"fetch {digest}")
            fetch.task.add_done_callback(lambda _: self._forget(digest, fetch))
        fetch.reports.append(report)
        if fetch.last is not None:
            report(fetch.last)
        self._give_up()
        try:
            await asyncio.wait([fetch.task])
        finally:
            fetch.reports.remove(report)
            if not fetch.reports and self._fetches.get(digest) is fetch:
                self._fetches[digest] = self._fetches.pop(digest)  # behind those that were left before
                self._give_up()
        if fetch.task.cancelled():
            raise ModelNotFound(f"model {digest} was deleted while it came to this node", field="model")
        if (failure := fetch.task.result()) is not None:
            raise failure

    def _give_up(self) -> None:
        """End fetches that nobody waits for, where there are too many."""
        left = [digest for digest, fetch in self._fetches.items() if not fetch.reports]
        for digest in left[: max(0, len(self._fetches) - MOST_FETCHES)]:
            self._end(digest)

    def _end(self, digest: str) -> asyncio.Task[SllmError | None] | None:
        """Have a model come no further, whoever waits for it: what is ending then; None where it is not coming."""
        fetch = self._fetches.pop(digest, None)  # who comes now must not join what is being cancelled
        if fetch is None:
            return None
        fetch.task.cancel()
        return fetch.task

    def _forget(self, digest: str, fetch: _Fetch) -> None:
        if self._fetches.get(digest) is fetch:
            del self._fetches[digest]

    async def _fetch(self, control: LoaderControl, model: ModelRecord, report: Report) -> SllmError | None:
        """Why no source gave the model: an answer for whoever waits, no failure of this node."""

        def on_progress(stage: str, done: int, total: int) -> None:
            report(Progress(stage=CONVERT, done=done, total=total, message=stage))

        failure: SllmError = NotFound(f"model {model.digest} has no source to make it from")
        for source in _places(model):
            try:
                await control.register(source, digest=model.digest, report=on_progress)
                return None
            except SllmError as error:
                log.warning("model %s from %s: %s", model.digest, source, error.message)
                failure = error
        return failure

    async def gone(self, holder: str) -> None:
        """Every process of ``holder`` is dead, or never was. A loaderd that is away is told when it is back."""
        if holder not in self._held:
            return
        self._held.discard(holder)
        self._unseen = {load: begun for load, begun in self._unseen.items() if load[0] != holder}
        for load in self._loads.pop(holder, ()):
            load.cancel()  # nobody waits for it any more
        self._kept.gone(holder)
        if self._control is None:
            self._ended.add(holder)
            return
        try:
            await self._control.gone(holder)
        except SllmError as error:
            self._ended.add(holder)
            log.warning("loaderd was not told that %s is gone: %s", holder, error.message)

    # --- models ---------------------------------------------------------------------------------------
    async def register(self, uri: str, digest: str, report: Callable[[str, int, int], None]) -> ModelInfo:
        """Have the model at ``uri`` in this node's store."""
        control = await self._there()
        info = await control.register(uri, digest=digest, report=report)
        await self._refresh(control)
        return info

    async def pull(self, model: ModelRecord, report: Callable[[str, int, int], None]) -> None:
        """Have all of a model on this node's disk, made from its sources where this node lacks it."""
        control = await self._there()
        if not await control.models((model.digest,)):
            await self._brought(control, model, lambda told: report(told.message, told.done, told.total))
        await control.copy(model.digest, report=report)
        await self._refresh(control)

    async def keep(self, models: Sequence[str]) -> Ok:
        """The models whose copies on the SSD tier are to go last."""
        await (await self._there()).keep(models)
        return Ok()

    async def validate(self, digest: str) -> None:
        """Compare every byte of a model with its digest."""
        await (await self._there()).validate(digest)

    async def delete(self, digest: str) -> None:
        """Remove a model from this node, also one that is still coming: it would be there later, and nobody's. Raises
        ``ModelNotFound`` where it neither is nor comes."""
        ending = self._end(digest)
        if ending is not None:
            await asyncio.wait([ending])  # loaderd has heard of that before it is asked
        control = await self._there()
        try:
            await control.delete(digest)
        except ModelNotFound:
            if ending is None:
                raise
        await self._refresh(control)

    async def close(self) -> None:
        """End loads that were begun ahead of their sandbox and models on their way; drop what is kept. Call after
        ``run`` ended."""
        await self._tasks.close()
        self._kept.close()


def _places(model: ModelRecord) -> tuple[str, ...]:
    return tuple(dict.fromkeys((model.uri, *model.sources)))


def _sources(adapters: Sequence[ModelRecord]) -> dict[str, tuple[str, ...]]:
    """Where adapters come from, by digest, as many as one message takes; the others are brought before the start."""
    found, left = {}, _SOURCES_BYTES
    for adapter in adapters:
        places = _places(adapter)
        left -= sum(len(place.encode()) for place in places)
        if left >= 0:
            found[adapter.digest] = places
    return found


def _shown(status: Status) -> object:
    """What a report says of it that somebody may wait for; bandwidths go with the next report."""
    copies = status.ssd.copies if status.ssd is not None else ()
    parts = tuple((part.model, part.nbytes) for part in status.resident)
    return (status.models, copies, parts, tuple(path.queued for path in status.paths), status.pool.limit)

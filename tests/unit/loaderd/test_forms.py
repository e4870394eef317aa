"""A model that is converted behind its first load has two forms under one digest: what is in memory is bound by its own
index, whatever was opened, closed and replaced meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from sllm_loaderd.daemon import service as service_module
from sllm_loaderd.daemon.service import LoaderService
from sllm_loaderd.daemon.settings import read_settings
from sllm_loaderd.loading import MemoryLoad
from sllm_loaderd.pipeline import Pipeline
from sllm_loaderd.reader import ChunkSource
from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.loader import CONVERT_LATER, CONVERT_NEVER, Load
from tests.fixtures.loaderd import numbers_model
from tests.fixtures.waiting import GIVE_UP_S, until


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LoaderService]:
    places = ("--node", "x", "--data", str(tmp_path / "data"), "--socket", str(tmp_path / "s"))
    made = LoaderService(read_settings([*places, "--chunk-bytes", str(16 * MIB), "--pool-bytes", str(128 * MIB)]))
    yield made
    await made.close()


def nothing(*_: object) -> None:
    """Nobody looks at it."""


async def begun(service: LoaderService, digest: str, holder: str) -> tuple[MemoryLoad, asyncio.Future[None]]:
    ended = asyncio.get_running_loop().create_future()

    def failed(error: SllmError) -> None:
        ended.set_exception(error)

    loading = await service.load(
        Load(request=1, model=digest),
        holder,
        ready=nothing,
        progress=nothing,
        done=lambda: ended.set_result(None),
        failed=failed,
    )
    assert isinstance(loading, MemoryLoad)
    service.residency.hold(loading.chunks, holder)
    loading.start()
    return loading, ended


def bound(loading: MemoryLoad) -> dict[str, np.ndarray]:
    """What a sandbox binds: memory by the index that it is sent."""
    data = b"".join(bytes(chunk.view) for chunk in loading.chunks)
    tensors = loading.model.index.tensors
    return {t.name: np.frombuffer(data, np.float32, t.nbytes // 4, t.offset).reshape(t.shape) for t in tensors}


def right(loading: MemoryLoad, arrays: dict[str, np.ndarray]) -> None:
    found = bound(loading)
    assert found.keys() == arrays.keys()
    assert [name for name in arrays if not np.array_equal(found[name], arrays[name])] == []


async def test_a_model_in_memory_is_bound_by_the_index_of_what_is_there_however_many_others_were_opened(
    service: LoaderService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance runs, its model has been converted since, others were used: the next instance has its weights."""
    monkeypatch.setattr(service_module, "_MOST_OPEN", 1)
    arrays = numbers_model(tmp_path / "model")
    digest = (await service.register(str(tmp_path / "model"), "", nothing, CONVERT_LATER)).model
    one, ended = await begun(service, digest, "one")
    await ended
    right(one, arrays)
    await until(lambda: service.store.replacement(digest), what="it is converted")
    numbers_model(tmp_path / "other", seed=1)
    await service.register(str(tmp_path / "other"), "", nothing, CONVERT_NEVER)
    two, ended = await begun(service, digest, "two")
    await ended
    right(two, arrays)


async def test_a_load_that_opened_its_files_before_its_model_was_replaced_shares_no_memory_with_one_after(
    service: LoaderService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start's weights are asked for twice, by the invoker and by its sandbox."""
    arrays = numbers_model(tmp_path / "model")
    digest = (await service.register(str(tmp_path / "model"), "", nothing, CONVERT_LATER)).model
    await until(lambda: service.store.replacement(digest), what="it is converted")
    other = service.store.replacement(digest)
    assert other is not None
    service.store._replaced.joinpath(digest.removeprefix("sha256:")).unlink()  # no: that is just about to end
    opens, at_it, go = Pipeline.open_sources, threading.Event(), threading.Event()

    def slow(pipeline: Pipeline, model: StoredModel, rank: int) -> list[ChunkSource]:
        found = opens(pipeline, model, rank)
        if not at_it.is_set():
            at_it.set()
            assert go.wait(GIVE_UP_S)
        return found

    monkeypatch.setattr(Pipeline, "open_sources", slow)
    first = asyncio.create_task(begun(service, digest, "one"))
    await until(at_it.is_set, what="its files are open")
    await asyncio.to_thread(service.store.replace, digest, other)
    await service.model(digest)  # the sandbox's grant, which comes by another connection than its loads
    go.set()
    one, ended = await first
    two, too = await begun(service, digest, "two")
    await asyncio.gather(ended, too)
    right(one, arrays)
    right(two, arrays)

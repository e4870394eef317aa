"""What a node says of its storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import structs

from sllm_invoker.storage import coming, dram_used, path_loads, remote, resident, storage
from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.ranks import AutoPlan
from sllm_runtime.protocol.loader import (
    PREWARM,
    START,
    WRITE_BACK,
    DeviceStatus,
    PathStatus,
    PoolStatus,
    ResidentStatus,
    Status,
    TierStatus,
)
from sllm_runtime.protocol.node import DeviceMemory, Storage
from sllm_runtime.protocol.records import ModelRecord
from tests.fixtures.invoker import order
from tests.fixtures.loaderd import SMALL_CHUNK, loaderd, numbers_model, small_checkpoint

POOL = PoolStatus(chunk_bytes=1, limit=1, free=0, prefaulted=0, used=0, held=0, retiring=0, reserved=0)


def status(**fields: Any) -> Status:
    base: dict[str, Any] = {"resident": (), "paths": (), "models": ()}
    return Status(request=1, pid=1, pool=POOL, disk_free=0, **{**base, **fields})


def part(model: str, rank: int, nbytes: int) -> ResidentStatus:
    return ResidentStatus(model=model, partition=rank, nbytes=nbytes, total=10, pinned=False, holders=())


def test_a_model_with_half_a_partition_is_not_resident() -> None:
    parts = (part("whole", 0, 10), part("whole", 1, 10), part("half", 0, 10), part("half", 1, 5))
    assert resident(status(resident=parts)) == ("whole",)


def test_a_copy_on_the_ssd_brings_a_remote_model_near() -> None:
    copies = TierStatus(used=1, limit=1, copies=(("copied", 0, 1),))
    assert remote(status(models=("here", "copied", "away"), remote=("copied", "away"), ssd=copies)) == ("away",)


def test_what_there_is_to_load_from_and_to() -> None:
    pool = structs.replace(POOL, prefaulted=3, used=7, held=5, retiring=2)
    device = DeviceStatus(name="fake:0", path="link fake:0", limit=9, used=4)
    said = structs.replace(status(ssd=TierStatus(used=1, limit=6), devices=(device,), integrity=False), pool=pool)
    assert dram_used(said) == 9, "what is held is used, and counted once"
    memory = DeviceMemory(device="fake:0", limit=9, used=4)
    assert storage(said) == Storage(dram_ready=3, ssd_used=1, ssd_limit=6, integrity=False, devices=(memory,))


def test_a_start_waits_behind_starts_alone() -> None:
    queued = {START: 5, PREWARM: 70, WRITE_BACK: 900}
    (load,) = path_loads(status(paths=(PathStatus(path="disk", bandwidth=2.0, queued=queued),)))
    assert (load.path, load.bandwidth, load.queued, load.served) == ("disk", 2.0, 5, False)


def test_a_path_that_loads_have_read_by_has_served() -> None:
    (load,) = path_loads(status(paths=(PathStatus(path="disk", bandwidth=2.0, queued={}, mode="direct"),)))
    assert load.served


def test_what_starts_will_ask_for_is_coming_until_a_queue_shows_it() -> None:
    parts = ModelRecord(digest="cold", uri="x", nbytes=30, partitions=(10, 20))
    there = ModelRecord(digest="whole", uri="x", nbytes=10, partitions=(10,))
    one, two, third, without = order(model=parts), order(model=parts), order(model=there), order()
    said = status(resident=(part("whole", 0, 10),))
    assert coming((one, two, third, without), set(), said) == 2 * 30, "of all partitions: they come by one path"
    assert coming((one, two, third, without), {one.instance}, said) == 30
    assert coming((one, third), {one.instance, third.instance}, None) == 0
    assert coming((third,), set(), None) == 10, "while loaderd is away nothing is known to be in memory"


async def test_a_model_of_which_a_partition_was_evicted_is_not_resident(tmp_path: Path) -> None:
    """Room is made by whole partitions: a start here reads the one that went."""
    numbers_model(tmp_path / "source", layers=6)
    options = ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0, plan=AutoPlan("auto-layers", 2))
    convert_directory(tmp_path / "source", tmp_path / "parts", options=options)
    other, _ = small_checkpoint(tmp_path / "other", layers=2)
    async with loaderd(tmp_path, pool_bytes=9 * SMALL_CHUNK) as daemon:
        model = (await daemon.control.register(str(tmp_path / "parts"))).model
        another = (await daemon.control.register(str(other))).model
        for rank in range(2):
            await daemon.control.prefetch(model, rank)
        assert resident(await daemon.control.status()) == (model,)
        await daemon.control.prefetch(another)
        said = await daemon.control.status()
        assert [(part.model, part.partition) for part in said.resident] == [(model, 1), (another, 0)]
        assert resident(said) == (another,)

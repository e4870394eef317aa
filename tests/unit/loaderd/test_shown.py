"""What a status says of a store that has more models than a message has room for."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from sllm_loaderd.daemon.shown import shown
from sllm_runtime.protocol.codec import pack
from sllm_runtime.protocol.limits import MAX_MESSAGE
from sllm_runtime.protocol.loader import PoolStatus, ResidentStatus, Status, TierStatus
from tests.fixtures.loaderd import loaderd

POOL = PoolStatus(chunk_bytes=1, limit=1, free=0, prefaulted=0, used=0, held=0, retiring=0, reserved=0)


def name(number: int) -> str:
    return f"sha256:{number:064x}"


def resident(number: int) -> ResidentStatus:
    return ResidentStatus(model=name(number), partition=0, nbytes=1, total=1, pinned=False, holders=("i",))


def status(models: int, memory: tuple[int, ...] = ()) -> Status:
    """All of them remote, each with a copy."""
    names = tuple(name(number) for number in range(models))
    return Status(
        request=1,
        pid=1,
        pool=POOL,
        resident=tuple(resident(number) for number in memory),
        paths=(),
        models=names,
        disk_free=1,
        remote=names,
        ssd=TierStatus(used=models, limit=models, copies=tuple((each, 0, 1) for each in names)),
    )


def test_what_fits_is_told_whole() -> None:
    whole = status(100, memory=(3,))
    assert shown(whole, []) is whole


def test_models_in_memory_and_those_used_last_are_told_of() -> None:
    whole = status(10_000, memory=(9_000, 8_000))
    told = shown(whole, [name(7_000), name(6_000)])
    assert len(pack(told)) <= MAX_MESSAGE
    assert len(pack(told)) > MAX_MESSAGE - 1024, "as many as there is room for"
    first = {name(number) for number in (9_000, 8_000, 7_000, 6_000)}
    assert set(told.models) == first | {name(number) for number in range(len(told.models) - 4)}
    assert told.remote == told.models
    assert told.ssd is not None
    assert tuple(copy[0] for copy in told.ssd.copies) == told.models
    assert told.resident == whole.resident
    assert told.untold == 10_000 - len(told.models)


def test_of_more_partitions_in_memory_than_fit_those_used_last_are_told() -> None:
    whole = replace(status(0), resident=tuple(resident(number) for number in range(9_000)))
    told = shown(whole, [])
    assert len(pack(told)) <= MAX_MESSAGE
    assert told.resident == whole.resident[-len(told.resident) :]
    assert told.untold == 9_000 - len(told.resident)


async def test_a_node_with_more_models_than_a_message_has_room_for_is_of_use(tmp_path: Path) -> None:
    models = tmp_path / "data" / "models"
    models.mkdir(parents=True)
    for number in range(8_000):
        (models / f"{number:064x}").mkdir()
    async with loaderd(tmp_path) as daemon:
        assert daemon.data == tmp_path / "data"
        told = await daemon.control.status()
        assert told.untold + len(told.models) == 8_000
        assert len(told.models) > 3_000
        assert await daemon.control.models([name(7_999), name(8_000)]) == (name(7_999),)

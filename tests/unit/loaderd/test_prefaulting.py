"""How much memory is ready ahead: for the largest model that is not there, within half of the pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sllm_loaderd.prefaulting import LEAST, bytes_ahead
from sllm_runtime.protocol.limits import CHUNK_BYTES
from tests.fixtures.loaderd import loaderd, numbers_model
from tests.fixtures.waiting import GIVE_UP_S, until

GIB = 2**30
WAIT = GIVE_UP_S


@pytest.mark.parametrize(
    ("sizes", "there", "limit", "ahead"),
    [
        ({}, (), 8 * GIB, LEAST),
        ({"small": 1}, (), 8 * GIB, LEAST),
        ({"a": 2 * GIB, "b": 3 * GIB}, (), 8 * GIB, 3 * GIB),
        ({"a": 2 * GIB, "b": 3 * GIB}, ("b",), 8 * GIB, 2 * GIB),
        ({"a": 2 * GIB, "b": 3 * GIB}, ("a", "b"), 8 * GIB, LEAST),
        ({"a": 100 * GIB}, (), 8 * GIB, 4 * GIB),
        ({}, (), LEAST, LEAST // 2),
    ],
)
def test_the_largest_model_that_is_not_there_within_half_of_the_pool(
    sizes: dict[str, int], there: tuple[str, ...], limit: int, ahead: int
) -> None:
    assert bytes_ahead(sizes, there, limit) == ahead


async def test_a_node_makes_ready_for_the_models_that_it_has(tmp_path: Path) -> None:
    large, broken = (tmp_path / "data" / "models" / (digit * 64) for digit in "ab")
    wanted = LEAST + 4 * CHUNK_BYTES
    for directory, index in ((large, {"partitions": [{"nbytes": wanted}]}), (broken, {"partitions": 7})):
        directory.mkdir(parents=True)
        (directory / "index.json").write_text(json.dumps(index))
    pool: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES, "pool_bytes": 4 * LEAST, "prefault_bytes": None}
    async with loaderd(tmp_path, **pool) as daemon:

        async def enough() -> bool:
            return (await daemon.control.status()).pool.prefaulted >= wanted

        await until(enough, WAIT, "memory is ready for the largest model")


async def test_what_is_set_is_kept(tmp_path: Path) -> None:
    """With a small pool: half of it is less than what is made ready without models."""
    numbers_model(tmp_path / "source")
    async with loaderd(tmp_path, chunk_bytes=CHUNK_BYTES, pool_bytes=4 * CHUNK_BYTES, prefault_bytes=0) as daemon:
        info = await daemon.control.register(str(tmp_path / "source"))
        await daemon.control.prefetch(info.model)
        assert (await daemon.control.status()).pool.prefaulted == 0

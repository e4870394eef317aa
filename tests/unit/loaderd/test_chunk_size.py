"""A node whose chunks are of another size (``--chunk-bytes``) makes its models for that size."""

from __future__ import annotations

from pathlib import Path

import pytest

from sllm_runtime.protocol.errors import InvalidCheckpoint
from sllm_runtime.protocol.limits import CHUNK_BYTES
from tests.fixtures.loaderd import loaderd, numbers_model

SIZE = CHUNK_BYTES // 4


@pytest.mark.parametrize("convert", ["now", "never"])
async def test_what_a_node_makes_of_a_model_it_can_load(tmp_path: Path, convert: str) -> None:
    numbers_model(tmp_path / "source")
    async with loaderd(tmp_path, chunk_bytes=SIZE, pool_bytes=8 * SIZE, prefault_bytes=0) as daemon:
        info = await daemon.control.register(str(tmp_path / "source"), convert=convert)
        await daemon.control.prefetch(info.model)
        assert (await daemon.control.status()).resident[0].model == info.model


@pytest.mark.parametrize("convert", ["now", "never"])
async def test_what_was_made_for_another_size_is_made_anew_when_it_is_registered_again(
    tmp_path: Path, convert: str
) -> None:
    """As the error says that refuses its load: the node has a model of when its chunks had another size."""
    numbers_model(tmp_path / "source")
    source = str(tmp_path / "source")
    async with loaderd(tmp_path, pool_bytes=8 * SIZE, prefault_bytes=0) as daemon:
        before = await daemon.control.register(source, convert=convert)
    async with loaderd(tmp_path, chunk_bytes=SIZE, pool_bytes=8 * SIZE, prefault_bytes=0) as daemon:
        with pytest.raises(InvalidCheckpoint, match="register"):
            await daemon.control.prefetch(before.model)
        info = await daemon.control.register(source, convert=convert)
        await daemon.control.prefetch(info.model)

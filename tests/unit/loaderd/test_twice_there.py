"""Sources that have the same weights twice, as many models of a hub: what is read is fetched, and no more."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from sllm_runtime.protocol.loader import CONVERT_LATER
from tests.fixtures.loaderd import loaderd, same
from tests.fixtures.sources import Hub, hub
from tests.fixtures.waiting import until
from tests.unit.loaderd.test_direct import POOL, loaded, sharded

TWICE = "consolidated.safetensors"


def _served(directory: Path) -> dict[str, np.ndarray]:
    """Beside the shards all of it in one file, as of Mistral."""
    arrays = sharded(directory)
    sharded(directory.with_name("other"))
    shutil.copyfile(directory.with_name("other") / "model-1.safetensors", directory / TWICE)
    return arrays


def _asked_for(server: Hub) -> set[str]:
    return {path.rpartition("/")[2] for path in server.gets if path.endswith(".safetensors")}


def _there(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


async def test_weights_that_are_there_twice_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = _served(tmp_path / "served")
    with hub(tmp_path / "served") as server:
        _there(server, monkeypatch)
        async with loaderd(tmp_path, **POOL) as daemon:
            info = await daemon.control.register("hf://org/tiny")
            same(await loaded(daemon, info.model), arrays)
            assert _asked_for(server) == {"model-1.safetensors", "model-2.safetensors"}


async def test_a_later_conversion_of_them_fetches_nothing_that_the_node_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = _served(tmp_path / "served")
    with hub(tmp_path / "served") as server:
        _there(server, monkeypatch)
        async with loaderd(tmp_path, convert=CONVERT_LATER, **POOL) as daemon:
            info = await daemon.control.register("hf://org/tiny")
            same(await loaded(daemon, info.model), arrays)
            server.gets.clear()

            async def converted() -> bool:
                return len(await daemon.control.models()) == 2

            await until(converted, what="the conversion takes its place")
            assert not _asked_for(server), "small files alone"

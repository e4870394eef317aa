"""A model of the store, or of a source, that is damaged in each of its files: one typed error that says which file and
what to do, nothing is held, and the daemon serves the others."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_runtime.protocol.checkpoint import INDEX_NAME, partition_name
from sllm_runtime.protocol.errors import CorruptCheckpoint, DigestMismatch, InvalidCheckpoint, ModelNotFound, SllmError
from tests.fixtures.loaderd import SMALL_CHUNK, loaded, loaderd, numbers_model

PARTITION = partition_name(0)
CONFIG = "config.json"
AGAIN = "convert the model again"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def of_another(path: Path) -> None:
    """The file that another model of the same shape has there."""
    shutil.copy(path.parents[2] / "other" / path.name, path)


def of_a_later_version(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))


STORED: dict[str, tuple[str, Callable[[Path], Any], type[SllmError], str]] = {
    "partition gone": (
        PARTITION,
        Path.unlink,
        ModelNotFound,
        "partition 0 of .* is neither on this .*register the model",
    ),
    "partition empty": (PARTITION, lambda path: os.truncate(path, 0), CorruptCheckpoint, rf"has 0 bytes.*{AGAIN}"),
    "partition cut": (PARTITION, cut, CorruptCheckpoint, rf"partition_0\.bin has \d+ bytes where .*{AGAIN}"),
    "partition flipped": (PARTITION, flip, CorruptCheckpoint, rf"chunk \d+ \(bytes \d+ to \d+\).*{AGAIN}"),
    "partition of another": (PARTITION, of_another, CorruptCheckpoint, rf"chunk \d+ \(bytes \d+ to \d+\).*{AGAIN}"),
    "index gone": (INDEX_NAME, Path.unlink, InvalidCheckpoint, r"index\.json cannot be read.*is .* a converted model"),
    "index cut": (INDEX_NAME, cut, DigestMismatch, rf"index\.json is the index of .*{AGAIN}"),
    "index flipped": (INDEX_NAME, flip, DigestMismatch, rf"index\.json is the index of .*{AGAIN}"),
    "index of another": (INDEX_NAME, of_another, DigestMismatch, rf"index\.json is the index of .*{AGAIN}"),
    "index of a later version": (INDEX_NAME, of_a_later_version, DigestMismatch, rf"index\.json is the index.*{AGAIN}"),
    "small file gone": (CONFIG, Path.unlink, CorruptCheckpoint, rf"config\.json cannot be read.*{AGAIN}"),
    "small file cut": (CONFIG, cut, CorruptCheckpoint, rf"config\.json is not the file its index names.*{AGAIN}"),
    "small file flipped": (CONFIG, flip, CorruptCheckpoint, rf"config\.json is not the file its index names.*{AGAIN}"),
}
"""What is done to which file of a model in the store."""

REGISTERED: dict[str, tuple[str, Callable[[Path], Any], type[SllmError], str]] = {
    "partition gone": (PARTITION, Path.unlink, SllmError, r"partition_0\.bin"),
    "partition cut": (PARTITION, cut, SllmError, r"partition_0\.bin"),
    "partition flipped": (PARTITION, flip, CorruptCheckpoint, r"chunk \d+ \(bytes \d+ to \d+\)"),
    "index cut": (INDEX_NAME, cut, InvalidCheckpoint, r"index"),
    "index of a later version": (INDEX_NAME, of_a_later_version, SllmError, r"version 99"),
    "small file flipped": (CONFIG, flip, CorruptCheckpoint, r"config\.json is not the file its index names"),
}
"""The same to a checkpoint that is to be registered."""


def checkpoint(directory: Path, seed: int) -> tuple[Path, dict[str, np.ndarray]]:
    """A converted model with a small file of its own."""
    arrays = numbers_model(directory / "source", seed=seed)
    (directory / "source" / CONFIG).write_text(json.dumps({"model_type": "numbers", "seed": seed}))
    convert_directory(
        directory / "source", directory / "checkpoint", options=ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0)
    )
    return directory / "checkpoint", arrays


async def test_a_model_of_the_store(tmp_path: Path) -> None:
    digests: dict[str, str] = {}
    async with loaderd(tmp_path) as daemon:
        for seed, name in enumerate((*STORED, "good")):
            made, arrays = checkpoint(tmp_path / name, seed)
            digests[name] = (await daemon.control.register(str(made))).model
            shutil.rmtree(made)  # nothing to make it good from
    shutil.copytree(daemon.model_directory(digests["good"]), tmp_path / "data" / "other")
    for name, (file, harm, _, _) in STORED.items():
        harm(daemon.model_directory(digests[name]) / file)
    async with loaderd(tmp_path) as daemon:
        for name, (_, _, error, words) in STORED.items():
            with pytest.raises(error) as caught:
                await loaded(daemon, digests[name])
            assert re.search(words, caught.value.message), (name, caught.value.message)
        there = await loaded(daemon, digests["good"])
        assert all(np.array_equal(there[name], array) for name, array in arrays.items())
        assert (await daemon.control.status()).pool.held == 0


async def test_a_model_that_is_registered(tmp_path: Path) -> None:
    async with loaderd(tmp_path) as daemon:
        for seed, (name, (file, harm, error, words)) in enumerate(REGISTERED.items()):
            made, _ = checkpoint(tmp_path / name, seed)
            harm(made / file)
            with pytest.raises(error) as caught:
                await daemon.control.register(str(made))
            assert re.search(words, caught.value.message), (name, caught.value.message)
        assert list(daemon.models.iterdir()) == [], "nothing of them is left"
        made, arrays = checkpoint(tmp_path / "good", 99)
        there = await loaded(daemon, (await daemon.control.register(str(made))).model)
        assert all(np.array_equal(there[name], array) for name, array in arrays.items())

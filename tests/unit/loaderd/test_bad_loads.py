"""What changes or runs out under a load or a registration: one typed error that names it, and nothing is held."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import Conflict, CorruptCheckpoint, Forbidden, ModelNotFound, SllmError, Unavailable
from sllm_runtime.protocol.limits import CHUNK_BYTES
from tests.fixtures.loaderd import LoaderProcess, loaded, loaderd, numbers_model, small_checkpoint
from tests.fixtures.range_server import range_server
from tests.fixtures.small_disk import fill, small_disk  # noqa: F401
from tests.fixtures.sources import object_store, s3_settings
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.loaderd.node import CHUNK, Node, stored_model


@pytest.fixture
def model(tmp_path: Path) -> Iterator[StoredModel]:
    with stored_model(tmp_path / "model", layers=6) as made:
        yield made


@pytest.mark.parametrize(
    ("harm", "words"),
    [("cut", r"partition_0\.bin"), ("spoilt", r"partition_0\.bin.*bytes \d+ to \d+"), ("replaced", "")],
)
def test_a_file_that_changes_while_it_is_read(model: StoredModel, harm: str, words: str) -> None:
    """The pool has room for two chunks: the others are read when these are on the device, so behind the change."""
    path = model.checkpoint.directory / partition_name(0)
    good = path.read_bytes()
    assert len(good) > 5 * CHUNK
    with contextlib.closing(Node(chunks=2, devices=1)) as node:
        wish = node.wish(model, device=0)
        node.until(lambda: wish.ready)
        if harm == "cut":
            os.truncate(path, 3 * CHUNK)
        elif harm == "spoilt":
            with path.open("r+b") as file:
                file.seek(3 * CHUNK)
                file.write(bytes(byte ^ 1 for byte in good[3 * CHUNK :]))
        else:  # another file by that name is none of this load's business: it has its own open
            path.rename(path.with_suffix(".old"))
            path.write_bytes(bytes(len(good)))
        node.until(lambda: wish.ended)
        (error,) = wish.ended
        if harm == "replaced":
            assert error is None
            return
        assert isinstance(error, CorruptCheckpoint)
        with pytest.raises(CorruptCheckpoint, match=words):
            raise error
        node.settle()
        node.gone("w")
        # A chunk that was read well beside the bad one may stay for the next load; nobody holds it.
        node.residency.evict(model.checkpoint.digest)
        assert (node.pool.status().used, node.devices[0].used) == (0, 0)
        path.write_bytes(good)
        again = node.wish(model, device=0)
        node.until(lambda: again.ended)
        assert again.ended == [None]


async def test_a_source_that_says_nothing_holds_up_no_other_for_long(tmp_path: Path) -> None:
    """Its server takes the connection and no more; one model at a time is registered."""
    numbers_model(tmp_path / "here")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}/slow"
        async with loaderd(tmp_path, conversions=1, listing_timeout=1) as daemon, asyncio.TaskGroup() as tasks:
            hangs = tasks.create_task(_refusal(daemon, uri))
            waits = tasks.create_task(daemon.control.register(str(tmp_path / "here")))
            assert uri in (await hangs).message
            assert (await waits).model in (await daemon.control.status()).models


async def test_a_source_that_stops_in_the_middle_of_a_file_holds_up_no_other(tmp_path: Path) -> None:
    """Its fetch lasts for as long as its attempts do. Models are converted one at a time."""
    numbers_model(tmp_path / "here")
    numbers_model(tmp_path / "served" / "there", seed=1)
    with range_server(tmp_path / "served") as server:
        server.script.extend(["stall 0"] * 100)
        async with loaderd(tmp_path, conversions=1) as daemon:
            fetching = asyncio.Event()
            hangs = asyncio.create_task(
                daemon.control.register(f"{server.url}/there", report=lambda *seen: fetching.set())
            )
            async with asyncio.timeout(GIVE_UP_S):
                await fetching.wait()
            here = await daemon.control.register(str(tmp_path / "here"))
            assert not hangs.done()
            assert (await daemon.control.status()).models == (here.model,)
            hangs.cancel()
            await asyncio.wait([hangs], timeout=GIVE_UP_S)
            assert hangs.cancelled()
            server.released.set()
            server.script.clear()
            assert (await daemon.control.register(f"{server.url}/there")).model != here.model, "its turn comes"


async def _refusal(daemon: LoaderProcess, uri: str) -> SllmError:
    with pytest.raises(Unavailable) as caught:
        await daemon.control.register(uri)
    return caught.value


HARMS: dict[str, type[SllmError]] = {"gone": ModelNotFound, "changed": Conflict, "longer": Conflict}


async def test_an_object_store_that_no_longer_gives_what_was_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = {}
    for seed, harm in enumerate(HARMS):
        checkpoint, digests[harm] = small_checkpoint(tmp_path / harm, seed=seed)
        shutil.copytree(checkpoint, tmp_path / "served" / "bucket" / harm)
    async with _beside_a_store(tmp_path, monkeypatch) as daemon:
        for harm, digest in digests.items():
            assert (await daemon.control.register(f"s3://bucket/{harm}")).model == digest
    async with _beside_a_store(tmp_path, monkeypatch, AWS_SECRET_ACCESS_KEY="WRONG") as daemon:
        with pytest.raises(Forbidden, match=r"gone/partition_0\.bin"):
            await loaded(daemon, digests["gone"])
    gone, changed, longer = (tmp_path / "served" / "bucket" / harm / partition_name(0) for harm in HARMS)
    gone.unlink()
    changed.write_bytes(bytes(changed.stat().st_size))
    longer.write_bytes(longer.read_bytes() + bytes(4096))
    async with _beside_a_store(tmp_path, monkeypatch) as daemon:
        for harm, error in HARMS.items():
            with pytest.raises(error, match=rf"{harm}/partition_0\.bin"):
                await loaded(daemon, digests[harm])
        status = await daemon.control.status()
        assert (status.pool.held, set(status.models)) == (0, set(digests.values())), "the daemon goes on"


@contextlib.asynccontextmanager
async def _beside_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: str
) -> AsyncIterator[LoaderProcess]:
    """A loaderd and a server that has just looked at its objects: rclone remembers what it saw."""
    with object_store(tmp_path / "served") as endpoint:
        for name, value in s3_settings(endpoint, **changes).items():
            monkeypatch.setenv(name, value)
        async with loaderd(tmp_path, ssd_bytes=0) as daemon:
            yield daemon


async def test_a_disk_that_is_full_ends_a_registration_and_leaves_nothing(
    tmp_path: Path,
    small_disk: Path,  # noqa: F811
) -> None:
    big = tmp_path / "big"
    big.mkdir()
    save_file({"a": np.zeros(32 * 2**20, np.uint8)}, big / "model.safetensors")
    numbers_model(tmp_path / "small")
    pool: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES, "pool_bytes": 4 * CHUNK_BYTES, "prefault_bytes": 0}
    async with loaderd(small_disk, ssd_bytes=0, **pool) as daemon:
        with pytest.raises(Unavailable, match=r"No space left on device.*check disk space"):
            await daemon.control.register(str(big))
        assert list(daemon.models.iterdir()) == []
        filled = fill(small_disk)
        with pytest.raises(SllmError, match="No space left on device"):
            await daemon.control.register(str(tmp_path / "small"))
        filled.unlink()
        info = await daemon.control.register(str(tmp_path / "small"))
        assert len(await loaded(daemon, info.model)) == 6

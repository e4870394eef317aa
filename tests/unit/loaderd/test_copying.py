"""Models that come to a node's disk for no load, in the real daemon."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.ssd.ledger import Copy, Ledger
from sllm_runtime.protocol.errors import Conflict, Forbidden, Unavailable
from tests.fixtures.loaderd import SMALL_CHUNK, LoaderProcess, loaded, loaderd, numbers_model, session, small_checkpoint
from tests.fixtures.range_server import RangeServer, range_server
from tests.fixtures.waiting import until

PARTITION = "partition_0.bin"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    directory, _ = small_checkpoint(tmp_path)
    served = tmp_path / "served" / "tiny"
    shutil.copytree(directory, served)
    return served


@pytest.fixture
def server(published: Path) -> Iterator[RangeServer]:
    with range_server(published.parent) as running:
        yield running


async def goes(daemon: LoaderProcess) -> None:
    """The sandbox, and what it has asked for comes to its end."""
    await daemon.control.gone("w")

    async def quiet() -> bool:
        return not any(sum(path.queued.values()) for path in (await daemon.control.status()).paths)

    await until(quiet, what="nothing is read or written")


async def loads_a_part(daemon: LoaderProcess, model: str) -> None:
    """Of ``model``: what it has of the SSD tier lacks the rest, which nobody brings."""
    async with session(daemon, model) as one:
        load = one.load(blocks=[(0, 0)])
        await asyncio.to_thread(load.wait, 0)
        load.detach()
    await goes(daemon)


async def test_a_copy_comes_to_the_disk_and_nothing_of_it_stays_in_memory(
    published: Path, server: RangeServer, tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(f"{server.url}/tiny")
        await daemon.control.copy(info.model, report=lambda *progress: told.append(progress))
        (copy,) = (daemon.data / "ssd").glob("*.bin")
        assert copy.read_bytes() == (published / PARTITION).read_bytes()
        status = await daemon.control.status()
        assert status.resident == ()
        assert status.pool.used == 0
        assert told[-1] == ("copy", info.nbytes, info.nbytes)
        assert sorted(told) == told, "it only grows"
        await daemon.control.copy(info.model)
        server.script.extend(["status 403"] * 50)
        assert len(await loaded(daemon, info.model)) > 1, "from the copy: the source refuses everything"


async def test_what_the_store_has_is_not_copied(tmp_path: Path) -> None:
    numbers_model(tmp_path / "model")
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(str(tmp_path / "model"))
        await daemon.control.copy(info.model)
        assert not list((daemon.data / "ssd").iterdir())


async def test_a_source_that_refuses_leaves_nothing(server: RangeServer, tmp_path: Path) -> None:
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(f"{server.url}/tiny")
        server.script.extend(["status 403"] * 50)
        with pytest.raises(Forbidden):
            await daemon.control.copy(info.model)
        status = await daemon.control.status()
        assert status.ssd is not None
        assert (status.ssd.used, status.pool.used) == (0, 0)
        assert not list((daemon.data / "ssd").iterdir())


async def test_a_tier_that_is_too_small_says_so(server: RangeServer, tmp_path: Path) -> None:
    async with loaderd(tmp_path, ssd_bytes=4096) as daemon:
        info = await daemon.control.register(f"{server.url}/tiny")
        with pytest.raises(Unavailable, match="the SSD tier has no room"):
            await daemon.control.copy(info.model)


async def test_what_may_pass_says_so_and_a_source_that_has_changed_does_not(
    published: Path, server: RangeServer, tmp_path: Path
) -> None:
    """A pull asks again for what says so, for two minutes; the rest it tells."""
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(f"{server.url}/tiny")
        server.script.append("stall 10")
        begun = asyncio.Event()
        copying = asyncio.create_task(daemon.control.copy(info.model, report=lambda *_: begun.set()))
        await begun.wait()
        with pytest.raises(Conflict, match="copied to the SSD tier already") as busy:
            await daemon.control.copy(info.model)
        assert busy.value.retry_after_s is not None
        server.released.set()
        await asyncio.wait_for(copying, 30.0)
        (copy,) = (daemon.data / "ssd").glob("*.bin")
        await daemon.control.delete(info.model)
        assert not copy.exists()
        await daemon.control.register(f"{server.url}/tiny")
        partition = published / PARTITION
        partition.write_bytes(bytes([partition.read_bytes()[0] ^ 1]) + partition.read_bytes()[1:])
        with pytest.raises(Conflict, match="has changed since it was registered") as changed:
            await daemon.control.copy(info.model)
        assert changed.value.retry_after_s is None


async def test_one_that_is_broken_off_leaves_nothing_and_can_be_asked_for_again(
    published: Path, server: RangeServer, tmp_path: Path
) -> None:
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(f"{server.url}/tiny")
        begun = asyncio.Event()
        copying = asyncio.create_task(daemon.control.copy(info.model, report=lambda *_: begun.set()))
        await begun.wait()
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)

        async def again() -> bool:
            try:
                await daemon.control.copy(info.model)
            except Conflict:  # the first is still letting go
                return False
            return True

        await until(again, what="the copy is made")
        (copy,) = (daemon.data / "ssd").glob("*.bin")
        assert copy.read_bytes() == (published / PARTITION).read_bytes()


async def test_a_model_without_a_byte_is_there_already(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    save_file({"none": np.zeros((0, 4), np.float32)}, tmp_path / "plain" / "model.safetensors")
    convert_directory(tmp_path / "plain", tmp_path / "served" / "none", options=ConvertOptions(chunk_bytes=SMALL_CHUNK))
    with range_server(tmp_path / "served") as server:
        async with loaderd(tmp_path) as daemon:
            info = await daemon.control.register(f"{server.url}/none")
            assert info.nbytes == 0
            await daemon.control.copy(info.model)


def test_kept_copies_go_last_and_only_for_what_is_wanted_as_well() -> None:
    ledger = Ledger(limit=30, kept=frozenset({"a"}))
    for used_at, name in enumerate("abc"):
        ledger.copies[name, 0] = Copy((name, 0), 10, used_at)

    def gone(nbytes: int, *, wanted: bool = False) -> str | None:
        victims = ledger.victims(nbytes, wanted=wanted)
        return None if victims is None else "".join(copy.key[0] for copy in victims)

    assert gone(10) == "b"
    assert gone(20) == "bc"
    assert gone(30) is None
    assert gone(30, wanted=True) == "bca"
    assert gone(31, wanted=True) is None


@pytest.mark.parametrize("blocks", [[(0, 0)], []], ids=["a part was wanted", "it was cancelled"])
async def test_a_load_of_a_part_holds_no_place_for_a_copy(
    published: Path, server: RangeServer, tmp_path: Path, blocks: list[tuple[int, int]]
) -> None:
    """What was loaded will never be a whole copy: nobody is told to wait for that, and the disk has its room back."""
    async with loaderd(tmp_path, remote_threads=1) as daemon:
        info = await daemon.control.register(f"{server.url}/tiny")
        async with session(daemon, info.model) as one:
            if not blocks:
                server.script.extend([None, "stall 10"])
            load = one.load(blocks=blocks)
            await asyncio.to_thread(load.wait, 0)
            load.detach()
        server.released.set()  # the sandbox is dead, with whatever it had asked for
        await goes(daemon)
        status = await daemon.control.status()
        assert 0 < sum(part.nbytes for part in status.resident) < info.nbytes, "a part of it is in memory"

        async def copied() -> bool:
            try:
                await daemon.control.copy(info.model)
            except Conflict as error:
                refused.append(error.message)
                return False
            return True

        refused: list[str] = []
        try:
            await until(copied, within_s=5.0, what="it is copied")
        except BaseException as error:
            raise AssertionError(refused[-1]) from error
        (copy,) = (daemon.data / "ssd").iterdir()
        assert copy.read_bytes() == (published / PARTITION).read_bytes()


async def test_a_load_of_a_part_holds_no_place_for_the_copy_of_another_model(
    published: Path, server: RangeServer, tmp_path: Path
) -> None:
    """Nobody brings the rest of it: who wants the place of that is not told to have a larger disk."""
    other, _ = small_checkpoint(tmp_path / "another", seed=1)
    shutil.copytree(other, published.parent / "other")
    size = (other / PARTITION).stat().st_size
    async with loaderd(tmp_path, remote_threads=1, ssd_bytes=size + size // 2) as daemon:
        tiny, wanted = [await daemon.control.register(f"{server.url}/{name}") for name in ("tiny", "other")]
        await loads_a_part(daemon, tiny.model)
        assert (await daemon.control.status()).resident, "a part of it is in memory"
        await daemon.control.copy(wanted.model)
        (copy,) = (daemon.data / "ssd").glob("[!.]*")
        assert copy.read_bytes() == (other / PARTITION).read_bytes()


async def test_a_copy_without_room_ends_no_other(published: Path, server: RangeServer, tmp_path: Path) -> None:
    other, _ = small_checkpoint(tmp_path / "another", layers=8, seed=1)
    shutil.copytree(other, published.parent / "other")
    size = (published / PARTITION).stat().st_size
    async with loaderd(tmp_path, remote_threads=1, ssd_bytes=size + size // 2) as daemon:
        tiny, wanted = [await daemon.control.register(f"{server.url}/{name}") for name in ("tiny", "other")]
        await loads_a_part(daemon, tiny.model)
        (half,) = (daemon.data / "ssd").iterdir()
        with pytest.raises(Unavailable, match="no room"):
            await daemon.control.copy(wanted.model)
        assert half.exists(), "it was given up, and the other one has no room in the whole tier"


async def test_a_copy_that_pinned_ones_leave_no_room_ends_no_other(
    published: Path,
    server: RangeServer,
    tmp_path: Path,
) -> None:
    third, _ = small_checkpoint(tmp_path / "third", seed=2)
    other, _ = small_checkpoint(tmp_path / "another", layers=8, seed=1)
    for name, found in (("third", third), ("other", other)):
        shutil.copytree(found, published.parent / name)
    size, large = ((each / PARTITION).stat().st_size for each in (third, other))
    assert large > 1.5 * size
    async with loaderd(tmp_path, remote_threads=1, ssd_bytes=large + size // 2) as daemon:
        tiny, pinned, wanted = [
            await daemon.control.register(f"{server.url}/{name}") for name in ("tiny", "third", "other")
        ]
        await daemon.control.copy(pinned.model)
        await daemon.control.pin(pinned.model)
        await loads_a_part(daemon, tiny.model)
        (half,) = (daemon.data / "ssd").glob(".*")
        with pytest.raises(Unavailable, match="no room"):
            await daemon.control.copy(wanted.model)
        assert half.exists(), "it was given up, and the other one has no room beside what is pinned"

"""Bundles on a node: fetched once, checked, kept within a limit, handed over so that nobody can change them."""

import asyncio
import errno
import hashlib
import mmap
import os
import threading
from pathlib import Path

import pytest

from sllm_invoker import bundles
from sllm_invoker.bundles import BundleCache, sealed
from sllm_runtime.protocol.errors import DigestMismatch, Unavailable
from tests.fixtures.waiting import GIVE_UP_S, until


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Source:
    """A store that counts."""

    def __init__(self, *bundles: bytes) -> None:
        self.bundles = {digest(data): data for data in bundles}
        self.asked: list[str] = []
        self.open = asyncio.Event()
        self.open.set()

    async def fetch(self, wanted: str, nbytes: int) -> bytes:
        self.asked.append(wanted)
        await self.open.wait()
        if wanted not in self.bundles:
            raise Unavailable("not now")
        return self.bundles[wanted]


def content(fd: int) -> bytes:
    data = os.read(fd, 10**6)
    os.close(fd)
    return data


async def test_a_bundle_is_fetched_once_also_by_starts_at_the_same_time(tmp_path: Path) -> None:
    source = Source(b"one")
    source.open.clear()
    cache = BundleCache(tmp_path / "bundles", source.fetch)
    opening = [asyncio.create_task(cache.open(digest(b"one"), 3)) for _ in range(3)]
    await asyncio.sleep(0)
    opening[0].cancel()  # one that gives up takes nothing from the others
    source.open.set()
    assert [content(fd) for fd in await asyncio.gather(*opening[1:])] == [b"one", b"one"]
    assert content(await cache.open(digest(b"one"), 3)) == b"one"
    assert len(source.asked) == 1
    again = BundleCache(tmp_path / "bundles", source.fetch)
    assert content(await again.open(digest(b"one"), 3)) == b"one"
    assert len(source.asked) == 1


async def test_a_damaged_copy_is_fetched_again_and_a_wrong_one_refused(tmp_path: Path) -> None:
    source = Source(b"one")
    cache = BundleCache(tmp_path, source.fetch)
    os.close(await cache.open(digest(b"one"), 3))
    (tmp_path / digest(b"one").removeprefix("sha256:")).write_bytes(b"two")
    assert content(await cache.open(digest(b"one"), 3)) == b"one"
    source.bundles[digest(b"three")] = b"four"
    with pytest.raises(DigestMismatch, match="deploy the function again"):
        await cache.open(digest(b"three"), 5)
    with pytest.raises(Unavailable):
        await cache.open(digest(b"five"), 4)
    source.bundles[digest(b"five")] = b"five"
    assert content(await cache.open(digest(b"five"), 4)) == b"five"


async def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    bundles = [bytes([number]) * 100 for number in range(4)]
    source = Source(*bundles)
    cache = BundleCache(tmp_path, source.fetch, limit=300)
    for step, number in enumerate([0, 1, 2, 0, 3]):
        os.close(await cache.open(digest(bundles[number]), 100))
        path = tmp_path / digest(bundles[number]).removeprefix("sha256:")
        os.utime(path, (step, step))  # no decision of this test hangs on how fine the clock of files is
    kept = set(os.listdir(tmp_path))
    assert kept == {digest(bundles[number]).removeprefix("sha256:") for number in (0, 2, 3)}


async def test_small_ones_are_not_kept_by_the_ten_thousand(tmp_path: Path) -> None:
    """Each start of a version that this node did not have looks at all of them, before it has its bundle."""
    for number in range(3000):
        (tmp_path / f"{number:064x}").write_bytes(b"x" * 1000)
    source = Source(b"new")
    cache = BundleCache(tmp_path, source.fetch)
    assert content(await cache.open(digest(b"new"), 3)) == b"new"
    kept = os.listdir(tmp_path)
    assert digest(b"new").removeprefix("sha256:") in kept
    assert len(kept) <= 1000


async def test_a_disk_that_takes_nothing_keeps_no_start_from_its_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(b"one")
    cache = BundleCache(tmp_path, source.fetch)
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write(path, data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for _ in range(2):
        assert content(await cache.open(digest(b"one"), 3)) == b"one"
    assert os.listdir(tmp_path) == []
    assert "is not kept, and is fetched again for the next start: [Errno 28] No space left" in caplog.text
    assert len(source.asked) == 2


async def test_what_cannot_be_read_is_fetched_again(tmp_path: Path) -> None:
    source = Source(b"one")
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / digest(b"one").removeprefix("sha256:")).mkdir()
    cache = BundleCache(tmp_path / "bundles", source.fetch)
    assert content(await cache.open(digest(b"one"), 3)) == b"one"


async def test_one_that_is_dropped_while_it_is_read_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(b"one")
    cache = BundleCache(tmp_path, source.fetch)
    os.close(await cache.open(digest(b"one"), 3))
    read = Path.read_bytes

    def dropped(path: Path) -> bytes:
        data = read(path)
        path.unlink()
        return data

    monkeypatch.setattr(Path, "read_bytes", dropped)
    assert content(await cache.open(digest(b"one"), 3)) == b"one"


async def test_half_a_bundle_of_a_killed_life_goes_at_the_next_start(tmp_path: Path) -> None:
    cache = BundleCache(tmp_path / "bundles", Source(b"one").fetch)
    cache.reset()
    os.close(await cache.open(digest(b"one"), 3))
    (tmp_path / "bundles" / ".0123456789abcdef.7").write_bytes(b"half")
    cache.reset()
    assert os.listdir(tmp_path / "bundles") == [digest(b"one").removeprefix("sha256:")]


async def test_a_start_that_is_cancelled_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is cancelled while a thread copies the bundle, which goes on to its end."""
    copying, go_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    made: list[int] = []

    def slow(data: bytes, name: str) -> int:
        loop.call_soon_threadsafe(copying.set)
        assert go_on.wait(GIVE_UP_S)
        made.append(sealed(data, name))
        return made[0]

    monkeypatch.setattr(bundles, "sealed", slow)
    opening = asyncio.create_task(BundleCache(tmp_path, Source(b"one").fetch).open(digest(b"one"), 3))
    await copying.wait()  # the loop goes on meanwhile
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    go_on.set()
    await until(lambda: made and not os.path.exists(f"/proc/self/fd/{made[0]}"), what="its descriptor is closed")


def test_a_sealed_bundle_cannot_be_changed() -> None:
    fd = sealed(b"bundle", "b")
    try:
        with pytest.raises(OSError, match="not permitted"):
            os.write(fd, b"x")
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 0)
        with pytest.raises(OSError, match="not permitted"):
            mmap.mmap(fd, 6, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        assert os.pread(fd, 10, 0) == b"bundle"
    finally:
        os.close(fd)

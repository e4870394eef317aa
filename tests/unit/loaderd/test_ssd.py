"""The SSD tier: limits, LRU, a full disk, and that no kill leaves half a copy."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sllm_loaderd.ssd.tier import SsdDirectory
from sllm_loaderd.ssd.write import CopyWrite
from sllm_runtime.protocol.errors import InternalError
from tests.fixtures.examples import examples
from tests.fixtures.waiting import GIVE_UP_S

CHUNK = 4096
WAIT = GIVE_UP_S


def name(number: int) -> str:
    return f"{number:064x}"


def digest(number: int) -> str:
    return f"sha256:{name(number)}"


def content(number: int, chunks: int) -> bytes:
    return b"".join(bytes([number % 251, chunk % 251]) * (CHUNK // 2) for chunk in range(chunks))


def put(tier: SsdDirectory, number: int, chunks: int, *, wanted: bool = False) -> bool:
    """Copy a whole model; False if there is no room."""
    write = tier.begin_copy((name(number), 0), chunks * CHUNK, CHUNK, wanted=wanted)
    if write is None:
        return False
    data = mmap.mmap(-1, chunks * CHUNK)  # at a page's border, as chunks are: written direct
    data[:] = content(number, chunks)
    for chunk in reversed(range(chunks)):
        write.write(chunk, memoryview(data)[chunk * CHUNK : (chunk + 1) * CHUNK])
    write.finish()
    return True


def get(tier: SsdDirectory, number: int, chunks: int) -> bytes | None:
    source = tier.open(digest(number), 0, chunks * CHUNK)
    if source is None:
        return None
    buffer = bytearray(chunks * CHUNK)
    source.read(memoryview(buffer), 0)
    source.close()
    return bytes(buffer)


def test_who_asks_what_there_is_does_not_wait_for_what_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To remove a large file takes seconds, and loaderd's event loop is among those who ask."""
    tier = SsdDirectory(tmp_path, 3 * CHUNK)
    assert put(tier, 0, 2)
    removing, go, unlink = threading.Event(), threading.Event(), Path.unlink

    def slow(path: Path, missing_ok: bool = False) -> None:
        removing.set()
        assert go.wait(WAIT)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(put, tier, 1, 2)
        try:
            assert removing.wait(WAIT)
            answer = threading.Thread(target=lambda: (tier.holds(digest(0), 0), tier.report()), daemon=True)
            answer.start()
            answer.join(WAIT)
            assert not answer.is_alive()
            assert not tier.holds(digest(0), 0)
        finally:
            go.set()
        assert putting.result(WAIT)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name(1)}.0.bin"]
    assert get(tier, 1, 2) == content(1, 2)


def test_a_full_disk_costs_no_copy_while_another_is_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room is free in the ledger, and a moment later on the disk."""
    tier = SsdDirectory(tmp_path, 4 * CHUNK)
    assert put(tier, 0, 3)
    assert put(tier, 1, 1)
    removing, full, go = threading.Event(), threading.Event(), threading.Event()
    unlink, allocate = Path.unlink, os.posix_fallocate

    def slow(path: Path, missing_ok: bool = False) -> None:
        removing.set()
        go.wait(WAIT)
        unlink(path, missing_ok=missing_ok)

    def used() -> Iterator[int]:
        for file in tmp_path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is being removed
                yield file.stat().st_size

    def small(fd: int, offset: int, nbytes: int) -> None:
        if sum(used()) + nbytes > 4 * CHUNK:
            full.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, nbytes)

    monkeypatch.setattr(Path, "unlink", slow)
    monkeypatch.setattr(os, "posix_fallocate", small)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(put, tier, 2, 1)
        assert removing.wait(WAIT)
        other = pool.submit(put, tier, 3, 2)
        try:
            assert full.wait(WAIT)
        finally:
            go.set()
        assert one.result(WAIT)
        assert other.result(WAIT)
    assert sorted(key[0] for key in tier.copies()) == [name(1), name(2), name(3)]


def test_the_least_recently_used_goes_first_and_a_restart_remembers(tmp_path: Path) -> None:
    ticks = itertools.count(10**18, 10**9)
    tier = SsdDirectory(tmp_path, 4 * CHUNK, lambda: next(ticks))
    assert [put(tier, number, 1) for number in range(4)] == [True] * 4
    assert get(tier, 0, 1) == content(0, 1)
    again = SsdDirectory(tmp_path, 4 * CHUNK, lambda: next(ticks))
    assert put(again, 4, 2)
    assert sorted(key[0] for key in again.copies()) == [name(0), name(3), name(4)]
    assert not put(again, 5, 5)  # larger than the tier: nothing goes for it
    assert len(again.copies()) == 3
    smaller = SsdDirectory(tmp_path, 2 * CHUNK, lambda: next(ticks))
    assert [key[0] for key in smaller.copies()] == [name(4)]


def test_what_is_pinned_or_read_stays(tmp_path: Path) -> None:
    tier = SsdDirectory(tmp_path, 2 * CHUNK)
    assert put(tier, 0, 1)
    assert put(tier, 1, 1)
    tier.pin(digest(0), True)
    reader = tier.open(digest(1), 0, CHUNK)
    assert reader is not None
    assert not put(tier, 2, 1)
    reader.close()
    assert put(tier, 2, 1)
    assert tier.holds(digest(0), 0)
    assert not tier.holds(digest(1), 0)
    tier.pin(digest(0), False)
    tier.delete(digest(0))
    assert tier.status() == (CHUNK, 2 * CHUNK)


def test_a_copy_is_seen_when_it_is_whole(tmp_path: Path) -> None:
    tier = SsdDirectory(tmp_path, 8 * CHUNK)
    write = tier.begin_copy((name(1), 0), 2 * CHUNK, CHUNK)
    assert write is not None
    assert tier.begin_copy((name(1), 0), 2 * CHUNK, CHUNK) is None  # it is being made
    write.write(1, memoryview(content(1, 2))[CHUNK:])
    assert tier.open(digest(1), 0, 2 * CHUNK) is None
    with pytest.raises(InternalError, match="1 chunks"):
        write.finish()
    assert not list(tmp_path.iterdir())
    assert tier.status()[0] == 0
    assert put(tier, 1, 2)
    assert tier.begin_copy((name(1), 0), 2 * CHUNK, CHUNK) is None  # it is there
    write = tier.begin_copy((name(2), 0), CHUNK, CHUNK)
    assert write is not None
    with pytest.raises(InternalError, match="given 5 bytes"):
        write.write(0, memoryview(b"12345"))
    write.abandon()
    write.abandon()


def test_a_copy_has_its_name_when_its_bytes_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses its power leaves no file whose bytes had not come to the disk."""
    steps, fsync, rename = list[str](), os.fsync, os.rename

    def synced(fd: int) -> None:
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).suffix}")
        fsync(fd)

    def renamed(source: Path, target: Path) -> None:
        steps.append(f"{source.suffix} becomes {target.suffix}")
        rename(source, target)

    (tmp_path / "tier").mkdir()
    tier = SsdDirectory(tmp_path / "tier", 8 * CHUNK)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    assert put(tier, 1, 2)
    assert steps == ["sync .partial", ".partial becomes .bin", "sync "]


def test_a_copy_whose_bytes_do_not_come_to_the_disk_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    tier = SsdDirectory(tmp_path, 8 * CHUNK)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="Input/output"):
            put(tier, 1, 2)
    assert not tier.making(digest(1), 0)
    assert (tier.status()[0], list(tmp_path.iterdir())) == (0, [])
    assert put(tier, 1, 2)


def test_a_copy_that_is_not_what_it_should_be_is_dropped(tmp_path: Path) -> None:
    tier = SsdDirectory(tmp_path, 8 * CHUNK)
    assert put(tier, 1, 2)
    assert tier.open(digest(1), 0, CHUNK) is None  # another size than the index says
    assert not tier.copies()
    assert put(tier, 1, 2)
    (tmp_path / f"{name(1)}.0.bin").unlink()
    assert tier.open(digest(1), 0, 2 * CHUNK) is None
    assert put(tier, 1, 2)
    tier.drop(digest(1), 0)
    tier.drop(digest(1), 0)
    assert not list(tmp_path.iterdir())


def test_a_copy_whose_name_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes would take the disk's room until the next start, and count nowhere."""

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tier = SsdDirectory(tmp_path, 8 * CHUNK)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", full)
        with pytest.raises(OSError, match="No space left"):
            put(tier, 1, 2)
    assert not tier.making(digest(1), 0)
    assert (tier.status()[0], list(tmp_path.iterdir())) == (0, [])
    assert put(tier, 1, 2)


def test_the_tier_can_be_off(tmp_path: Path) -> None:
    tier = SsdDirectory(tmp_path, 0)
    assert not put(tier, 1, 1)


FULL_DISK = """
import sys
from pathlib import Path
from sllm_loaderd.ssd.tier import SsdDirectory
from tests.unit.loaderd.test_ssd import CHUNK, content, digest, get, name, put
def there():
    return sorted(int(file.name[:64], 16) for file in (disk / "ssd").iterdir())
disk = Path(sys.argv[1])
tier = SsdDirectory(disk / "ssd", 100 * CHUNK)
assert put(tier, 1, 4) and put(tier, 2, 4)
(disk / "other").write_bytes(bytes(6 * CHUNK))
assert put(tier, 3, 4), "the oldest copy makes room"
assert get(tier, 1, 4) is None and get(tier, 2, 4) == content(2, 4) and get(tier, 3, 4) == content(3, 4)
assert not put(tier, 4, 15), "without all of them there would be no room"
assert there() == [2, 3], "so none goes, and nothing is left of it"
tier.keep([digest(2), digest(3)])
assert not put(tier, 5, 4), "what is to lie here stays"
assert there() == [2, 3]
assert put(tier, 5, 4, wanted=True), "unless the other is to lie here as well"
assert there() == [3, 5] and tier.status()[0] == 8 * CHUNK
assert put(tier, 6, 4), "the tier goes on"
assert there() == [3, 6]
"""


@pytest.mark.namespaces
def test_a_full_disk_costs_the_copies_that_make_room_and_nothing_else(tmp_path: Path) -> None:
    """On a file system of 64 KiB, mounted in a namespace of its own."""
    script = f"mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec {sys.executable} -c '{FULL_DISK}' {tmp_path}"
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    done = subprocess.run([*own, "sh", "-c", script], capture_output=True, text=True, check=False, timeout=WAIT)
    assert done.returncode == 0, done.stderr


# --- kill -9 ----------------------------------------------------------------------------------------
CHURN = """
import sys
from pathlib import Path
from sllm_loaderd.ssd.tier import SsdDirectory
from tests.unit.loaderd.test_ssd import CHUNK, put
tier = SsdDirectory(Path(sys.argv[1]), 20 * CHUNK)
for number in range(1_000_000):
    put(tier, number % 40, 1 + number % 7)
    if not number:
        print("one", flush=True)
"""


def test_no_kill_leaves_half_a_copy(tmp_path: Path) -> None:
    chance = random.Random(5)
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", CHURN, str(tmp_path)], stdout=subprocess.PIPE)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"one\n"
            try:
                process.wait(chance.uniform(0.01, 0.15))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            assert process.wait(WAIT) == -signal.SIGKILL
        tier = SsdDirectory(tmp_path, 20 * CHUNK)
        copies = tier.copies()
        assert copies
        assert sum(copies.values()) <= 20 * CHUNK
        assert len(list(tmp_path.iterdir())) == len(copies)
        for (hexadecimal, _), nbytes in copies.items():
            number = int(hexadecimal, 16)
            assert get(tier, number, nbytes // CHUNK) == content(number, nbytes // CHUNK)


# --- any order of events ----------------------------------------------------------------------------
class Tier(RuleBasedStateMachine):
    """Copies begin, end and are read in any order, with restarts between: what is seen is whole, and not too much."""

    def __init__(self) -> None:
        super().__init__()
        self.home = TemporaryDirectory(prefix="sllm-test-ssd-")
        self.directory = Path(self.home.name)
        self.ticks = itertools.count(10**18)
        self.writes: dict[int, tuple[CopyWrite, int, int]] = {}
        self.pinned: set[int] = set()
        self.last: list[int] = []

    @initialize(limit=st.integers(0, 12))
    def start(self, limit: int) -> None:
        self.limit = limit * CHUNK
        self.tier = SsdDirectory(self.directory, self.limit, lambda: next(self.ticks))

    @rule(number=st.integers(0, 5), chunks=st.integers(0, 6))
    def begin(self, number: int, chunks: int) -> None:
        kept = {n for n in self.pinned if self.tier.holds(digest(n), 0)}
        write = self.tier.begin_copy((name(number), 0), chunks * CHUNK, CHUNK)
        if write is not None:
            assert chunks
            assert number not in self.writes
            self.writes[number] = (write, chunks, 0)
        assert kept <= {n for n in range(6) if self.tier.holds(digest(n), 0)}

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.writes)))
        write, chunks, done = self.writes[number]
        if done == chunks:
            write.finish()
            del self.writes[number]
            assert self.tier.holds(digest(number), 0)
        else:
            write.write(done, memoryview(content(number, chunks))[done * CHUNK : (done + 1) * CHUNK])
            self.writes[number] = (write, chunks, done + 1)

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.writes)))
        self.writes.pop(number)[0].abandon()

    @rule(number=st.integers(0, 5))
    def read(self, number: int) -> None:
        nbytes = self.tier.copies().get((name(number), 0))
        if nbytes is not None:
            assert get(self.tier, number, nbytes // CHUNK) == content(number, nbytes // CHUNK)

    @rule(number=st.integers(0, 5), pinned=st.booleans())
    def pin(self, number: int, pinned: bool) -> None:
        self.tier.pin(digest(number), pinned)
        (self.pinned.add if pinned else self.pinned.discard)(number)

    @rule(number=st.integers(0, 5))
    def delete(self, number: int) -> None:
        self.tier.delete(digest(number))
        assert not self.tier.holds(digest(number), 0)

    @rule()
    def restart(self) -> None:
        before = self.tier.copies()
        for write, _, _ in self.writes.values():
            for fd in (write._fd, write._direct):  # as a kill does
                if fd is not None:
                    os.close(fd)
        self.writes.clear()
        self.pinned.clear()
        self.tier = SsdDirectory(self.directory, self.limit, lambda: next(self.ticks))
        assert self.tier.copies() == before

    @invariant()
    def within_the_limit(self) -> None:
        used, limit = self.tier.status()
        assert used <= limit
        on_disk = sum(file.stat().st_size for file in self.directory.iterdir())
        assert on_disk == used

    def teardown(self) -> None:
        for write, _, _ in self.writes.values():
            write.abandon()
        self.home.cleanup()


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)

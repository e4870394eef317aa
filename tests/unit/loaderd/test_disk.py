"""Local files: direct reads of any place and length, files that change, and what the page cache has."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_loaderd.disk.cached import cached_bytes
from sllm_loaderd.disk.local import LocalFile, LocalPartition
from sllm_loaderd.reader import Segment, SegmentedPartition, together
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import CorruptCheckpoint, InvalidCheckpoint, ModelNotFound, SllmError, Unavailable
from tests.fixtures.loaderd import drop

SIZE = 5 * 4096 + 123
SYSFS = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""On a file system that refuses direct I/O."""


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(7).randbytes(SIZE)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> Path:
    path = tmp_path_factory.mktemp("disk") / "data"
    path.write_bytes(data)
    return path


@given(
    offset=st.one_of(st.sampled_from((0, 4096, 2 * 4096)), st.integers(0, SIZE)),
    nbytes=st.integers(0, SIZE),
    shift=st.sampled_from((0, 0, 1, 512)),
    direct=st.booleans(),
    cold=st.booleans(),
)
def test_any_bytes_into_any_memory(
    file: Path, data: bytes, offset: int, nbytes: int, shift: int, direct: bool, cold: bool
) -> None:
    nbytes = min(nbytes, SIZE - offset)
    if cold:
        drop(file)
    source = LocalFile(file, direct=direct)
    with mmap.mmap(-1, 2 * SIZE) as memory, memoryview(memory) as whole:
        with whole[shift : shift + nbytes] as view:
            source.read(view, offset)
            assert view == data[offset : offset + nbytes]
        assert not any(whole[shift + nbytes :])
    source.close()


def test_a_direct_read_leaves_the_page_cache_empty(file: Path, data: bytes) -> None:
    drop(file)
    source = LocalFile(file)
    with mmap.mmap(-1, SIZE) as memory, memoryview(memory) as whole, whole[: 4 * 4096] as view:
        if source.read(view, 0) != "direct":
            pytest.skip("the temporary directory is on a file system without direct I/O")
        assert view == data[: 4 * 4096]
    fd = os.open(file, os.O_RDONLY)
    assert cached_bytes(fd, 0, 4 * 4096) == 0
    os.pread(fd, 4 * 4096, 0)
    known = cached_bytes(fd, 0, 4 * 4096)
    assert known in (0, 4 * 4096)  # 0: a kernel before 6.5 cannot say
    with mmap.mmap(-1, SIZE) as memory, memoryview(memory) as whole, whole[: 4 * 4096] as view:
        assert source.read(view, 0) == ("cached" if known else "direct")
        assert view == data[: 4 * 4096]
    os.close(fd)
    source.close()


def test_a_file_system_without_direct_io_is_read_through_the_cache() -> None:
    source = LocalFile(SYSFS)
    read = bytearray(4)
    assert source.read(memoryview(read), 0) == "buffered"
    assert bytes(read) == SYSFS.read_bytes()[:4]
    source.close()


def test_what_is_not_there_or_not_whole_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="none cannot be opened"):
        LocalFile(tmp_path / "none")
    with pytest.raises(CorruptCheckpoint, match=r"partition_0\.bin cannot be opened"):
        LocalPartition(tmp_path, 0, 4096)
    path = tmp_path / partition_name(0)
    path.write_bytes(bytes(100))
    with pytest.raises(CorruptCheckpoint, match="100 bytes where its index says 4096"):
        LocalPartition(tmp_path, 0, 4096)
    path.write_bytes(bytes(3 * 4096))
    source = LocalPartition(tmp_path, 0, 3 * 4096)
    os.truncate(path, 4096)
    with mmap.mmap(-1, 3 * 4096) as memory, memoryview(memory) as view:
        with pytest.raises(CorruptCheckpoint, match="ends at byte 4096"):
            source.read(view, 0)
        path.write_bytes(b"x" * 3 * 4096)
        with pytest.raises(CorruptCheckpoint, match="was changed while bytes 0 to 12288"):
            source.read(view, 0)
    source.close()


def test_a_disk_that_cannot_be_read_is_named_with_the_place() -> None:
    source = LocalFile(Path("/proc/self/mem"))  # nothing is mapped at 0: the kernel answers EIO
    with pytest.raises(CorruptCheckpoint, match=r"/proc/self/mem cannot be read at byte 0: Input/output error"):
        source.read(memoryview(bytearray(16)), 0)
    source.close()


@given(
    lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=5),
    gaps=st.lists(st.integers(0, 5000), min_size=5, max_size=5),
    span=st.tuples(st.integers(0, 60000), st.integers(0, 60000)),
)
def test_segments_of_several_objects_are_one_partition(
    file: Path, data: bytes, lengths: list[int], gaps: list[int], span: tuple[int, int]
) -> None:
    source = LocalFile(file)
    expected, segments = bytearray(), []
    for number, (length, gap) in enumerate(zip(lengths, gaps, strict=False)):
        expected += bytes(gap)
        segments.append(Segment(source, number * 100, len(expected), length))
        expected += data[number * 100 : number * 100 + length]
    expected += bytes(60000)
    offset, nbytes = min(span), abs(span[0] - span[1])
    read = bytearray(b"?" * nbytes)
    partition = SegmentedPartition("several", segments)
    assert partition.path == source.path
    partition.read(memoryview(read), offset)
    assert read == (expected + bytes(60000))[offset : offset + nbytes]
    partition.close()


@pytest.mark.parametrize(
    ("modes", "mode"),
    [([], ""), (["cached", "cached"], "cached"), (["cached", "direct", "cached"], "direct"), ([""], "")],
)
def test_what_comes_in_parts_is_cached_if_all_of_it_is(modes: list[str], mode: str) -> None:
    assert together(modes) == mode


def test_segments_that_overlap_or_come_by_two_ways_are_refused(file: Path) -> None:
    source = LocalFile(file)
    with pytest.raises(InvalidCheckpoint, match="overlap"):
        SegmentedPartition("bad", [Segment(source, 0, 0, 10), Segment(source, 0, 9, 10)])
    other = LocalFile(file)
    other.path = "peer x"
    with pytest.raises(InvalidCheckpoint, match="2 paths"):
        SegmentedPartition("bad", [Segment(source, 0, 0, 10), Segment(other, 0, 10, 10)])
    source.close()
    other.close()


def test_a_file_that_cannot_be_opened_twice_is_not_left_open(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last descriptor is not for who needs two: kept it would be nobody's for as long as the process lives."""
    real = os.open

    def short(path: str, flags: int, *others: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, flags, *others)

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "open", short)
    with pytest.raises(SllmError):
        LocalFile(file)
    assert os.listdir("/proc/self/fd") == before


def test_a_machine_that_is_short_of_memory_says_nothing_of_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``CorruptCheckpoint`` would have the SSD copy removed, and a person told to convert the model again."""
    source = LocalFile(file)

    def short(*_: object) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "preadv", short)
    with pytest.raises(Unavailable, match="Cannot allocate memory; try again"):
        source.read(memoryview(bytearray(16)), 0)
    source.close()

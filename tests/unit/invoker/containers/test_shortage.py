"""A container that has used up its memory is told from one that is silent for another reason."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_invoker.containers.control_group import Controller
from sllm_invoker.containers.shortage import NEAR, Memory, exhausted, read

GIB = 2**30
FULL = Memory(limit=GIB, used=GIB, files=GIB // 20, refused=1000, ends=0)


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        (FULL, True),
        (replace(FULL, refused=0), False),  # as much as it may have is not more
        (replace(FULL, files=GIB // 2), False),  # it has read much: that is given back
        (replace(FULL, used=GIB // 2, files=0), False),  # it stood there once
        (replace(FULL, used=GIB // 2, files=0, ends=1), True),  # and something of it was killed for that
    ],
)
def test_what_it_has_and_cannot_give_back_decides(memory: Memory, found: bool) -> None:
    assert exhausted(memory) is found


SIZES = st.integers(1, 2**40)


@given(limit=SIZES, files=st.integers(0, 2**40), used=SIZES, refused=st.integers(0, 9))
def test_pages_of_files_exhaust_nobody(limit: int, files: int, used: int, refused: int) -> None:
    memory = Memory(limit=limit, used=used, files=files, refused=refused, ends=0)
    more = replace(memory, used=used + GIB, files=files + GIB)
    assert exhausted(memory) is exhausted(more)
    assert not exhausted(memory) or used >= NEAR * limit


# --- as the kernel tells it ---------------------------------------------------------------------------
def group(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


V2 = {
    "memory.max": "1073741824\n",
    "memory.current": "1073700000\n",
    "memory.stat": "anon 10\nfile 300\nshmem 200\ninactive_anon 5\nactive_anon 6\ninactive_file 40\nactive_file 60\n",
    "memory.events": "low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n",
}
V1 = {
    "memory.limit_in_bytes": "1073741824\n",
    "memory.usage_in_bytes": "1073700000\n",
    "memory.stat": "cache 9\ninactive_file 1\nactive_file 1\ntotal_inactive_file 40\ntotal_active_file 60\n",
    "memory.failcnt": "12\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 1\noom_kill 1\n",
}
TOLD = Memory(limit=GIB, used=1073700000, files=100, refused=12, ends=2)


@pytest.mark.parametrize(("files", "unified"), [(V2, True), (V1, False)])
def test_both_versions_tell_the_same(tmp_path: Path, files: dict[str, str], unified: bool) -> None:
    own = Controller(group(tmp_path, files), unified)
    assert read(own) == TOLD
    for name in files:
        kept = (tmp_path / name).read_text()
        (tmp_path / name).unlink()
        assert read(own) is None, "a group that is gone tells nothing"
        (tmp_path / name).write_text("max\n")
        assert read(own) is None, "nor one that has no limit"
        (tmp_path / name).write_text(kept)


def test_a_kernel_of_version_1_may_not_count_kills(tmp_path: Path) -> None:
    files = {**V1, "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}
    assert read(Controller(group(tmp_path, files), unified=False)) == replace(TOLD, ends=0)

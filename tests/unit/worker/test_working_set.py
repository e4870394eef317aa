"""The pages that starts touch: recorded of real children, taken by real ones."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.worker.working_set import _PAGE, _ranges

CHILDREN = """
import mmap, os, resource, sys
from sllm_runtime.worker import working_set
from sllm_runtime.worker.working_set import WorkingSet, take

TAKES, MOST, LOOKS = sys.argv[1] == "take", int(sys.argv[2]), int(sys.argv[3])
PAGE = mmap.PAGESIZE
working_set.MOST = MOST
area = mmap.mmap(-1, 1000 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
area.madvise(mmap.MADV_NOHUGEPAGE)
area.write(b"x" * len(area))
found = WorkingSet()

def write(first, last):
    for page in range(first, last):
        area[page * PAGE] = 1

def faults(first, last):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    write(first, last)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def child(work):
    told, tell = os.pipe()
    held, hold = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(hold)
        os.write(tell, repr(work()).encode())
        os.read(held, 1)
        os._exit(0)
    said = os.read(told, 1000).decode()
    found.look(pid)
    os.close(hold)
    os.waitpid(pid, 0)
    return said

for first in range(100, 100 + 100 * LOOKS, 100):
    child(lambda: write(first, first + 100))
found.look(2**22 - 1)  # there is no such process

def second():
    take(found.pages, lambda: not TAKES)
    return [faults(first, first + 100) for first in range(100, 100 + 100 * LOOKS, 100)], faults(900, 1000)

print(child(second))
"""


def run(what: str, most: int = 2**25, looks: int = 1) -> tuple[list[int], int]:
    """Faults of a child at the pages that ``looks`` others have touched before it, a hundred each; and at a hundred
    that nobody has."""
    argv = [sys.executable, "-c", CHILDREN, what, str(most), str(looks)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    touched, untouched = eval(done.stdout)
    return touched, untouched


def test_what_one_child_has_touched_the_next_has_before_it_needs_it() -> None:
    touched, untouched = run("take")
    assert untouched >= 100, "a page that nobody took costs a fault"
    assert touched[0] < 5


def test_nothing_is_taken_while_somebody_waits() -> None:
    assert run("leave")[0][0] >= 100


def test_several_are_recorded_and_then_ever_fewer() -> None:
    touched, _ = run("take", looks=8)
    assert [count < 5 for count in touched] == [True] * 6 + [False, True]


def test_who_goes_through_all_memory_says_nothing_of_others() -> None:
    assert run("take", most=50 * _PAGE)[0][0] >= 100


@given(numbers=st.sets(st.integers(0, 300), max_size=100), near=st.integers(1, 20))
def test_ranges_hold_all_pages_and_none_that_is_far(numbers: set[int], near: int) -> None:
    found = list(_ranges(np.array(sorted(numbers), np.int64), near, copied=True))
    pages = [range(each.address // _PAGE, (each.address + each.nbytes) // _PAGE) for each in found]
    held = [page for each in pages for page in each]
    assert held == sorted(set(held)), "in order, each once"
    assert numbers <= set(held)
    assert all(each.start in numbers and each.stop - 1 in numbers for each in pages)
    assert all(after.start - before.stop >= near for before, after in pairwise(pages))
    between = sorted(set(held) - numbers)
    assert all(min(abs(page - there) for there in numbers) < near for page in between)
    if near == 1:
        assert set(held) == numbers


@pytest.mark.parametrize("pages", [[], [7]])
def test_few_pages(pages: list[int]) -> None:
    assert len(list(_ranges(np.array(pages, np.int64), 16, copied=False))) == len(pages)

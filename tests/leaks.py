"""A pytest plugin: a test that leaves something behind fails, and says what.

Looked at: processes (also those whose parent has gone, see `reaper`), files in TMPDIR and /dev/shm, open file
descriptors, threads that are not daemons, asyncio tasks. What is being closed has `GRACE_SECONDS` to go.
Fixtures of a wider scope may hold things between tests; they are checked when their module, and when the
session, is over. `@pytest.mark.leaves_behind("threads")` lets a
test off, by kind.
"""

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import reaper

GRACE_SECONDS = float(os.environ.get("SLLM_TEST_GRACE", "10"))
"""More than a loaded machine needs to end a process; a tidy test waits for none of it."""
POLL_SECONDS = 0.01
SHARED_MEMORY = Path("/dev/shm")
OF_THE_MACHINE = ("libpod_lock", "libpod_rootless_lock_")
"""How the locks begin that podman makes at its first command on a machine, even one that only asks, and keeps."""


@dataclass(frozen=True)
class Thing:
    """Something that was found: what it is, and the identities of what owns it (a process's ancestors)."""

    what: str
    owners: frozenset[str] = frozenset()


Found = dict[str, dict[str, Thing]]
"""Kind -> identity -> thing."""

_TMPDIR = Path(reaper.adopt())


_STANDARD = range(3)


def _user_pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


# What was there before the tests (kernel threads, other people's processes) can be no descendant of theirs. Once one
# has gone its number may be a descendant's.
_FAMILY = {str(os.getpid()), str(os.getppid())}
_STRANGERS = set(_user_pids()) - _FAMILY if reaper.ON_LINUX else set()


def processes() -> dict[str, Thing]:
    """Every descendant of the reaper but the test process itself, by id and start time."""
    stats = _stats()
    return {stats[pid][1]: Thing(_command_line(pid), owners) for pid, owners in _descendants(stats).items()}


def _stats() -> dict[int, tuple[int, str]]:
    """Process id -> parent's id, identity; without what was there before the tests."""
    stats: dict[int, tuple[int, str]] = {}
    names = _user_pids() if reaper.ON_LINUX else []
    _STRANGERS.intersection_update(names)
    for name in names:
        if name in _STRANGERS:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                fields = file.read(1024).rpartition(b")")[2].split()
        except OSError:
            continue
        stats[int(name)] = (int(fields[1]), f"{name} since {fields[19].decode()}")
    return stats


def _descendants(stats: dict[int, tuple[int, str]]) -> dict[int, frozenset[str]]:
    """The processes of `stats` (id -> parent, identity) that come from the reaper, each with its ancestors."""
    root, me = os.getppid(), os.getpid()
    ours = {}
    for pid, (parent, _) in stats.items():
        owners = set()
        while parent in stats and parent != root:
            owners.add(stats[parent][1])
            parent = stats[parent][0]
        if parent == root and pid not in (root, me):
            ours[pid] = frozenset(owners)
    return ours


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return b" ".join(words).decode(errors="replace").strip()[:200] or "zombie: nobody waited for it"


def files() -> dict[str, Thing]:
    """What lies in this run's TMPDIR, and in /dev/shm."""
    found = {str(path): Thing("in TMPDIR") for path in _TMPDIR.iterdir()}
    if SHARED_MEMORY.is_dir():
        things = (path for path in SHARED_MEMORY.iterdir() if not path.name.startswith(OF_THE_MACHINE))
        found |= {str(path): Thing("shared memory") for path in things}
    return found


def _in_use_by_strangers(path: str) -> bool:
    """Whether a process that no test of this run started has shared memory `path` open or mapped: then it is not ours.
    All runs on this machine see the same /dev/shm."""
    ours = _descendants(_stats()).keys() | {os.getpid(), os.getppid()}
    for pid in _user_pids():
        if int(pid) in ours:
            continue
        try:
            held = {os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")}
            if path in held or path in Path(f"/proc/{pid}/maps").read_text():
                return True
        except OSError:
            continue
    return False


def descriptors() -> dict[str, Thing]:
    """Open file descriptors of the test process, by number and by what is open: one that is closed gives its number to
    the next one."""
    found = {}
    for name in os.listdir("/proc/self/fd") if reaper.ON_LINUX else ():
        try:
            there = os.fstat(int(name))
            # Pytest has others in place of the standard ones while a test runs, and not always where it ends.
            which = name if int(name) in _STANDARD else f"{name} of {there.st_dev}:{there.st_ino}"
            found[which] = Thing(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # the one that listed the folder
    return found


def threads() -> dict[str, Thing]:
    """Threads that would keep the interpreter from ending."""
    return {str(thread.ident): Thing(thread.name) for thread in threading.enumerate() if not thread.daemon}


_REPORTED: set[str] = set()
_OF_OTHERS: set[str] = set()
"""Shared memory that was in use by others."""
LOOKS = {"processes": processes, "files": files, "descriptors": descriptors, "threads": threads}


def look(kinds: frozenset[str]) -> Found:
    """What there is now of each of `kinds`."""
    return {kind: LOOKS[kind]() for kind in kinds}


def left_behind(before: Found, now: Found) -> Found:
    """What is in `now` and was not in `before`, nor belongs to something that was: a platform that a wider fixture
    holds may start and stop processes of its own. What an earlier check has reported is not reported again."""
    left: Found = {}
    for kind, things in now.items():
        known = before[kind].keys() | _REPORTED
        left[kind] = {key: thing for key, thing in things.items() if key not in known and not thing.owners & known}
    return {kind: things for kind, things in left.items() if things}


def _settle(before: Found, kinds: frozenset[str]) -> Found:
    """What is left when everything that was about to close has had its time."""
    left = _of_this_run(left_behind(before, look(kinds)))
    if not left:
        return left
    gc.collect()
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        last = time.monotonic() >= deadline  # what goes while this machine stands still has gone in time
        left = _of_this_run(left_behind(before, look(kinds)))
        if last or not left:
            return left
        time.sleep(POLL_SECONDS)


def _of_this_run(left: Found) -> Found:
    """Without the shared memory that others hold: nobody waits for it to go."""
    for path in list(left.get("files", ())):
        if path.startswith(str(SHARED_MEMORY)) and (path in _OF_OTHERS or _in_use_by_strangers(path)):
            _OF_OTHERS.add(path)
            del left["files"][path]
    return {kind: things for kind, things in left.items() if things}


def _report(left: Found) -> str:
    lines = [f"  {kind}: {key} ({thing.what})" for kind, things in left.items() for key, thing in things.items()]
    return "\n".join(["left behind:", *lines])


def _watch(kinds: frozenset[str]) -> Iterator[None]:
    before = look(kinds)
    yield
    left = _settle(before, kinds)
    if left:
        _REPORTED.update(key for kind in ("processes", "files") for key in left.get(kind, ()))
        pytest.fail(_report(left), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_by_session() -> Iterator[None]:
    """Session-wide fixtures give back processes and files."""
    yield from _watch(frozenset({"processes", "files"}))


@pytest.fixture(scope="module", autouse=True)
def nothing_left_by_module() -> Iterator[None]:
    """Module-wide fixtures give back processes and files."""
    yield from _watch(frozenset({"processes", "files"}))


@pytest.fixture(autouse=True)
def nothing_left_by_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test gives back everything that it took."""
    excused = {kind for mark in request.node.iter_markers("leaves_behind") for kind in mark.args}
    yield from _watch(frozenset(LOOKS) - excused)


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Every asyncio task that a test started has ended before its loop is closed."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=GRACE_SECONDS)
    if left:
        names = "\n".join(f"  {task.get_name()}: {task.get_coro()}" for task in left)
        pytest.fail(f"asyncio tasks left behind:\n{names}", pytrace=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put `no_task_left` around everything else that a coroutine test asks for, and the look at what is left around
    that: the loop's own threads (`asyncio.to_thread`) end with the loop. Around both stands what lasts longer than the
    test, which it does not leave behind."""
    for item in items:
        if isinstance(item, pytest.Function) and asyncio.iscoroutinefunction(item.function):
            made = item._fixtureinfo.name2fixturedefs
            wider = [name for name in item.fixturenames if name in made and made[name][-1].scope != "function"]
            own = [name for name in item.fixturenames if name not in wider]
            item.fixturenames[:] = dict.fromkeys([*wider, "nothing_left_by_test", "no_task_left", *own])

"""Fetching for a conversion: parallel, whole or not at all, resumed where an attempt broke off."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from sllm_loaderd.convert import child
from sllm_loaderd.convert.child import bring
from sllm_loaderd.sources import Entry
from sllm_loaderd.sources.attempts import RemoteLimits
from sllm_loaderd.sources.fetch import KEPT_S, PART, fetch, forget, forget_old, place_of, resolve
from sllm_loaderd.sources.http import HttpSource
from sllm_loaderd.sources.remote import Remote
from sllm_runtime.protocol.errors import Conflict, Forbidden, InvalidCheckpoint, SllmError, Unavailable
from tests.fixtures.range_server import RangeServer, range_server
from tests.fixtures.waiting import GIVE_UP_S

WAIT = GIVE_UP_S
SIZES = {"model.safetensors": 3 * PART + 17, "config.json": 5, "empty.json": 0}
HASTE = RemoteLimits(stall_s=5, attempts=3, first_delay_s=0.001, longest_delay_s=0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    served = tmp_path / "served"
    served.mkdir()
    chance = random.Random(3)
    for name, size in SIZES.items():
        (served / name).write_bytes(chance.randbytes(size))
    with range_server(served) as running:
        yield running


@contextlib.contextmanager
def source(server: RangeServer) -> Iterator[HttpSource]:
    opened = HttpSource(server.url, Remote("http test", limits=HASTE))
    try:
        yield opened
    finally:
        opened.close()


def entries() -> list[Entry]:
    return [Entry(name, size) for name, size in SIZES.items()]


def whole(target: Path, server: RangeServer) -> bool:
    return all((target / name).read_bytes() == (server.directory / name).read_bytes() for name in SIZES)


def test_all_files_come_in_parts_with_progress(server: RangeServer, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with source(server) as opened:
        fetch(opened, entries(), tmp_path / "target", lambda done, total: seen.append((done, total)))
    assert whole(tmp_path / "target", server)
    assert {file.name for file in (tmp_path / "target").iterdir()} == set(SIZES)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (sum(SIZES.values()),) * 2


def test_an_attempt_that_fails_says_why_and_the_next_goes_on(server: RangeServer, tmp_path: Path) -> None:
    server.script.extend([None, None, "status 403"])
    with source(server) as opened, pytest.raises(Forbidden):
        fetch(opened, entries(), tmp_path / "target")
    assert not (tmp_path / "target").exists()
    server.script.clear()
    with source(server) as opened:
        fetch(opened, entries(), tmp_path / "target")
    assert whole(tmp_path / "target", server)
    assert not list(tmp_path.glob(".target*"))


def test_a_part_whose_bytes_a_crash_lost_is_fetched_again(server: RangeServer, tmp_path: Path) -> None:
    server.script.extend([None, None, None, "status 403"])
    with source(server) as opened, pytest.raises(Forbidden):
        fetch(opened, entries(), tmp_path / "target")
    (partial,) = tmp_path.glob(".target*")
    for name in SIZES:
        if (partial / name).exists():
            (partial / name).write_bytes(bytes(SIZES[name]))
    with (partial / ".parts").open("ab") as notes:
        notes.write(b'{"part": {"name": "../../x"')  # and a line that is torn
    server.script.clear()
    with source(server) as opened:
        fetch(opened, entries(), tmp_path / "target")
    assert whole(tmp_path / "target", server)


def test_two_do_not_fetch_the_same_at_once(server: RangeServer, tmp_path: Path) -> None:
    refused: list[SllmError] = []

    def again(done: int, total: int) -> None:
        if not refused:
            with source(server) as other, pytest.raises(Conflict) as caught:
                fetch(other, entries(), tmp_path / "target")
            refused.append(caught.value)

    with source(server) as opened:
        fetch(opened, entries(), tmp_path / "target", again)
    assert "being fetched by another" in refused[0].message
    assert whole(tmp_path / "target", server)


FETCH = """
import sys
from pathlib import Path
from sllm_loaderd.sources.fetch import fetch
from sllm_loaderd.sources.http import HttpSource
from tests.unit.loaderd.test_fetch import entries
fetch(HttpSource(sys.argv[1]), entries(), Path(sys.argv[2]), lambda done, total: print(done, flush=True))
"""


def test_a_kill_leaves_what_the_next_attempt_goes_on_with(server: RangeServer, tmp_path: Path) -> None:
    server.script.extend([None, None, "stall 100", "stall 100"])
    command = [sys.executable, "-c", FETCH, server.url, str(tmp_path / "target")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()  # one part is there
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT)
    assert not (tmp_path / "target").exists()
    server.script.clear()
    server.released.set()
    # Another server, since this one may still be about to hear what the dead process asked for.
    with range_server(server.directory) as again, source(again) as opened:
        fetch(opened, entries(), tmp_path / "target")
        assert len(again.ranges) < 5, "the part that was there was not asked for again"
    assert whole(tmp_path / "target", server)


def test_what_no_attempt_goes_on_with_is_removed(tmp_path: Path) -> None:
    """Half of a model whose source has changed since has another name than what is fetched now."""
    old, new, whole = (place_of(tmp_path, "http://x", fingerprint) for fingerprint in "abc")
    old = old.with_name(f".{old.name}.partial")
    for directory, age in ((old, KEPT_S + 60), (new, 60.0), (whole, KEPT_S + 60)):
        directory.mkdir(parents=True)
        file = directory / "model.safetensors"
        file.touch()
        for path in (file, directory):
            os.utime(path, (1e9 - age, 1e9 - age))
    forget_old(tmp_path / "none", 1e9)
    fd = os.open(old, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(fd, fcntl.LOCK_EX)  # as one that is being fetched
    forget_old(tmp_path, 1e9)
    assert sorted(old.parent.iterdir()) == sorted([old, new])
    os.close(fd)
    forget_old(tmp_path, 1e9)
    assert list(old.parent.iterdir()) == [new]


def test_what_is_removed_is_not_found_by_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = place_of(tmp_path, "http://x", "a")
    old.mkdir(parents=True)
    (old / "config.json").write_text("{}")
    removed: list[Path] = []

    def breaks_off(directory: Path) -> None:
        removed.append(directory)
        raise OSError("the machine has gone")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", breaks_off)
        forget_old(tmp_path, 1e11)
    assert not old.exists()
    (aside,) = removed
    assert (aside / "config.json").is_file()
    forget_old(tmp_path, 1e11)
    assert list(old.parent.iterdir()) == []


def test_what_a_conversion_begins_with_stays(server: RangeServer, tmp_path: Path) -> None:
    with source(server) as opened:
        fetched = resolve(opened, tmp_path, fingerprint="a")
        for path in (fetched, *fetched.iterdir()):
            os.utime(path, (0, 0))
        assert resolve(opened, tmp_path, fingerprint="a") == fetched
    forget_old(tmp_path, time.time())
    assert (fetched / "model.safetensors").is_file()


def test_a_model_that_was_fetched_and_refused_is_not_kept(server: RangeServer, tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint):
        bring(server.url, tmp_path / "staging", tmp_path / "cache", "")
    assert not list((tmp_path / "cache" / "fetched").iterdir())


@pytest.mark.parametrize("converted", [True, False])
def test_what_has_no_room_is_not_begun(server: RangeServer, tmp_path: Path, converted: bool) -> None:
    """What is fetched has room, what is made of it beside it has not; or not even that."""
    free = shutil.disk_usage(tmp_path).free
    large = [Entry("model.safetensors", free * 3 // 4 if converted else free * 2)]
    with source(server) as opened, pytest.raises(Unavailable, match=r"needs \d+ bytes .* are free; make room"):
        fetch(opened, large, tmp_path / "target", converted=converted)
    assert not server.ranges
    assert not [file for partial in tmp_path.glob(".target*") for file in partial.iterdir()]


def no_room(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_becomes_full_has_its_room_back(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: no_room() if at else pwrite(fd, data, at))
    with source(server) as opened, pytest.raises(OSError, match="No space left"):
        fetch(opened, entries(), tmp_path / "target")
    assert not list(tmp_path.glob(".target*"))


def test_what_was_fetched_goes_where_its_conversion_has_no_room(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "write_checkpoint", no_room)
    with pytest.raises(OSError, match="No space left"):
        bring(server.url, tmp_path / "staging", tmp_path / "cache", "")
    assert not list((tmp_path / "cache" / "fetched").iterdir())


def test_only_what_was_fetched_is_removed(tmp_path: Path) -> None:
    own, fetched = tmp_path / "model", place_of(tmp_path / "cache", "http://x", "a")
    for directory in (own, fetched):
        directory.mkdir(parents=True)
        forget(directory, tmp_path / "cache")
    assert own.is_dir()
    assert not fetched.exists()

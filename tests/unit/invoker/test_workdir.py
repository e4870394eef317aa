"""Work directories go, whatever a function has left in them: as a user whom modes hold back."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sllm_invoker.workdir import Workdirs, remove

NOBODY = 65534
DEEP = sys.getrecursionlimit() + 100


def as_nobody(place: Path, act: Callable[[], object]) -> None:
    """``act`` in ``place``, in a child process that has no privileges; what is above ``place`` it need not enter."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.chdir(place)
            if os.geteuid() == 0:
                os.chown(".", NOBODY, NOBODY)
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            act()
            status = 0
        except BaseException:
            logging.getLogger().exception("in the child")
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def locked(workdir: Path) -> None:
    """What a function may leave there: it may neither be listed nor written to."""
    for mode in (0o500, 0o000, 0o300):
        inner = workdir / f"{mode:o}" / "inner"
        inner.mkdir(parents=True)
        (inner / "file").touch(mode=0o000)
        inner.chmod(mode)
        inner.parent.chmod(mode)


def test_modes_keep_nothing_from_being_removed(tmp_path: Path) -> None:
    def act() -> None:
        root = Path("work")
        workdirs = Workdirs(root)
        workdirs.reset()
        workdir = workdirs.make("i-1")
        locked(workdir)
        remove(workdir)
        assert list(root.iterdir()) == []
        locked(workdirs.make("i-2"))
        root.chmod(0o500)
        workdirs.reset()
        assert list(root.iterdir()) == []
        workdirs.make("i-2")

    as_nobody(tmp_path, act)


def test_depth_keeps_nothing_from_being_removed(tmp_path: Path) -> None:
    workdirs = Workdirs(tmp_path / "work")
    workdirs.reset()
    top = os.open(workdirs.make("i-1"), os.O_RDONLY)
    at = os.dup(top)
    for _ in range(DEEP):
        os.mkdir("d", dir_fd=at)
        inner = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
    os.close(top)
    workdirs.reset()
    assert list((tmp_path / "work").iterdir()) == []


async def test_no_link_is_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "inner").mkdir(parents=True)
    (other / "inner" / "file").touch()
    (other / "inner").chmod(0o500)
    workdirs = Workdirs(tmp_path / "work")
    workdirs.reset()
    workdir = workdirs.make("i-1")
    (workdir / "link").symlink_to(other)
    (workdir / "deeper").mkdir()
    (workdir / "deeper" / "link").symlink_to(other / "inner")
    await workdirs.remove(workdir)
    assert not workdir.exists()
    (tmp_path / "work" / "i-2").symlink_to(other)
    workdirs.reset()
    assert (other / "inner" / "file").exists()
    assert (other / "inner").stat().st_mode & 0o777 == 0o500


def test_what_stays_is_said_and_keeps_no_node_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workdirs = Workdirs(tmp_path / "work")
    workdirs.reset()
    (workdirs.make("i-1") / "file").touch()

    def refuse(*_given: object, **_named: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as kernel:
        kernel.setattr(os, "unlink", refuse)
        workdirs.reset()
    assert "cannot be removed: Operation not permitted" in caplog.text
    workdirs.make("i-2")

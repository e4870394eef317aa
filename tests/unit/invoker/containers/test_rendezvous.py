"""The directory in which a container meets its invoker: one connection, for whoever sees it."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from sllm_invoker.containers.arguments import User
from sllm_invoker.containers.rendezvous import Rendezvous, peer_pid
from sllm_runtime.protocol.worker import RENDEZVOUS
from tests.fixtures.waiting import GIVE_UP_S

ME = User(uid=os.geteuid(), gid=os.getegid())
DOOR = Path(RENDEZVOUS).name


def connect(directory: Path) -> socket.socket:
    """As a container does, for which the path is a short one."""
    opened = os.open(directory, os.O_PATH)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(f"/proc/self/fd/{opened}/{DOOR}")
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(opened)
    return sock


async def test_the_first_is_admitted_and_no_second(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)  # longer than a socket's address may be
    meeting = Rendezvous(deep, "sb-1", ME)
    assert meeting.door.stat().st_mode & 0o777 == 0o700
    with connect(meeting.door) as first:
        async with asyncio.timeout(GIVE_UP_S):
            admitted = await meeting.admit()
        with admitted:
            assert peer_pid(admitted) == os.getpid()
            first.sendall(b"hello")
            assert admitted.recv(16) == b"hello"
            with pytest.raises(FileNotFoundError):
                connect(meeting.door)
    meeting.close()
    assert not any(deep.iterdir())
    meeting.close()


async def test_who_waits_behind_the_first_is_sent_away(tmp_path: Path) -> None:
    meeting = Rendezvous(tmp_path, "sb-1", ME)
    with connect(meeting.door), connect(meeting.door) as second:
        async with asyncio.timeout(GIVE_UP_S):
            (await meeting.admit()).close()
        with pytest.raises(ConnectionResetError):
            second.recv(1)
    meeting.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
async def test_the_directory_belongs_to_who_runs_in_the_container(tmp_path: Path) -> None:
    meeting = Rendezvous(tmp_path, "sb-1", User(uid=65534, gid=65534))
    assert {path.stat().st_uid for path in (meeting.door, meeting.door / DOOR)} == {65534}
    assert meeting.door.parent.stat().st_uid == 0
    meeting.close()

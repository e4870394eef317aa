"""A sandbox's connection to loaderd, against words of loaderd that come when they come."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from sllm_loaderd.client.session import LoaderSession
from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol.codec import pack
from sllm_runtime.protocol.errors import CorruptCheckpoint, Unavailable
from sllm_runtime.protocol.loader import Failed, Welcome
from tests.fixtures.waiting import GIVE_UP_S


def test_the_failure_of_a_load_that_was_let_go_ends_no_other() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ThreadPoolExecutor(1) as threads:
        loaderd = BlockingWire(theirs)
        opening = threads.submit(LoaderSession, ours.detach())
        assert loaderd.receive() is not None
        loaderd.send(pack(Welcome(model="m")))
        session = opening.result(GIVE_UP_S)
        try:
            first = session.load()
            first.detach()
            loaderd.send(pack(Failed(request=1, error=CorruptCheckpoint("spoilt").body())))
            second = session.load()
            loaderd.send(pack(Failed(request=2, error=CorruptCheckpoint("also spoilt").body())))
            with pytest.raises(CorruptCheckpoint, match="also spoilt"):
                second.index(GIVE_UP_S)
            loaderd.send(pack(Failed(request=0, error=Unavailable("all is over").body())))
            assert b"".join(iter(lambda: theirs.recv(2**16), b"")), "it heard what was asked, then the end"
        finally:
            session.close()

"""Whatever comes on a socket of a real daemon: typed refusals, nobody else's model, nothing kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol.checkpoint import INDEX_NAME, index_digest
from sllm_runtime.protocol.codec import pack, unpack
from sllm_runtime.protocol.errors import InternalError
from sllm_runtime.protocol.limits import MAX_MESSAGE
from sllm_runtime.protocol.loader import (
    Answer,
    Chunks,
    DeviceMemory,
    Failed,
    Files,
    Hello,
    Load,
    Message,
    Welcome,
)
from tests.fixtures.examples import examples
from tests.fixtures.loaderd import LoaderProcess, loaded, loaderd, numbers_model, small_checkpoint
from tests.fixtures.waiting import GIVE_UP_S, until

EXAMPLES = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DEVICE = "fake:0"


@dataclass(frozen=True)
class Said:
    """Bytes as they go out, and how many descriptors go with them."""

    data: bytes
    fds: int = 0


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


# --- what is said -------------------------------------------------------------------------------------
OWN, OTHER = "own", "other"
"""Stand for the digests of the sandbox's own model and of somebody else's."""
TAGS = (
    "Hello", "Load", "Detach", "Reorder", "Cancel", "Register", "Describe", "Delete", "Pin", "Evict", "Grant",
    "Gone", "GetStatus", "Adopt", "AdoptDevice", "Stored", "Chunks", "Nothing",
)  # fmt: skip
FIELDS = (
    "type", "request", "model", "partition", "blocks", "device", "priority", "version", "holder", "fds", "ids",
    "numbers", "nbytes",
)  # fmt: skip
NUMBERS = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**64 - 1))
PLACES = st.sampled_from((OWN, OTHER, "sha256:" + "0" * 64, "sha256:../../etc", "", "cpu", DEVICE, "fake:9", "cuda:0"))
VALUES = st.recursive(
    st.one_of(NUMBERS, PLACES, st.text(max_size=8), st.binary(max_size=8), st.booleans(), st.none(), st.floats()),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
RIGHT = {"request": 1, "model": OWN, "version": Hello().version, "holder": "w", "blocks": [], "partition": 0}
WORDS = st.builds(
    lambda tag, right, wrong: {"type": tag, **right, **wrong},
    st.sampled_from(TAGS),
    st.sampled_from(({}, RIGHT)),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
)
LOADS = st.builds(
    lambda **fields: {"type": "Load", **fields},
    request=st.integers(1, 3),
    model=st.one_of(st.sampled_from((OWN, OTHER)), PLACES),
    partition=st.sampled_from((0, 0, 0, 1, -1, 2**40)),
    blocks=st.one_of(st.just([]), st.lists(st.tuples(st.integers(-1, 6), NUMBERS), max_size=3)),
    device=st.one_of(st.sampled_from(("cpu", DEVICE)), PLACES),
)
DATA = st.one_of(
    st.binary(max_size=40),
    st.binary(max_size=40).map(framed),
    st.builds(lambda length, rest: struct.pack(">I", length) + rest, st.integers(0, 2**32 - 1), st.binary(max_size=40)),
    st.integers(MAX_MESSAGE, 2**32 - 1).map(lambda length: struct.pack(">I", length)),
)
WHAT = st.builds(
    lambda loads, rest: [*((load, 0) for load in loads), *rest],
    st.lists(LOADS, max_size=4),
    st.lists(st.tuples(st.one_of(WORDS, DATA), st.sampled_from((0, 0, 1, 5))), max_size=2),
)
"""Loads that are nearly right, then what ends the connection."""


def spelt(what: list[tuple[Any, int]], names: dict[str, str]) -> list[Said]:
    """Words with the digests that are meant, as bytes."""

    def meant(value: Any) -> Any:
        if isinstance(value, list):
            return [meant(each) for each in value]
        return names.get(value, value) if isinstance(value, str) else value

    def data(said: Any) -> bytes:
        if isinstance(said, bytes):
            return said
        return framed(msgspec.msgpack.encode({key: meant(value) for key, value in said.items()}))

    return [Said(data(said), fds) for said, fds in what]


# --- a conversation -----------------------------------------------------------------------------------
def heard(sock: socket.socket, said: list[Said]) -> list[tuple[Message, bytes]]:
    """Say it all, then listen to the end. Each answer with the bytes of its first descriptor (of ``Files``)."""
    sock.settimeout(GIVE_UP_S)
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has heard enough
            for each in said:
                if each.data:
                    socket.send_fds(sock, [each.data], [null] * each.fds)
            sock.shutdown(socket.SHUT_WR)
    finally:
        os.close(null)
    answers = []
    with contextlib.closing(BlockingWire(sock)) as wire, contextlib.suppress(ConnectionResetError):
        while (payload := wire.receive()) is not None:
            message: Any = unpack(Answer, payload)  # type: ignore[arg-type]
            fds = wire.fds.take(message.fds) if isinstance(message, Files | Chunks | DeviceMemory) else []
            answers.append((message, _index(message, fds[0]) if isinstance(message, Files) else b""))
            for fd in fds:
                os.close(fd)
    return answers


def _index(message: Files, fd: int) -> bytes:
    (entry,) = [entry for entry in message.files if entry.name == INDEX_NAME]
    return os.pread(fd, entry.nbytes, entry.offset)


def check_typed(answers: list[tuple[Message, bytes]]) -> None:
    for message, _ in answers:
        if isinstance(message, Failed):
            error = message.error.to_error()
            assert not isinstance(error, InternalError), error
            assert error.message


@dataclass(frozen=True)
class Node:
    runner: asyncio.Runner
    daemon: LoaderProcess
    names: dict[str, str]
    arrays: dict[str, np.ndarray]
    came_in: int
    """What ``came_in`` was before anybody came."""

    def check_goes_on(self) -> None:
        """It serves its own sandboxes, and of the hostile ones nothing is left."""
        self.runner.run(self._check())

    async def _check(self) -> None:
        control = self.daemon.control
        await control.gone("w")
        assert set(await control.models()) == {self.names[OWN], self.names[OTHER]}
        await until(self._free, what="what was on its way for them has ended")
        there = await loaded(self.daemon, self.names[OWN], "fair")
        assert all(np.array_equal(there[name], array) for name, array in self.arrays.items())
        await until(lambda: came_in(self.daemon) <= self.came_in, what="no connection and nothing sent by it is left")

    async def _free(self) -> bool:
        status = await self.daemon.control.status()
        return (status.pool.held, status.devices[0].used) == (0, 0)


def came_in(daemon: LoaderProcess) -> int:
    """Connections of the daemon, and descriptors of the kind that is sent to it here."""
    found = 0
    for link in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += str(link.readlink()).startswith(("socket:", os.devnull))
    return found


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("hostile")
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        daemon = runner.run(stack.enter_async_context(loaderd(directory, fake_devices="1x4MiB@8GB/s")))
        try:
            made = {name: small_checkpoint(directory / name, seed=seed)[0] for seed, name in enumerate((OWN, OTHER))}
            names = {name: runner.run(daemon.control.register(str(place))).model for name, place in made.items()}
            yield Node(runner, daemon, names, numbers_model(directory / "same"), came_in(daemon))
        finally:
            runner.run(stack.aclose())


def test_a_sandbox_gets_its_own_model_and_typed_refusals(node: Node) -> None:
    @EXAMPLES
    @given(st.sampled_from((True, True, True, False)), WHAT)
    def say(greeted: bool, what: list[tuple[Any, int]]) -> None:
        fd = node.runner.run(node.daemon.control.grant("w", node.names[OWN], devices=("cpu", DEVICE)))
        first = [Said(framed(pack(Hello())))] if greeted else []
        with socket.socket(fileno=fd) as sock:
            answers = heard(sock, [*first, *spelt(what, node.names)])
        check_typed(answers)
        for message, index in answers:
            if isinstance(message, Welcome):
                assert message.model == node.names[OWN]
            if isinstance(message, Files):
                assert index_digest(index) == node.names[OWN]

    say()
    node.check_goes_on()


def test_rubbish_on_the_control_socket_is_refused(node: Node) -> None:
    """What comes there is the invoker's word, so only what is none of its words, or names no model of the node."""
    nobody = {OWN: "sha256:" + "1" * 64, OTHER: "sha256:" + "2" * 64}

    @EXAMPLES
    @given(st.sampled_from((True, True, True, False)), WHAT)
    def say(greeted: bool, what: list[tuple[Any, int]]) -> None:
        first = [Said(framed(pack(Hello())))] if greeted else []
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(node.daemon.socket))
            check_typed(heard(sock, [*first, *spelt(what, nobody)]))

    say()
    node.check_goes_on()


def test_a_length_that_never_comes_is_refused_before_its_bytes(node: Node) -> None:
    fd = node.runner.run(node.daemon.control.grant("w", node.names[OWN]))
    with socket.socket(fileno=fd) as sock:
        answers = heard(sock, [Said(framed(pack(Hello()))), Said(struct.pack(">I", MAX_MESSAGE + 1))])
    failed = answers[-1][0]
    assert isinstance(failed, Failed)
    assert (failed.request, failed.error.code) == (0, "protocol_error")
    node.check_goes_on()


def test_a_load_of_somebody_elses_model_is_forbidden(node: Node) -> None:
    fd = node.runner.run(node.daemon.control.grant("w", node.names[OWN]))
    said: tuple[Message, ...] = (Hello(), Load(request=1, model=node.names[OTHER]))
    with socket.socket(fileno=fd) as sock:
        answers = [message for message, _ in heard(sock, [Said(framed(pack(each))) for each in said])]
    assert [type(message) for message in answers] == [Welcome, Failed]
    assert isinstance(answers[1], Failed)
    assert (answers[1].request, answers[1].error.code, answers[1].error.field) == (1, "forbidden", "model")
    node.check_goes_on()

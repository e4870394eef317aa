"""The parts of ``sandbox`` that need no container engine."""

import asyncio
import mmap
import os
import time
from pathlib import Path

import pytest

from benchmarks.programs import ProgramFailed
from benchmarks.sandbox_kinds import PROCESSES, TwoSteps, processes
from benchmarks.sandbox_platform import pss
from benchmarks.sandbox_relay import STAMPED, Observer, delay
from benchmarks.sandbox_starts import CALLS, ECHO, one_start
from benchmarks.sandbox_worker import copied, packed
from sllm_invoker.containers.arguments import ContainerSpec, Owner, User
from sllm_loaderd.chunk import MEMFD_NAME
from sllm_runtime.protocol.frames import Beat, Frame, FrameKind, Segment, ToGateway
from tests.fixtures.waiting import GIVE_UP_S

MIB = 2**20


def test_weights_are_counted_by_their_share() -> None:
    fd = os.memfd_create(MEMFD_NAME)
    file = str(os.fstat(fd).st_ino)
    os.truncate(fd, MIB)
    try:
        with mmap.mmap(fd, MIB) as one, mmap.mmap(fd, MIB) as other:
            one.write(bytes([1]) * MIB)
            assert other.read() == bytes([1]) * MIB
            assert pss(os.getpid())[file] == MIB
            assert file not in pss(os.getpid(), weights=False)
            assert sum(pss(os.getpid(), weights=False).values()) > MIB
    finally:
        os.close(fd)
    assert file not in pss(os.getpid())


def test_a_delay_is_that_of_tokens_that_are_all_there() -> None:
    tokens = [(1_000_000, 0, 0), (4_000_000, 1, 2_000_000), (9_000_000, 2, 6_000_000)]
    assert delay(tokens, 3) == 2.0
    for wrong in (tokens[:2], tokens[::-1], [*tokens, tokens[-1]]):
        with pytest.raises(ProgramFailed):
            delay(wrong, 3)


async def test_an_observer_takes_tokens_and_nothing_else() -> None:
    observer = Observer(2)
    kinds = (FrameKind.OUTPUT, FrameKind.IDS, FrameKind.OUTPUT)
    frames = tuple(Frame(index, kind, b'"t%d@7."' % index) for index, kind in enumerate(kinds))
    began = time.monotonic_ns()
    observer.on_message(ToGateway((Beat("c", 1, 0), Segment("c", 1, frames))), "subject")
    tokens = await observer.all_there()
    assert [(index, made) for _, index, made in tokens] == [(0, 7), (2, 7)]
    assert all(at >= began for at, _, _ in tokens)


async def test_a_container_is_created_and_started_when_it_is_let_go(tmp_path: Path) -> None:
    program = tmp_path / "engine"
    program.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/said\necho the-id\n')
    program.chmod(0o755)
    engine = TwoSteps("podman", str(program))
    spec = ContainerSpec(
        name="sb-1", image="it", owner=Owner(node="n", place="p", boot="b"), rendezvous=tmp_path,
        user=User(uid=1, gid=1), memory=1, cpu=1.0, pids=1, tmp=1, files=1, processes=1,
    )  # fmt: skip
    async with asyncio.timeout(GIVE_UP_S):
        running = asyncio.create_task(engine.run(spec, ("python",)))
        await engine.created.wait()
        assert (tmp_path / "said").read_text() == "create\n"
        assert not running.done()
        engine.go.set()
        assert await running == "the-id"
    assert (tmp_path / "said").read_text() == "create\nstart\n"


@pytest.mark.slow
async def test_processes_of_both_kinds_start_and_answer(tmp_path: Path) -> None:
    function = packed(copied(ECHO, tmp_path, "echoing"))
    async with processes(tmp_path) as systems:
        assert tuple(systems) == PROCESSES
        for number, system in enumerate(systems.values()):
            start = await one_start(system, function, tmp_path / f"home-{number}")
            assert len(start.calls) == CALLS
            assert start.worker > 0
            assert start.used.cpu_s > 0 < start.used.pss_mib
            assert start.calls_cpu_s >= 0


def test_what_a_stream_is_followed_by_says_when_it_was_made(tmp_path: Path) -> None:
    built = packed(copied(STAMPED, tmp_path, "stamped"))
    assert built.files == ("stamped.py",)
    assert built.manifest.handler.streams

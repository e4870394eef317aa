"""What a worker makes of the part of an instance that it is given."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.ranks import AutoPlan
from sllm_runtime.platform.framing import frame
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import InvalidArgument, OutOfMemory, ProtocolError
from sllm_runtime.protocol.manifest import Handler, Manifest
from sllm_runtime.protocol.stages import Failed
from sllm_runtime.protocol.worker import Assign, Member
from sllm_runtime.worker.joined import Joined
from sllm_runtime.worker.shares import layers_of, ranges
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.worker.conftest import Loader
from tests.unit.worker.harness import Worker, Zygote, bundle_of, manifest


@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_share_all_layers_out_evenly(count: int, stages: int) -> None:
    if stages > count:
        with pytest.raises(InvalidArgument, match=f"{count} layers cannot be shared out over {stages} stages"):
            layers_of(count, stages, 0)
        return
    found = [layers_of(count, stages, number) for number in range(stages)]
    assert (found[0].low, found[-1].high) == (0, count)
    assert all(one.high == other.low for one, other in pairwise(found))
    sizes = {each.high - each.low for each in found}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@given(st.lists(st.integers(0, 40)))
def test_ranges_hold_each_block_once(blocks: list[int]) -> None:
    found = ranges(blocks)
    assert [block for first, last in found for block in range(first, last + 1)] == sorted(set(blocks))
    assert all(one[1] + 1 < other[0] for one, other in pairwise(found)), "those that touch are one"


def assigned(member: Member, startup_timeout: float = GIVE_UP_S) -> Assign:
    handler = Handler(entry="user:fn", kind="generator", streams=True)
    manifest = Manifest(name="fn", handler=handler, startup_timeout=startup_timeout)
    return Assign(instance="fn-1", function="fn", version=1, manifest=manifest, bundle="", member=member)


def test_sockets_that_are_not_as_many_as_the_part_has_are_refused_and_closed() -> None:
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    with pytest.raises(ProtocolError, match="3 descriptors came"):
        Joined.of(assigned(Member(number=1, stages=2)), fds)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_one_process_has_nobody_to_be_joined_to() -> None:
    fds = [1, 2]
    assert Joined.of(assigned(Member()), fds) is None
    assert fds == [1, 2]


@pytest.mark.parametrize("hours", [720, 1_193.0465, 876_000])
@pytest.mark.parametrize("kind", ["stages", "ranks"])
def test_a_start_that_may_take_for_ever_waits_for_the_others(kind: str, hours: float) -> None:
    """By ``poll``, whose milliseconds have 31 bits: those of 1193 hours and some are 1 ms in 32 bits."""
    (one, before), (two, behind) = socket.socketpair(), socket.socketpair()
    member = Member(number=1, **{kind: 2})
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)] + [before.detach(), behind.detach()]
    joined = Joined.of(assigned(member, hours * 3600), fds)
    assert joined is not None
    with one, two, contextlib.ExitStack() as stack:
        stack.callback(joined.fail, OutOfMemory("it is over"))
        for fd in fds:
            stack.callback(os.close, fd)
        later = threading.Timer(0.2, one.sendall, [frame(codec.pack(Failed(OutOfMemory("it needs more").body())))])
        stack.callback(later.join)
        later.start()
        with pytest.raises(OutOfMemory, match="it needs more"):
            joined.edges[0].receive(joined.patience_s)


@pytest.mark.parametrize("kind", ["stages", "ranks"])
def test_who_cannot_begin_tells_the_other_why(kind: str) -> None:
    """Also where it has not come to the meeting yet."""
    members = [Member(number=number, **{kind: 2}) for number in (0, 1)]
    first, second = (list(pair) for pair in zip(socket.socketpair(), socket.socketpair(), strict=True))
    if kind == "stages":  # what goes to the one behind comes from before
        second.reverse()
    joined = []
    for member, sockets in zip(members, (first, second), strict=True):
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)] + [each.detach() for each in sockets]
        made = Joined.of(assigned(member), fds)
        assert made is not None
        assert len(fds) == 2, "its own stay"
        for fd in fds:
            os.close(fd)
        joined.append(made)
    head, other = joined
    other.fail(OutOfMemory("it needs more"))
    with pytest.raises(OutOfMemory, match="it needs more"):
        head.edges[0].receive(GIVE_UP_S)
    head.fail(OutOfMemory("so does this"))


# --- real processes -------------------------------------------------------------------------------
SOURCE = """
def fn(model, ever: bool = False):
    go_on = True
    while go_on:
        go_on = ever
        try:
            yield from model.generate("what stages say", max_tokens=5, ignore_eos=True)
        except Exception as error:
            go_on = yield f"caught {error}"
"""
STAGED = manifest(kind="generator", streams=True, model="m", engine=True, memory="256MiB", parallelism={"pipeline": 2})


DEVICES = ("cpu", "fake:0", "fake:1")


class Two:
    """The two processes of one instance: ``given`` are the models that they get the weights of; ``parted``: each from
    a partition of its own, to a device of its own."""

    def __init__(
        self, zygote: Zygote, loader: Loader, given: tuple[Path, Path], workdir: Path, *, parted: bool = False
    ) -> None:
        self.members = (zygote.spawn(), zygote.spawn())
        (ours, theirs), (back, behind) = socket.socketpair(), socket.socketpair()
        edges = ((back, ours), (theirs, behind))
        for number, (worker, ends, model) in enumerate(zip(self.members, edges, given, strict=True)):
            worker.assign(
                STAGED,
                bundle_of({"user.py": SOURCE}),
                workdir=workdir,
                session=loader.grant(model, (number,), DEVICES) if parted else loader.grant(model),
                devices=DEVICES if parted else ("cpu",),
                edges=[each.detach() for each in ends],
                member=Member(number=number, stages=2),
                model=model.name,
            )

    def close(self) -> None:
        for worker in self.members:
            worker.close()


class Pairs(Protocol):
    """Makes the two processes of an instance; see ``Two``."""

    def __call__(self, one: Path, other: Path, *, parted: bool = False) -> tuple[Worker, Worker]: ...


@pytest.fixture
def two(zygote: Zygote, loader: Loader, tmp_path: Path) -> Iterator[Pairs]:
    made: list[Two] = []

    def make(one: Path, other: Path, *, parted: bool = False) -> tuple[Worker, Worker]:
        workdir = tmp_path / f"instance-{len(made)}"
        workdir.mkdir()
        made.append(Two(zygote, loader, (one, other), workdir, parted=parted))
        return made[-1].members

    yield make
    for each in made:
        each.close()
    zygote.exited(zygote.count)


def begun(head: Worker) -> None:
    head.until(lambda: head.ready is not None or head.failed is not None)
    assert head.ready is not None, head.failed


def exit_code(zygote: Zygote, back: int) -> int:
    """Of the worker that was made ``back`` workers before the last."""
    return zygote.exited(zygote.count - back).code


def test_a_call_over_two_processes_and_an_end_in_order(
    two: Pairs, models: Callable[[str], Path], zygote: Zygote
) -> None:
    head, other = two(models("llama"), models("llama"))
    begun(head)
    assert head.ready is not None
    assert "layer_ranges" in head.ready.capabilities
    assert len(head.run().text) > 0
    head.stop()
    head.wait_dead()
    other.wait_dead()
    assert (exit_code(zygote, 1), exit_code(zygote, 0)) == (0, 0), "who drives gave the other one back"
    assert other.failed is None


def parted(models: Callable[[str], Path], place: Path, plan: str) -> Path:
    """The model ``llama`` in two partitions."""
    convert_directory(models("llama"), place, options=ConvertOptions(plan=AutoPlan(plan, 2)))
    return place


def test_each_stage_has_a_partition_and_a_device_of_its_own(
    two: Pairs, models: Callable[[str], Path], tmp_path: Path
) -> None:
    whole, _ = two(models("llama"), models("llama"))
    begun(whole)
    model = parted(models, tmp_path / "parted", "auto-stages")
    head, other = two(model, model, parted=True)
    begun(head)
    assert head.run().text == whole.run().text
    assert other.failed is None


def test_partitions_that_are_no_stages_are_refused_with_the_plan_that_makes_them(
    two: Pairs, models: Callable[[str], Path], tmp_path: Path
) -> None:
    model = parted(models, tmp_path / "parted", "auto-layers")
    for worker in two(model, model, parted=True):
        worker.until(lambda worker=worker: worker.failed is not None)  # type: ignore[misc]
        assert worker.failed is not None
        assert worker.failed.error.code == "start_failed"
        assert "convert the model with --plan auto-stages:2" in worker.failed.error.message


def test_one_that_is_gone_is_not_told_to_the_function(two: Pairs, models: Callable[[str], Path]) -> None:
    """A function that catches everything would answer with it; its call is to go on elsewhere."""
    head, other = two(models("llama"), models("llama"))
    begun(head)
    number = head.call({"ever": True})
    head.outputs(number, 1)
    other.kill()
    head.until(lambda: head.failed is not None)
    assert head.failed is not None
    assert head.failed.error.code == "instance_lost"
    assert "is gone" in head.failed.error.message
    assert not any(text.startswith("caught") for text in head.answers[number].outputs)
    assert head.answers[number].end is None


def test_one_with_other_weights_fails_the_start_of_both_in_the_same_words(
    two: Pairs, models: Callable[[str], Path]
) -> None:
    head, other = two(models("llama"), models("tied_llama"))
    for worker in (head, other):
        worker.until(lambda worker=worker: worker.failed is not None)  # type: ignore[misc]
        assert worker.failed is not None
        assert worker.failed.error.code == "start_failed"
        assert "would compute other bits" in worker.failed.error.message

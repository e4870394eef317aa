"""A device that computes nothing more for its process, once a step on it has failed: played, on a CPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from sllm_runtime.protocol.errors import FunctionError, InstanceLost, InternalError, SllmError
from sllm_runtime.worker.engine import devices
from sllm_runtime.worker.engine.base import Engine, Request
from sllm_runtime.worker.engine.choice import Settings, choose_engine
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.gpu.device import Device
from sllm_runtime.worker.engine.ours.gpu.fast_ops import FastOps
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.numerics import EXACT, GPU_FAST
from sllm_runtime.worker.engine.sinks import Piece, ThreadSink
from tests.fixtures.families import family
from tests.fixtures.models import BUILDERS
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.worker.engine.driver import MIB, Letters, request
from tests.unit.worker.engine.stand_in import CPU, engine_of

STEPS = 3


def sticky() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`.")


def failing(ask: Callable[[], None]) -> OurEngine:
    """Its third step fails as a kernel does; its device is asked by ``ask`` then."""
    model, left = family("llama"), iter([*[None] * (STEPS - 1), sticky])
    device = Device(CPU, FastOps(), None, ask=ask)
    core = engine_of(
        build("LlamaForCausalLM", model.config, model.state_dict(), torch.float32, EXACT.rows, device), GPU_FAST
    )
    collect = core.runner.collect

    def collected() -> object:
        if (fails := next(left, None)) is not None:
            fails()
        return collect()

    core.runner.collect = collected  # type: ignore[assignment,method-assign]
    return core


@contextmanager
def running(core: Engine) -> Iterator[EngineLoop]:
    loop = EngineLoop(core, Letters())
    loop.start()
    try:
        yield loop
    finally:
        loop.close()


def asked(loop: EngineLoop, *requests: Request) -> list[ThreadSink]:
    sinks = [ThreadSink() for _ in requests]
    for each, sink in zip(requests, sinks, strict=True):
        loop.submit(each, sink)
    return sinks


def test_its_calls_hear_nothing_and_its_process_is_to_end(caplog: pytest.LogCaptureFixture) -> None:
    """So they go on at another instance: what is told of a call is its end. What broke it is in the log: nobody can ask
    this process again."""
    lost, is_lost, pieces = list[SllmError](), threading.Event(), list[Piece]()

    def lose(error: SllmError) -> None:
        lost.append(error)
        is_lost.set()

    with running(failing(sticky)) as loop:
        loop.on_lost(lose)
        (sink,) = asked(loop, request())
        assert is_lost.wait(GIVE_UP_S)
        while not sink._pieces.empty():
            pieces.append(sink._pieces.get())
    assert len(pieces) == STEPS - 1
    assert not any(piece.last for piece in pieces)
    (error,) = lost
    assert isinstance(error, InstanceLost)
    assert error.message.startswith("cpu computes nothing more in this process: CUDA error: an illegal memory access")
    assert "\n" not in error.message
    assert ", in collected" in caplog.text
    assert "RuntimeError: CUDA error: an illegal memory access was encountered" in caplog.text


def failing_module(ask: Callable[[torch.device], None], monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Of a class that ours does not know. Its second step fails."""
    monkeypatch.setattr(devices, "ask", ask)
    module, left = BUILDERS["phi"]().eval(), iter([None, sticky])
    forward = module.forward

    def computed(*args: object, **more: object) -> object:
        if (fails := next(left, None)) is not None:
            fails()
        return forward(*args, **more)

    monkeypatch.setattr(module, "forward", computed)
    made = choose_engine(module, {}, module.config.to_dict(), Settings(4 * MIB)).engine
    assert made.name == "transformers"
    return made


def test_the_engine_over_transformers_ends_its_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves every call by itself, and would fail each of them as that call's own."""
    lost = queue.Queue[SllmError]()
    with running(failing_module(lambda _device: sticky(), monkeypatch)) as loop:
        loop.on_lost(lost.put)
        (sink,) = asked(loop, request())
        error = lost.get(timeout=GIVE_UP_S)
    assert isinstance(error, InstanceLost)
    assert error.message.startswith("cpu computes nothing more in this process: CUDA error")
    assert sink._pieces.qsize() == 1


def test_a_forward_that_fails_on_a_device_that_is_well_is_its_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[SllmError] = []
    with running(failing_module(lambda _device: None, monkeypatch)) as loop:
        loop.on_lost(lost.append)
        with pytest.raises(FunctionError, match="illegal memory access"):
            list(asked(loop, request())[0])
    assert lost == []


def test_where_nobody_could_go_on_elsewhere_they_are_told() -> None:
    """As in one call without a platform."""
    with running(failing(sticky)) as loop, pytest.raises(InstanceLost):
        list(asked(loop, request())[0])


def test_a_step_that_fails_on_a_device_that_is_well_ends_those_in_it() -> None:
    lost: list[SllmError] = []
    with running(failing(lambda: None)) as loop:
        loop.on_lost(lost.append)
        with pytest.raises(InternalError, match="illegal memory access"):
            list(asked(loop, request())[0])
        assert len([*asked(loop, request())[0]]) == 12, "the next one is served"
    assert lost == []

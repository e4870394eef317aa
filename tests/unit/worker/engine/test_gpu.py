"""Our engine on a real GPU. Skipped, with the reason, where there is none; what needs none is in ``test_device``."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sllm_runtime.worker.engine.choice import Settings, backend_of, choose_engine
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.gpu.device import Device
from sllm_runtime.worker.engine.ours.gpu.runner import DeviceRunner
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import EXACT, GPU_EXACT, GPU_FAST, Numerics
from tests.fixtures.families import FAMILIES, family
from tests.unit.worker.engine import driver, test_device_adapters
from tests.unit.worker.engine.driver import MIB, Rows, finish, request, run
from tests.unit.worker.engine.stand_in import DeviceRows
from tests.unit.worker.engine.test_device import TOKENS
from tests.unit.worker.engine.test_exactness import OPTIONS, stream

pytestmark = pytest.mark.gpu
LEVELS = pytest.mark.parametrize("numerics", [GPU_FAST, GPU_EXACT], ids=lambda level: level.name)


@pytest.fixture(autouse=True)
def gpu(compiled: None, record_property: Callable[[str, object], None]) -> torch.device:
    """The first, which the report names."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch sees no CUDA device")
    record_property("device", torch.cuda.get_device_name(0))
    return torch.device("cuda:0")


def decoder(name: str, gpu: torch.device, dtype: torch.dtype = torch.float32) -> Decoder:
    model: Any = family(name, dtype)
    tensors = {name: tensor.to(gpu) for name, tensor in model.state_dict().items()}
    return build(type(model).__name__, model.config, tensors, dtype, EXACT.rows, backend_of(gpu))


def engine(made: Decoder, numerics: Numerics, record: Any = None) -> OurEngine:
    assert isinstance(made.backend, Device)
    runner = DeviceRunner(made, made.backend, numerics, record=record)
    return OurEngine(made, frozenset(), numerics, 8 * MIB, proven=numerics is GPU_EXACT, runner=runner)


def refuse(compute: object) -> Any:
    raise RuntimeError("as the test wants it")


@LEVELS
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_cpu(name: str, numerics: Numerics, gpu: torch.device) -> None:
    rows = DeviceRows(decoder(name, gpu), TOKENS, numerics)
    found = torch.cat([rows.chunk(0, 100), rows.chunk(100, 49), rows.chunk(149, 1)]).cpu()
    assert (found - Rows(driver.decoder(name), TOKENS).chunk(0, 150)).abs().max() <= 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma 3", "mixtral", "falcon 40b"])
def test_the_self_test_proves_the_exact_level(name: str, gpu: torch.device) -> None:
    model: Any = copy.deepcopy(family(name, torch.bfloat16)).to(gpu)
    chosen = choose_engine(model, {}, {}, Settings(8 * MIB, "sha256:1"))
    assert chosen.engine.capabilities.exact_resume
    again = choose_engine(model, {}, {}, Settings(8 * MIB, "sha256:1", chosen.proof))
    assert again.engine.fingerprint == chosen.engine.fingerprint


@pytest.mark.parametrize("options", OPTIONS)
def test_a_resume_goes_on_at_every_position(options: dict[str, Any], gpu: torch.device) -> None:
    made = decoder("llama", gpu, torch.bfloat16)
    first = request(max_tokens=40, prompt=range(5, 101), **options)
    whole = run(engine(made, GPU_EXACT), first)[0]
    resumed = [replace(first, id=at, emitted=whole[:at]) for at in range(len(whole))]
    for at, rest in run(engine(made, GPU_EXACT), *resumed).items():
        assert whole[:at] + rest == whole, at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma 2", "mixtral"])
def test_graphs_are_equal_to_steps_by_themselves(name: str, dtype: torch.dtype, gpu: torch.device) -> None:
    made = decoder(name, gpu, dtype)
    asked = [replace(each, sampling=replace(each.sampling, logprobs=0)) for each in map(stream, range(17))]
    captured, plain = engine(made, GPU_EXACT), engine(made, GPU_EXACT, refuse)
    rows, expected = driver.rows_of(captured), driver.rows_of(plain)
    assert run(captured, *asked) == run(plain, *asked)
    assert isinstance(captured.runner, DeviceRunner)
    assert captured.runner.graphs is not None
    assert captured.runner.graphs.layouts
    assert not captured.runner.graphs.refused
    assert all(torch.equal(row, expected[key]) for key, row in rows.items())


def test_fast_mode_is_captured_too(gpu: torch.device) -> None:
    core = engine(decoder("llama", gpu, torch.bfloat16), GPU_FAST)
    run(core, *(request(number, max_tokens=20) for number in range(5)))
    assert isinstance(core.runner, DeviceRunner)
    assert core.runner.graphs is not None
    assert not core.runner.graphs.refused


def test_rows_with_adapters_are_the_same_alone_and_beside_any_others(gpu: torch.device) -> None:
    """Greedy ones among them, whose tokens are chosen on the device where a step has no others."""
    core = engine(decoder("llama", gpu, torch.bfloat16), GPU_EXACT)
    for kind, (rank, targets) in test_device_adapters.KINDS.items():
        core.decoder.lora.put(kind, test_device_adapters.adapter(rank, targets))
    requests = [test_device_adapters.asked(number, temperature=number % 2 * 0.8, seed=3) for number in range(12)]
    alone = {each.id: run(core, each)[each.id] for each in requests}
    core.scheduler.pages.drop_cached()
    assert run(core, *requests) == alone


def test_a_prefill_follows_the_weights_layer_by_layer(gpu: torch.device) -> None:
    model = family("llama")
    expected = run(engine(decoder("llama", gpu), GPU_EXACT), request())[0]
    there = {name: tensor.to(gpu) for name, tensor in model.state_dict().items()}
    empty = {name: torch.full_like(tensor, float("nan")) for name, tensor in there.items()}
    made = build("LlamaForCausalLM", model.config, empty, torch.float32, EXACT.rows, backend_of(gpu))
    last = made.count
    parts = {-1: "embed_tokens", **{n: f"layers.{n}." for n in range(last)}, last: ""}
    waited = list[int]()

    class Arriving:
        def wait(self, layer: int) -> None:
            """Another thread writes what the layer needs, and is done with it."""
            waited.append(layer)
            writer = threading.Thread(target=write, args=(parts[layer],))
            writer.start()
            writer.join()

    def write(part: str) -> None:
        for name, tensor in empty.items():
            if part in name:
                tensor.copy_(there[name])
        torch.cuda.synchronize()

    made.arrival = Arriving()
    core = engine(made, GPU_EXACT)
    core.add(request())
    assert tuple(token for event in finish(core)[0] for token in event.ids) == expected
    assert waited == list(range(-1, last + 1))

"""Adapters on the path of accelerators (``stand_in``): the CPU's tokens, and each row the same beside any others.
What they are to peft, and how they come and go, is in ``test_lora``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from sllm_runtime.protocol.errors import OutOfMemory, UnsupportedModel
from sllm_runtime.worker.engine.base import Request
from sllm_runtime.worker.engine.ours.adapter import TILE, Adapter, LowRank
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.gpu.device import Device
from sllm_runtime.worker.engine.ours.gpu.fast_ops import FastOps
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.numerics import EXACT, GPU_EXACT
from tests.fixtures.families import family
from tests.unit.worker.engine import driver, stand_in
from tests.unit.worker.engine.driver import run
from tests.unit.worker.engine.stand_in import Again, RowByRow

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {"narrow": (4, ("q_proj", "v_proj")), "wide": (8, ALL), "one": (1, ALL)}
OTHERS = {"gpt 2": ("c_attn", "c_proj", "c_fc"), "phi 3": ("qkv_proj", "gate_up_proj"), "opt": ("fc1", "k_proj"),
          "falcon 40b": ("query_key_value", "dense"), "gemma 3": ALL, "mixtral": ("o_proj", "gate")}  # fmt: skip
CHOICES = (None, *KINDS)


def adapter(rank: int, targets: tuple[str, ...], name: str = "llama") -> Adapter:
    """Of numbers by chance, for every matrix of a family that ``targets`` names."""
    made = torch.Generator().manual_seed(rank)
    modules = {}
    for key, tensor in family(name).state_dict().items():
        module = key.removesuffix(".weight")
        if module != key and module.rpartition(".")[2] in targets:
            inputs, outputs = tensor.shape if name == "gpt 2" else tensor.shape[::-1]
            halves = (torch.randn(size, generator=made) * 0.2 for size in ((inputs, rank), (rank, outputs)))
            modules[module] = LowRank(*halves)
    assert modules
    return Adapter(f"sha256:{rank}", modules)


@cache
def known(kind: str) -> Adapter:
    return adapter(*KINDS[kind])


def served(core: OurEngine) -> OurEngine:
    for kind in KINDS:
        core.decoder.lora.put(kind, known(kind))
    return core


def asked(number: int, **sampling: Any) -> Request:
    prompt = tuple((number * 7 + at * 3) % 97 + 3 for at in range(5 + number * 11 % 70))
    return replace(driver.request(number, prompt, **sampling), lora=CHOICES[number % len(CHOICES)])


@pytest.mark.parametrize("make", [stand_in.fast, stand_in.exact])
def test_tokens_are_those_of_the_cpu(make: Callable[[], OurEngine]) -> None:
    requests = [asked(number, max_tokens=8) for number in range(8)]
    core = served(make())
    assert core.capabilities.lora
    found = run(core, *requests)
    assert found == run(served(driver.engine()), *requests)
    without = run(make(), *(replace(each, lora=None) for each in requests))
    assert [number for number in found if found[number] == without[number]] == [0, 4]


@pytest.mark.parametrize("name", OTHERS)
def test_every_family_takes_adapters(name: str) -> None:
    core, other = stand_in.fast(name), driver.engine(name)
    for each in (core, other):
        each.decoder.lora.put("a", adapter(4, OTHERS[name], name))
    first = replace(asked(2), lora="a")
    assert run(core, first) == run(other, first) != run(other, replace(first, lora=None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_a_row_is_the_same_alone_and_beside_any_others(dtype: torch.dtype) -> None:
    """Also where steps without adapters are recorded, and those with some run between them."""
    requests = [asked(number, max_tokens=12 if number % 4 else 30, logprobs=0) for number in range(9)]
    record = Again()
    alone, mixed = stand_in.exact(dtype=dtype), stand_in.exact(dtype=dtype, record=record, prefill=60, running=12)
    expected, found = driver.rows_of(served(alone)), driver.rows_of(served(mixed))
    tokens: dict[int, tuple[int, ...]] = {}
    for each in requests:
        tokens |= run(alone, each)
        alone.scheduler.pages.drop_cached()
    assert run(mixed, *requests, *(replace(each, id=each.id + 100, lora=None) for each in requests[::4])) == {
        **tokens, **{number + 100: tokens[number] for number in (0, 4, 8)}
    }  # fmt: skip
    assert record.replays > 0
    assert all(torch.equal(row, found[key]) for key, row in expected.items())


def test_a_resume_goes_on_at_every_position() -> None:
    first = replace(asked(1, temperature=0.9, seed=3, repetition_penalty=1.1), lora="wide")
    core = served(stand_in.exact())
    whole = run(core, first)[1]
    core.scheduler.pages.drop_cached()
    for at, rest in run(core, *(replace(first, id=at, emitted=whole[:at]) for at in range(len(whole)))).items():
        assert whole[:at] + rest == whole, at


def test_pages_belong_to_their_adapter() -> None:
    driver.pages_belong_to_their_adapter(served(stand_in.exact()), tuple(range(3, 101)) * 2, cached=128)


# --- taking one -----------------------------------------------------------------------------------
class ByPlace(RowByRow):
    """Products of several rows treat the last of them in another way."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made = super().linear(x, weight, bias)
        if len(x) > 1 and weight.shape[0] == 8:  # the narrow matrix of an adapter
            made[-1] += 1e-6
        return made


def over(exact: Any) -> OurEngine:
    return stand_in.engine_of(stand_in.decoder("llama", exact=exact), GPU_EXACT, proven=True)


def test_where_rows_are_not_alike_each_is_a_product_by_itself() -> None:
    taken, strict = adapter(8, ALL), adapter(8, ALL)
    core, other = over(RowByRow()), over(ByPlace())
    core.decoder.lora.put("wide", taken)
    other.decoder.lora.put("wide", strict)
    assert (taken.tile, strict.tile) == (TILE, 1)
    requests = [replace(asked(number), lora="wide") for number in range(4)]
    assert run(other, *requests) == run(core, *requests)


def test_what_cannot_be_computed_there_is_refused_by_name() -> None:
    class NotCompiled(Exception):
        pass

    class Refused(RowByRow):
        refusals = (NotCompiled,)

        def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            raise NotCompiled("out of registers")

    with pytest.raises(UnsupportedModel, match="cannot be computed on cpu: NotCompiled: out of registers"):
        over(Refused()).decoder.lora.put("wide", adapter(8, ALL))


def test_one_that_the_device_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Adapter, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    core = served(stand_in.exact())
    monkeypatch.setattr(Adapter, "move", full)
    with pytest.raises(OutOfMemory, match=r"cpu has no room for an adapter of .* KiB.*gpu_memory"):
        core.decoder.lora.put("late", adapter(2, ALL))
    monkeypatch.undo()
    assert run(core, asked(2)) == run(served(stand_in.exact()), asked(2)), "those that are there are served"


def test_levels_are_shown_for_what_they_compute() -> None:
    """The fast mode promises nothing, so nothing is shown of it."""
    model = family("llama")
    backend = Device(stand_in.CPU, FastOps(), ByPlace())
    made = build("LlamaForCausalLM", model.config, model.state_dict(), torch.float32, EXACT.rows, backend)
    taken = adapter(8, ALL)
    stand_in.engine_of(made, GPU_EXACT)
    made.lora.put("a", taken)
    assert taken.tile == 1
    stand_in.engine_of(made, backend.otherwise)
    made.lora.put("a", taken)
    assert taken.tile == TILE

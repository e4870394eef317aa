"""The path of accelerators through our engine, over tensors on the CPU (``stand_in``); kernels: ``test_gpu_kernels``.

What runs on a GPU alone is in ``test_gpu``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.protocol.errors import FunctionError
from sllm_runtime.worker.engine.base import Request
from sllm_runtime.worker.engine.choice import Known, Settings
from sllm_runtime.worker.engine.ours import selftest
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.gpu.device import Device
from sllm_runtime.worker.engine.ours.gpu.fast_ops import FastOps
from sllm_runtime.worker.engine.ours.gpu.graphs import AFTER, ROWS, Compute, Computed, layout_for
from sllm_runtime.worker.engine.ours.gpu.layout import Layout, fill, layout_of
from sllm_runtime.worker.engine.ours.gpu.parts import DENSE, Current, DeviceExperts, DeviceLinear
from sllm_runtime.worker.engine.ours.gpu.runner import DeviceRunner
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.model.parts import Plain
from sllm_runtime.worker.engine.ours.numerics import EXACT, GPU_EXACT, GPU_FAST, Numerics
from sllm_runtime.worker.engine.ours.pages import PAGE, pages_for
from tests.fixtures.examples import examples
from tests.fixtures.families import FAMILIES, family
from tests.fixtures.models import BUILDERS
from tests.unit.worker.engine import driver, stand_in
from tests.unit.worker.engine.driver import MIB, Rows, finish, ids, request, run
from tests.unit.worker.engine.stand_in import Again, DeviceRows, RowByRow
from tests.unit.worker.engine.test_exactness import OPTIONS, stream

torch.manual_seed(5)
TOKENS = torch.randint(3, 101, (150,)).tolist()
"""More than a page."""


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_cpu(name: str) -> None:
    rows = DeviceRows(stand_in.decoder(name), TOKENS, GPU_FAST)
    found = torch.cat([rows.chunk(0, 100), rows.chunk(100, 49), rows.chunk(149, 1)])
    assert (found - Rows(driver.decoder(name), TOKENS).chunk(0, 150)).abs().max() <= 1e-4


def test_bfloat16_is_no_further_off_than_on_the_cpu() -> None:
    exact = Rows(driver.decoder("llama"), TOKENS).chunk(0, 150)
    allowed = (Rows(driver.decoder("llama", torch.bfloat16), TOKENS).chunk(0, 150) - exact).norm()
    found = DeviceRows(stand_in.decoder("llama", torch.bfloat16), TOKENS, GPU_FAST).chunk(0, 150)
    assert (found - exact).norm() <= 1.5 * allowed


# --- engine ---------------------------------------------------------------------------------------
def longer(asked: Request) -> Request:
    """It needs more pages while it draws than as it begins."""
    return replace(asked, sampling=replace(asked.sampling, max_tokens=asked.sampling.max_tokens + PAGE))


@pytest.mark.parametrize(("pages", "options"), [(24, {}), (3, {}), (24, {"prefill": 16, "quantum": 16})])
def test_tokens_are_those_of_the_cpu(pages: int, options: dict[str, Any]) -> None:
    """Prefixes that are shared, too little KV memory for all, prompts in pieces."""
    asked = [longer(stream(number)) for number in range(9)]
    core = stand_in.fast(kv=pages * driver.page_bytes(), **options)
    assert run(core, *asked) == run(driver.engine(), *asked)
    assert (pages == 3) == (core.stats().preempted > 0)
    core.scheduler.check()


def test_a_prefix_is_computed_once_and_sleep_forgets_it() -> None:
    core = stand_in.fast()
    prompt = [number % 90 + 3 for number in range(300)]
    first = run(core, request(1, prompt))[1]
    core.add(request(2, prompt))
    events = finish(core)[2]
    assert (ids(events), events[0].cached) == (first, 256)
    core.add(request(3, prompt))
    got = [token for _ in range(5) for event in core.step() for token in event.ids]
    core.sleep()
    assert core.runner.kv is None
    core.wake()
    assert tuple(got) + ids(finish(core)[3]) == first


def test_pages_move_from_engine_to_engine() -> None:
    target, pages, _ = driver.moves_with_its_pages(stand_in.exact)
    for wrong in (pages[0].content.double(), pages[0].content[:, :1]):
        with pytest.raises(ValueError, match="a page is"):
            target.import_pages([replace(pages[0], content=wrong)])
    target.scheduler.check()


def test_log_probabilities_of_a_prompt_are_those_of_the_cpu() -> None:
    asked = request(1, TOKENS[:40], max_tokens=3, logprobs=1, prompt_logprobs=1)
    for found, expected in zip(_scores(stand_in.fast(), asked), _scores(driver.engine(), asked), strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


def _scores(core: Any, asked: Any) -> list[float]:
    core.add(asked)
    return [each.logprob for event in finish(core)[1] for each in (*event.prompt, *event.logprobs)]


@pytest.mark.parametrize("numerics", [GPU_FAST, GPU_EXACT], ids=lambda level: level.name)
def test_nan_fails_its_own_request(numerics: Numerics) -> None:
    torch.manual_seed(0)
    model = BUILDERS["llama"](max_position_embeddings=512).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = float("nan")
    backend = Device(stand_in.CPU, FastOps(), RowByRow())
    made = build("LlamaForCausalLM", model.config, model.state_dict(), torch.float32, 4, backend)
    core = stand_in.engine_of(made, numerics)
    alone = run(core, request(1))[1]
    prompt = [*request().prompt[:5], 99, *request().prompt[6:]]
    for number in range(3):
        core.add(request(number, prompt if number == 2 else request().prompt))
    events = finish(core)
    assert isinstance(events[2][-1].error, FunctionError)
    assert {n: tuple(t for e in events[n] for t in e.ids) for n in (0, 1)} == {0: alone, 1: alone}
    assert run(core, *(request(n) for n in range(5)))[4] == alone


def test_what_it_cannot_do_is_not_among_its_capabilities() -> None:
    made = Known("LlamaForCausalLM", stand_in.decoder("llama", exact=RowByRow()), {})
    chosen = made.engine({}, {}, Settings(MIB, "sha256:1"))
    assert isinstance(chosen.engine.runner, DeviceRunner)  # type: ignore[attr-defined]
    assert set(chosen.engine.capabilities.names()) == {
        "seeded", "penalties", "exact_resume", "kv_transfer", "lora", "sleep", "prompt_logprobs", "holds",
        "retells",
    }  # fmt: skip
    again = made.engine({}, {}, Settings(MIB, "sha256:1", chosen.proof))
    assert again.engine.fingerprint == chosen.engine.fingerprint


def test_layers_run_as_their_weights_arrive() -> None:
    made, asked = stand_in.decoder("llama"), list[int]()

    class Noted:
        def wait(self, layer: int) -> None:
            asked.append(layer)

    made.arrival = Noted()
    run(stand_in.engine_of(made, GPU_FAST), request())
    assert asked == [-1, *range(made.count + 1)]


# --- exactness ------------------------------------------------------------------------------------
def test_the_self_test_proves_what_treats_each_row_alike_and_nothing_else() -> None:
    mark = selftest.fingerprint("LlamaForCausalLM", "sha256:1", torch.float32, stand_in.decoder("llama").backend)
    proof = selftest.prove(stand_in.decoder("llama", exact=RowByRow()), mark)
    assert (proof.exact, proof.level, proof.numerics) == (True, "gpu-exact", GPU_EXACT)
    assert selftest.remembered(msgspec.json.encode(proof).decode(), mark) == proof
    for exact in (None, FastOps()):
        other = selftest.prove(stand_in.decoder("llama", exact=exact), mark)
        assert (other.exact, other.numerics) == (False, GPU_FAST)
    assert mark != selftest.fingerprint("LlamaForCausalLM", "sha256:1", torch.float32)


class Second(Device):
    """A device that is not the current one by itself, as a machine's second GPU is not."""

    def __init__(self) -> None:
        self.entered = 0
        ops = _OnIts(self)
        super().__init__(stand_in.CPU, ops, ops)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self.entered += 1
        yield
        self.entered -= 1


class _OnIts(RowByRow):
    """A kernel is launched on the current device, wherever its tensors are."""

    def __init__(self, device: Second) -> None:
        super().__init__()
        self._device = device

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert self._device.entered, "launched on another device than its tensors are on"
        return super().linear(x, weight, bias)


def test_whatever_is_computed_is_launched_on_the_weights_device() -> None:
    model = family("llama")
    made = build(type(model).__name__, model.config, model.state_dict(), torch.float32, EXACT.rows, Second())
    assert selftest.prove(made, "").exact
    assert run(stand_in.engine_of(made, GPU_EXACT), request()) == run(stand_in.exact(), request())


def test_kernels_that_cannot_be_computed_here_leave_the_fast_mode(caplog: pytest.LogCaptureFixture) -> None:
    class NotCompiled(Exception):
        pass

    class Refused(RowByRow):
        refusals = (NotCompiled,)

        def attend(self, *_: Any) -> torch.Tensor:
            raise NotCompiled("out of shared memory")

    proof = selftest.prove(stand_in.decoder("llama", exact=Refused()), "mark")
    assert (proof.exact, proof.numerics) == (False, GPU_FAST)
    assert "gpu-exact cannot be computed here: NotCompiled: out of shared memory" in caplog.text


@pytest.mark.parametrize("options", OPTIONS[:3])
def test_a_resume_goes_on_at_every_position(options: dict[str, Any]) -> None:
    first = request(max_tokens=12, prompt=range(5, 60), **options)
    whole = run(stand_in.exact(), first)[0]
    core = stand_in.exact(record=Again())
    resumed = [replace(first, id=at, emitted=whole[:at]) for at in range(len(whole))]
    for at, rest in run(core, *resumed).items():
        assert whole[:at] + rest == whole, at


def test_experts_are_the_same_bits_for_few_rows_and_for_many() -> None:
    made = stand_in.decoder("mixtral", exact=RowByRow())
    whole = DeviceRows(made, TOKENS, GPU_EXACT).chunk(0, 150)
    rows = DeviceRows(made, TOKENS, GPU_EXACT)
    assert torch.equal(torch.cat([rows.chunk(0, 100), rows.chunk(100, 3), rows.chunk(103, 47)]), whole)


@pytest.mark.parametrize("here", [range(0, 2), range(2, 4), range(3, 4)])
def test_a_rank_with_some_of_the_experts_adds_nothing_for_others(here: range) -> None:
    """Whether its rows are few or many: what another rank's experts make of them is not its part of the sum."""
    current, generator = Current(RowByRow()), torch.Generator().manual_seed(3)

    def product(outputs: int, inputs: int) -> DeviceLinear:
        return DeviceLinear(current, [torch.randn(outputs, inputs, generator=generator)], None, None)

    every = {number: Plain(product(24, 16), product(16, 24), torch.relu) for number in range(4)}
    some = DeviceExperts(product(4, 16), {number: every[number] for number in here}, 2, 1)
    x = torch.randn(DENSE + 6, 16, generator=generator)
    chosen = torch.rand(len(x), 4, generator=generator).topk(2).indices
    many = some._parts(x, chosen)
    assert torch.equal(
        torch.cat([some._parts(x[:DENSE], chosen[:DENSE]), some._parts(x[DENSE:], chosen[DENSE:])]), many
    )
    for at, numbers in enumerate(chosen.tolist()):
        for place, number in enumerate(numbers):
            expected = every[number](x[at : at + 1])[0] if number in here else torch.zeros(16)
            assert torch.equal(many[at, place], expected)


# --- graphs ---------------------------------------------------------------------------------------
class Piece(msgspec.Struct):
    """Of a step; see ``batch.Part``."""

    start: int
    count: int
    samples: bool
    pages: list[int]

    @property
    def tokens(self) -> list[int]:
        return [place % 90 + 3 for place in range(self.start, self.start + self.count)]


def piece(start: int, count: int = 1, *, samples: bool = True, first: int = 0) -> Piece:
    return Piece(start, count, samples, [first + at for at in range(pages_for(start + count))])


@pytest.mark.parametrize(
    ("parts", "layout"),
    [
        ([], None),
        ([piece(3)], Layout(1, 1, 1, 1)),
        ([piece(127)], Layout(1, 1, 1, 1)),
        ([piece(128)], Layout(1, 1, 2, 1)),
        ([piece(5), piece(600), piece(7)], Layout(4, 4, 8, 4)),
        ([piece(5)] * 9, Layout(16, 16, 1, 16)),
        ([piece(5)] * 17, Layout(24, 24, 1, 24)),
        ([piece(5)] * ROWS[-1], Layout(64, 64, 1, 64)),
        ([piece(5)] * (ROWS[-1] + 1), None),
        ([piece(5), piece(0, 2)], None),
        ([piece(5), piece(5, samples=False)], None),
    ],
)
def test_which_graph_serves_a_step(parts: list[Piece], layout: Layout | None) -> None:
    assert layout_for(parts) == layout


def test_graphs_give_what_steps_give_by_themselves() -> None:
    # Who asks for log probabilities has logits from every step.
    asked = [replace(each, sampling=replace(each.sampling, logprobs=0)) for each in map(stream, range(9))]
    record = Again()
    core = stand_in.exact(record=record)
    eager, recorded = driver.rows_of(plain := stand_in.exact()), driver.rows_of(core)
    assert run(core, *asked) == run(plain, *asked)
    assert record.replays > 0
    assert recorded.keys() == eager.keys()
    assert all(torch.equal(row, eager[key]) for key, row in recorded.items())


def test_a_step_runs_by_itself_until_it_has_come_some_times() -> None:
    record = Again()
    core = stand_in.fast(record=record)
    core.add(request(0, max_tokens=30))
    for _ in range(1 + AFTER):  # its prefill, and steps
        core.step()
        assert captured(core) == ()
    core.step()
    assert captured(core) == (Layout(1, 1, 1, 1),)
    core.sleep()
    core.wake()
    assert captured(core) == (), "they belong to the memory that is gone"
    finish(core)


def captured(core: OurEngine) -> tuple[Layout, ...]:
    assert isinstance(core.runner, DeviceRunner)
    assert core.runner.graphs is not None
    return core.runner.graphs.layouts


def test_steps_that_cannot_be_recorded_run_by_themselves_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(compute: Compute) -> tuple[Computed, Any]:
        raise RuntimeError("operation not permitted when stream is capturing")

    core = stand_in.fast(record=refuse)
    with caplog.at_level(logging.WARNING):
        assert run(core, request(max_tokens=20)) == run(stand_in.fast(), request(max_tokens=20))
    assert ["not permitted" in record.message for record in caplog.records] == [True]


@settings(max_examples=examples(50))
@given(st.data())
def test_a_step_lies_in_its_buffer(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 5, 130]), min_size=1, max_size=6).map(sorted))
    parts = [
        piece(data.draw(st.integers(0, 300)), count, samples=data.draw(st.booleans()), first=10 * at)
        for at, count in enumerate(counts)
    ]
    least, more = layout_of(parts), st.integers(0, 3)
    pad = data.draw(more)
    layout = Layout(
        least.rows + pad, least.sequences + pad, least.pages + data.draw(more), least.wanted + data.draw(more)
    )
    fields = layout.fields(torch.full((layout.words,), -1))
    fill(fields, parts, 99)
    row = picked = 0
    for number, part in enumerate(parts):
        for place, token in zip(range(part.start, part.start + part.count), part.tokens, strict=True):
            slot = int(fields.slots[row])
            table = fields.tables[int(fields.of[row])]
            assert (int(fields.tokens[row]), int(fields.positions[row])) == (token, place)
            assert (int(fields.of[row]), slot % PAGE) == (number, place % PAGE)
            assert slot // PAGE == int(table[place // PAGE]) == part.pages[place // PAGE]
            row += 1
        if part.samples:
            assert int(fields.wanted[picked]) == row - 1
            picked += 1
    for extra in range(row, layout.rows):
        assert (int(fields.slots[extra]), int(fields.positions[extra])) == (99 * PAGE, 0)
        assert (fields.tables[int(fields.of[extra])] == 99).all()

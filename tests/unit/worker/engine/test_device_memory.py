"""How much of a GPU the KV cache takes: what is free there, and what the manifest's ``gpu_memory`` leaves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.protocol.errors import ContextLengthExceeded, OutOfMemory
from sllm_runtime.protocol.manifest import Handler, Manifest
from sllm_runtime.worker.engine.choice import Known, Settings, kv_room
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.gpu.device import Device
from sllm_runtime.worker.engine.ours.gpu.fast_ops import FastOps
from sllm_runtime.worker.engine.ours.gpu.runner import KV_SHARE, pages_in
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.ours.pages import PAGE
from sllm_runtime.worker.engine.ours.room import served
from sllm_runtime.worker.model import granted
from tests.fixtures.families import family
from tests.unit.worker.engine.driver import MIB, decoder, page_bytes, request, run
from tests.unit.worker.engine.stand_in import CPU

GIB = 2**30
HUGE = 10**15


def engine(free: int | None, granted: int | None = None, *, host: int = 1) -> OurEngine:
    """As an instance has it on a device with so many bytes free, or on a CPU; the host's memory for KV in pages."""
    model = family("llama")
    backend = None if free is None else Device(CPU, FastOps(), None, lambda: free)
    made = build("LlamaForCausalLM", model.config, model.state_dict(), torch.float32, EXACT.rows, backend)
    settings = Settings(host * page_bytes(), "sha256:1", gpu_bytes=granted)
    found = Known("LlamaForCausalLM", made, {}).engine({}, {}, settings).engine
    assert isinstance(found, OurEngine)
    return found


@given(st.integers(1, GIB), st.integers(0, HUGE), st.none() | st.integers(0, HUGE))
def test_pages_are_within_both_and_as_many_as_that_allows(page: int, free: int, granted: int | None) -> None:
    least = free if granted is None else min(free, granted)
    try:
        pages = pages_in(page, free, granted)
    except OutOfMemory:
        assert least * KV_SHARE < page + 1
        return
    assert pages >= 1
    assert pages * page <= least
    assert (pages + 1) * page > least * KV_SHARE - 1


@pytest.mark.parametrize(
    ("free", "granted", "pages"),
    [(HUGE, None, None), (10, None, 8), (10, HUGE, 8), (HUGE, 5, 4), (5, 10, 4), (HUGE, 0, 0), (1, None, 0)],
)
def test_the_cache_is_what_the_device_and_the_manifest_allow(free: int, granted: int | None, pages: int | None) -> None:
    """In pages. ``None``: as many as requests can ever fill; 0: the start fails, and says what to do."""
    free, granted = free * page_bytes(), None if granted is None else granted * page_bytes()
    if pages == 0:
        with pytest.raises(OutOfMemory, match=r"128 tokens.*gpu_memory=\.\.\. in @model_function") as failed:
            engine(free, granted)
        assert ("raise gpu_memory" in failed.value.message) == (granted is not None)
        return
    core = engine(free, granted)
    assert core.stats().kv_pages == (pages or core.scheduler.limits.running * core.decoder.context // PAGE)


def test_gpu_memory_is_for_weights_and_cache_together() -> None:
    handler = Handler(entry="user:fn", kind="function", streams=False)
    asks = Manifest(name="fn", handler=handler, gpu_memory=2 * MIB)
    assert [granted(asks, weights) for weights in (0, MIB, 3 * MIB)] == [2 * MIB, MIB, 0]
    assert granted(Manifest(name="fn", handler=handler), MIB) is None


def test_what_the_cache_cannot_hold_is_refused_with_the_option_that_bounds_it() -> None:
    core = engine(3 * page_bytes(), None)
    assert core.max_context == 2 * PAGE
    with pytest.raises(ContextLengthExceeded, match=r"holds 256.*raise gpu_memory="):
        core.add(request(1, [5] * 256))
    assert len(run(core, request(2, [5] * 200))[2]) == 12


def test_instances_go_on_with_each_others_calls_where_they_serve_the_same_context() -> None:
    """Of one proof. A context that memory does not decide is in the manifest and the model, and in no class."""
    least, more, most, all_ = (engine(int(pages * page_bytes() / KV_SHARE) + 1) for pages in (2, 3, 3.9, 1000))
    assert [core.max_context for core in (least, more, most)] == [2 * PAGE, 3 * PAGE, 3 * PAGE]
    assert more.fingerprint == most.fingerprint
    assert len({core.fingerprint for core in (least, more, all_)}) == 3
    assert all_.max_context == all_.decoder.context
    small, large = (engine(None, host=pages) for pages in (2, 1000))
    assert small.max_context < large.max_context
    assert small.fingerprint == large.fingerprint, "as instances of before have it"


@given(st.integers(1, 10**7))
def test_contexts_are_coarse_where_memory_decides_them(pages: int) -> None:
    """So that a few pages more or less make no other class; at most an eighth is lost by it."""
    found = served(pages)
    assert pages - pages / 8 <= found <= pages
    assert served(found) == found
    assert len({served(each) for each in range(pages, 2 * pages, max(1, pages // 100))}) <= 10


def test_the_hosts_memory_counts_where_the_device_has_none_of_its_own() -> None:
    model = family("llama")
    made = build(
        "LlamaForCausalLM", model.config, model.state_dict(), torch.float32, EXACT.rows, Device(CPU, FastOps(), None)
    )
    chosen = Known("LlamaForCausalLM", made, {}).engine({}, {}, Settings(MIB, gpu_bytes=1)).engine
    assert chosen.stats().kv_pages == MIB // page_bytes()


@pytest.mark.parametrize(("granted", "pages"), [(None, 8), (5, 4)])
def test_a_stage_counts_what_its_own_device_has_for_its_own_layers(granted: int | None, pages: int) -> None:
    """And not the host's memory, which is one page here."""
    made, page = decoder("llama"), page_bytes() * 2 // decoder("llama").count
    settings = Settings(page, gpu_bytes=None if granted is None else granted * page)
    assert kv_room(made, 2, settings) == page, "on a CPU it is the host's that counts"
    made.backend = Device(CPU, FastOps(), None, lambda: 10 * page)
    assert kv_room(made, 2, settings) == pages * page
    made.backend = Device(CPU, FastOps(), None)
    assert kv_room(made, 2, settings) == page, "it has no memory of its own"

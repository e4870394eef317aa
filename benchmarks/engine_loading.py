"""The cases of ``engine`` around a start: the first token of a model that loads, an engine over weights in DRAM."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Final

import torch

from benchmarks.cold_cases import MODEL
from benchmarks.engine_models import KV_BYTES, asked, prompts, write_synthetic
from benchmarks.load_model import ONE, QUICK
from benchmarks.load_node import Node
from benchmarks.programs import ProgramFailed, own_usage
from benchmarks.record import Aim, ratio
from benchmarks.runner import Run, in_turn
from sllm_loaderd.convert.directory import convert_directory
from sllm_runtime.protocol.checkpoint import decode_index
from sllm_runtime.worker import weights
from sllm_runtime.worker.arriving import Layers, Weights, blocks_of
from sllm_runtime.worker.engine.choice import Settings, recognise
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.model import start_engine
from sllm_runtime.worker.tensors import CheckpointTensors, TypedTensors

LINK: Final = "0.5GB/s"
PROMPT: Final = 128
WAYS: Final = ("execute while loading", "load, then run", "load alone", "run alone")
_TIMEOUT_S: Final = 120.0


def while_loading(run: Run, case: str, directory: Path) -> None:
    """Seconds from asking loaderd for the weights to the first token of a prompt. The weights are in the node's chunk
    pool and reach the model's memory over a link of 0.5 GB/s (a fake device), block by block. CPU seconds and memory
    are of this process, which computes."""
    shape = QUICK if run.quick else ONE
    write_synthetic(directory / "model", shape)
    run.settings[f"{case}_bytes"] = shape.nbytes
    device = f"1x2GiB@{LINK}"
    with Node(directory / "node", pool_bytes=2 * shape.nbytes + 2**28, fake_devices=device) as node:
        model = node.register(str(directory / "model"))
        token = None
        for number in range(-1, run.rounds):
            for way in in_turn(WAYS, max(number, 0)):
                cpu = time.process_time()
                took, found = _once(node, model, way)
                used = time.process_time() - cpu
                if found is not None and token not in (None, found):
                    raise ProgramFailed(f"{way}: the first token is {found}, not {token}")
                token = token if found is None else found
                if number >= 0:
                    run.case(case, way, "s").take(round(took, 4), used, own_usage().pss_mib)
    _loading_aims(run, case)


def _loading_aims(run: Run, case: str) -> None:
    ahead, after, load, compute = (run.case(case, way, "s") for way in WAYS)
    bound = max((load, compute), key=lambda each: each.median or 0.0)
    run.aims.append(Aim(f"{case}: {WAYS[0]} / max(load, run)", ratio(ahead, bound, least=run.least), at_most=1.25))
    run.aims.append(Aim(f"{case}: {WAYS[1]} / {WAYS[0]}", ratio(after, ahead, least=run.least), at_least=1.0))


def _once(node: Node, model: str, way: str) -> tuple[float, int | None]:
    """Seconds of one way, and the token that it gave."""
    node.until_free()
    node.forget(model)  # on the device too
    node.ask(lambda control: control.prefetch(model))
    holder = f"bench-{time.monotonic_ns()}"
    fd = node.ask(lambda control: control.grant(holder, model))
    began = time.perf_counter()
    pending = Weights.begin(fd, "bench", _TIMEOUT_S, devices=("fake:0",))
    try:
        core = _engine(pending)
        if way != WAYS[0]:
            pending.wait(lambda *_: None)
        if way == WAYS[2]:
            return time.perf_counter() - began, None
        if way == WAYS[3]:
            began = time.perf_counter()
        core.add(asked(0, prompts(1, PROMPT, core.vocabulary)[0], 1))
        while core.busy:
            for event in core.step():
                if event.error is not None:
                    raise event.error
                if event.ids:
                    return time.perf_counter() - began, event.ids[0]
        raise ProgramFailed("no token came")
    finally:
        pending.load.detach()
        pending.session.close()
        node.ask(lambda control: control.gone(holder))


def _engine(pending: Weights) -> OurEngine:
    index, files = pending.load.index(_TIMEOUT_S), pending.load.files(_TIMEOUT_S)
    tensors = CheckpointTensors(index, pending.load.attach(_TIMEOUT_S).exporter())
    typed = TypedTensors(tensors, torch.bfloat16)
    known = recognise(weights.read_config(files), "auto", typed, typed.shapes, torch.bfloat16)
    if known is None:
        raise ProgramFailed("the synthetic model is none of ours")
    known.decoder.arrival = Layers(pending, blocks_of(index, (0,), known.needs), known.decoder.count)
    return OurEngine(known.decoder, frozenset(), EXACT, KV_BYTES)


def start(run: Run, case: str, directory: Path) -> None:
    """From the index and the weights in memory to an engine that takes requests: of the demo model, its self-test
    proven before. With and without the tokenizer."""
    convert_directory(MODEL, directory / "demo")
    index = decode_index((directory / "demo" / "index.json").read_bytes())
    data = (directory / "demo" / "partition_0.bin").read_bytes()
    files = {path.name: path.read_bytes() for path in (directory / "demo").glob("*.json")}
    memory = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
    proof = ""
    for number in range(-1 - run.rounds, 3 * run.rounds):
        proven = number >= -1
        began, cpu = time.perf_counter(), time.process_time()
        tensors = CheckpointTensors(index, memory)
        raw = weights.read_config(files)
        typed = TypedTensors(tensors, weights.compute_dtype("auto", raw, tensors))
        known = recognise(raw, "auto", typed, typed.shapes, torch.bfloat16)
        if known is None:
            raise ProgramFailed("the demo model is none of ours")
        settings = Settings(KV_BYTES, "demo", proof if proven else "")
        chosen = known.engine(files, raw, settings)
        engine, spent = time.perf_counter(), time.process_time() - cpu
        loop, _ = start_engine(lambda made=chosen: made, files)  # type: ignore[misc]
        both, spent_on_both = time.perf_counter(), time.process_time() - cpu
        loop.close()
        mib = own_usage().pss_mib
        proof = chosen.proof
        if not proven:
            tested = run.case("selftest_demo", "sllm", "s")
            tested.notes = (
                "the start of an engine without a proof; the first of them is this process's first computation"
            )
            tested.take(round(engine - began, 3), spent, mib)
        elif number >= 0:
            run.case(case, "engine", "ms").take(round((engine - began) * 1e3, 2), spent, mib)
            run.case(case, "engine and tokenizer", "ms").take(round((both - began) * 1e3, 2), spent_on_both, mib)
    found = run.case(case, "engine", "ms")
    run.aims.append(Aim(f"{case}: engine, ms (median)", found.median if len(found.samples) >= run.least else None,
                        at_most=30.0))  # fmt: skip

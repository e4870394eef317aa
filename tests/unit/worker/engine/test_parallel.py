"""Ranks that share every layer, each a process with its partition file: the model's tokens, and one that dies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sllm_invoker.wiring import wired
from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.ranks import AutoPlan
from sllm_loaderd.verify import open_checkpoint
from sllm_runtime.protocol.errors import InstanceLost, InvalidCheckpoint, StartFailed, UnsupportedModel
from sllm_runtime.protocol.worker import Member
from sllm_runtime.worker.engine.ours import selftest
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.ours.parallel.group import Library, library_of
from sllm_runtime.worker.engine.ours.parallel.ranks import Ranks
from sllm_runtime.worker.engine.ours.parallel.shards import build_shard, token_runs
from sllm_runtime.worker.joined import Joined
from tests.fixtures.engine_parts import KV_BYTES, PATIENCE_S, shard
from tests.fixtures.loaderd import ignore
from tests.fixtures.models import save_model
from tests.fixtures.nursery import Nursery, kill
from tests.unit.worker.engine.driver import Rows, finish, ids, kept, request, run

pytestmark = pytest.mark.timeout(300)  # the first waits for the imports of another process


@dataclass
class Made:
    """A tensor-parallel engine, the whole model that it is compared with, and the other ranks' processes."""

    core: OurEngine
    whole: Decoder
    proof: selftest.Proof
    pids: list[int]


def convert(home: Path, name: str, ranks: int, **changes: Any) -> Any:
    """The module; its checkpoint over ``ranks`` is in ``home / "checkpoint"``."""
    module = save_model(name, home / "source", **changes)
    options = ConvertOptions(plan=AutoPlan("auto", ranks))
    convert_directory(home / "source", home / "checkpoint", options=options, verify=ignore)
    return module


@contextlib.contextmanager
def ranks(
    nursery: Nursery, home: Path, name: str, count: int, *, other: dict[str, Any] | None = None,
    library: Library | None = None, accelerated: bool = False, **changes: Any,
) -> Iterator[Made]:  # fmt: skip
    """An engine over ``count`` ranks, the first here, joined by the sockets that an invoker makes. ``other``: what the
    last one is told beside or in place."""
    module = convert(home, name, count, **changes)
    asked = {"directory": str(home / "checkpoint"), "ranks": count, "library": library, "accelerated": accelerated}
    members = tuple(Member(number=number, ranks=count) for number in range(count))
    with contextlib.ExitStack() as stack:
        with wired(members) as edges:
            pids = [
                nursery.fork(
                    "tests.fixtures.engine_parts:rank",
                    edges[number],
                    **{**asked, "rank": number, **((other or {}) if number == count - 1 else {})},
                )
                for number in range(1, count)
            ]
            joined = Joined(members[0], [os.dup(fd) for fd in edges[0]], PATIENCE_S)
        for link in joined.edges:
            stack.callback(link.close)
        group = stack.enter_context(contextlib.closing(joined.group(library)))
        own = shard(home / "checkpoint", group, accelerated=accelerated)
        proof = selftest.prove(own, "tested")
        mark = proof.numerics_class
        runner = Ranks(own, proof.numerics, group, joined.edges, kv_bytes=KV_BYTES, fingerprint=mark)
        stack.enter_context(contextlib.closing(runner))
        core = OurEngine(
            own, frozenset(), proof.numerics, KV_BYTES, proven=proof.exact, fingerprint=mark, runner=runner
        )
        whole = build(type(module).__name__, module.config, module.state_dict(), own.dtype, EXACT.rows)
        yield Made(core, whole, proof, pids)


ASKED = [request(0, range(5, 60), max_tokens=14), request(1, [7] * 150, max_tokens=12), request(2, [99, 3, 50, 51])]

LONG: dict[str, Any] = {"max_position_embeddings": 512}
GLOO: dict[str, Any] = {"library": "gloo"}
MODELS: list[tuple[str, int, dict[str, Any], float]] = [
    ("llama", 2, {"attention_bias": True, "mlp_bias": True, **LONG}, 1e-5),
    ("tied_llama", 4, {"num_key_value_heads": 4, **LONG}, 1e-5),
    ("qwen3", 2, {"dtype": torch.bfloat16}, 0.02),
    ("mixtral", 2, GLOO, 1e-5),
    ("llama", 2, {"accelerated": True, **GLOO, **LONG}, 1e-5),
    ("mixtral", 2, {"accelerated": True, **GLOO}, 1e-5),
]
IDS = [f"{each[0]}{'-accelerated' * ('accelerated' in each[2])}" for each in MODELS]


@pytest.mark.parametrize(("name", "count", "changes", "margin"), MODELS, ids=IDS)
def test_ranks_say_what_one_says(
    nursery: Nursery, tmp_path: Path, name: str, count: int, changes: dict[str, Any], margin: float
) -> None:
    with ranks(nursery, tmp_path, name, count, **changes) as made:
        logits = kept(made.core)
        alone = {each.id: run(made.core, each)[each.id] for each in ASKED}
        rows = iter(torch.cat([each[:1] for each in logits]))
        for each in ASKED:
            said = alone[each.id]
            assert len(said) == each.sampling.max_tokens
            expected = Rows(made.whole, [*each.prompt, *said]).chunk(0, len(each.prompt) + len(said))
            for at, token in enumerate(said, len(each.prompt) - 1):
                got = next(rows)
                assert (got - expected[at]).abs().max() < margin
                assert expected[at][token] > expected[at].max() - 2 * margin, "the likeliest, or one as likely"
        assert made.proof.exact
        assert made.core.capabilities.exact_resume
        assert not made.core.capabilities.layer_ranges
        assert run(made.core, *ASKED) == alone, "whatever else is in the batch"
        resumed = [replace(each, emitted=alone[each.id][:5]) for each in ASKED]
        assert run(made.core, *resumed) == {number: said[5:] for number, said in alone.items()}


def test_a_rank_that_dies_ends_the_instance_and_calls_go_on_in_another(nursery: Nursery, tmp_path: Path) -> None:
    got: dict[int, list[int]] = {each.id: [] for each in ASKED}
    with ranks(nursery, tmp_path / "one", "llama", 2, **LONG) as made:
        fingerprint, whole = made.core.fingerprint, run(made.core, *ASKED)
        for each in ASKED:
            made.core.add(each)
        while not all(got.values()):
            for event in made.core.step():
                got[event.request] += event.ids
        kill(made.pids[0])
        with pytest.raises(InstanceLost, match="rank 1 is gone"):
            finish(made.core)
        with pytest.raises(InstanceLost, match="rank 1 is gone"):
            made.core.step()
    with ranks(nursery, tmp_path / "other", "llama", 2, **LONG) as made:
        assert made.core.fingerprint == fingerprint, "of one class with the other"
        for each in ASKED:
            made.core.add(replace(each, emitted=tuple(got[each.id])))
        rest = {number: ids(events) for number, events in finish(made.core).items()}
        assert {number: (*got[number], *rest.get(number, ())) for number in got} == whole


def test_ranks_that_are_not_alike_or_do_not_come_are_named(nursery: Nursery, tmp_path: Path) -> None:
    other = {"fingerprint": "other"}
    with pytest.raises(StartFailed, match="rank 1 would"), ranks(nursery, tmp_path, "llama", 2, other=other):
        pass


def test_a_rank_that_dies_is_missed_by_a_library_too(nursery: Nursery, tmp_path: Path) -> None:
    with ranks(nursery, tmp_path, "llama", 2, **GLOO) as made:
        made.core.add(ASKED[0])
        made.core.step()
        kill(made.pids[0])
        with pytest.raises(InstanceLost, match="rank 1 is gone"):
            finish(made.core)


def test_where_the_weights_are_says_what_ranks_gather_through() -> None:
    assert library_of(torch.device("cpu")) is None
    assert library_of(torch.device("cuda:1")) == "nccl"


class Alone:
    """A group of whom the others never speak."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def columns(self, x: torch.Tensor, widths: object) -> torch.Tensor:
        return x

    def close(self) -> None:
        return


def test_what_cannot_be_shared_out_is_refused_by_name(tmp_path: Path) -> None:
    module = convert(tmp_path, "llama", 2)
    index = open_checkpoint(tmp_path / "checkpoint").index
    assert token_runs(index) == (50, 51)
    options = (module.state_dict(), torch.float32, 4)
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel"):
        build_shard("GPT2LMHeadModel", module.config, *options, Alone(2), (50, 51))
    with pytest.raises(InvalidCheckpoint, match="has 2 ranks, the instance 3"):
        build_shard("LlamaForCausalLM", module.config, *options, Alone(3), (50, 51))
    with pytest.raises(InvalidCheckpoint, match="4 heads and 2 of keys"):
        build_shard("LlamaForCausalLM", module.config, *options, Alone(4), (26, 25, 25, 25))
    whole = build_shard("LlamaForCausalLM", module.config, *options, Alone(2), (50, 51))
    with pytest.raises(InvalidCheckpoint, match=r"\(101, 64\), the model wants \(50, 64\)"):
        whole.start()
    convert_directory(tmp_path / "source", tmp_path / "one", options=ConvertOptions(), verify=ignore)
    with pytest.raises(InvalidCheckpoint, match="--plan auto:N"):
        token_runs(open_checkpoint(tmp_path / "one").index)

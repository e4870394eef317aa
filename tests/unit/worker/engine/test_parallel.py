"""Ranks that share every layer, each a process with its partition file: the model's tokens, and one that dies."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.ranks import AutoPlan
from sllm_loaderd.verify import open_checkpoint
from sllm_runtime.protocol.errors import InstanceLost, InvalidCheckpoint, StartFailed, UnsupportedModel
from sllm_runtime.worker.engine.ours import selftest
from sllm_runtime.worker.engine.ours.edge import Edges
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.ours.parallel.group import Group, ProcessGroup
from sllm_runtime.worker.engine.ours.parallel.ranks import Ranks
from sllm_runtime.worker.engine.ours.parallel.shards import build_shard, token_runs
from sllm_runtime.worker.engine.ours.parallel.shared import SharedGroup
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


def sums(count: int, stack: contextlib.ExitStack) -> list[dict[int, socket.socket]]:
    """The sockets of each rank of a ``SharedGroup``, by the number of the other."""
    peers: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for one, other in itertools.combinations(range(count), 2):
        peers[one][other], peers[other][one] = (stack.enter_context(each) for each in socket.socketpair())
    return [dict(sorted(each.items())) for each in peers]


@contextlib.contextmanager
def ranks(
    nursery: Nursery, home: Path, name: str, count: int, *, other: dict[str, Any] | None = None, gloo: bool = False,
    **changes: Any,
) -> Iterator[Made]:  # fmt: skip
    """An engine over ``count`` ranks, the first here, that gather over ``gloo`` or shared memory. ``other``: what the
    last one is told beside or in place."""
    module = convert(home, name, count, **changes)
    pairs = [socket.socketpair() for _ in range(count - 1)]
    meeting = str(home / "meeting") if gloo else ""
    pids = []
    with contextlib.ExitStack() as stack:
        peers = [] if gloo else sums(count, stack)
        for number, (_, theirs) in enumerate(pairs, 1):
            asked = {"directory": str(home / "checkpoint"), "meeting": meeting, "rank": number, "ranks": count}
            asked |= (other or {}) if number == count - 1 else {}
            fds = [theirs.fileno(), *(each.fileno() for each in (peers[number].values() if peers else ()))]
            pids.append(nursery.fork("tests.fixtures.engine_parts:rank", fds, **asked))
            theirs.close()
        for each in peers[1:]:
            for sock in each.values():
                sock.close()
        links = [Edges.duplex(ours, patience_s=PATIENCE_S) for ours, _ in pairs]
        for link in links:
            stack.callback(link.close)
        group: Group = (
            ProcessGroup("gloo", Path(meeting), 0, count, patience_s=PATIENCE_S)
            if gloo
            else SharedGroup(0, peers[0], patience_s=PATIENCE_S)
        )
        stack.enter_context(contextlib.closing(group))
        own = shard(home / "checkpoint", group)
        proof = selftest.prove(own, "tested")
        runner = Ranks(own, proof.numerics, group, links, kv_bytes=KV_BYTES, fingerprint=proof.numerics_class)
        stack.enter_context(contextlib.closing(runner))
        mark = proof.numerics_class
        core = OurEngine(
            own, frozenset(), proof.numerics, KV_BYTES, proven=proof.exact, fingerprint=mark, runner=runner
        )
        whole = build(type(module).__name__, module.config, module.state_dict(), own.dtype, EXACT.rows)
        yield Made(core, whole, proof, pids)


ASKED = [request(0, range(5, 60), max_tokens=14), request(1, [7] * 150, max_tokens=12), request(2, [99, 3, 50, 51])]

LONG: dict[str, Any] = {"max_position_embeddings": 512}
MODELS: list[tuple[str, int, dict[str, Any], float]] = [
    ("llama", 2, {"attention_bias": True, "mlp_bias": True, **LONG}, 1e-5),
    ("tied_llama", 4, {"num_key_value_heads": 4, **LONG}, 1e-5),
    ("qwen3", 2, {"dtype": torch.bfloat16}, 0.02),
    ("mixtral", 2, {}, 1e-5),
]


@pytest.mark.parametrize(("name", "count", "changes", "margin"), MODELS, ids=[each[0] for each in MODELS])
def test_ranks_say_what_one_says(
    nursery: Nursery, tmp_path: Path, name: str, count: int, changes: dict[str, Any], margin: float
) -> None:
    with ranks(nursery, tmp_path, name, count, gloo=name == "mixtral", **changes) as made:
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
    with pytest.raises(InstanceLost, match="did not meet"):
        ProcessGroup("gloo", tmp_path / "nobody", 0, 2, patience_s=0.2)


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

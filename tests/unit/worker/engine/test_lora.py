"""Adapters that peft itself saved, several in one batch: each row as if it were alone, and as peft computes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sllm_runtime.protocol.checkpoint import AdapterRecord
from sllm_runtime.protocol.errors import InvalidCheckpoint, InvalidRequest, ModelNotFound, UnsupportedModel
from sllm_runtime.worker.engine.base import Request
from sllm_runtime.worker.engine.ours.adapter import TILE, Adapter, LowRank
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.transformers_engine import TransformersEngine
from tests.fixtures.examples import examples
from tests.fixtures.families import family
from tests.unit.worker.engine.driver import engine, finish, ids, page_bytes, pages_belong_to_their_adapter, request, run

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "narrow": {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"]},
    "wide": {"r": 8, "lora_alpha": 16, "target_modules": ALL, "use_rslora": True},
    "patterned": {"r": 2, "lora_alpha": 6, "target_modules": ALL, "rank_pattern": {"layers.1.self_attn.q_proj": 5},
                  "alpha_pattern": {"down_proj": 20}},
}  # fmt: skip
OTHERS = {"gpt 2": ["c_attn", "c_proj", "c_fc"], "phi 3": ["qkv_proj", "gate_up_proj"], "opt": ["fc1", "k_proj"],
          "falcon 40b": ["query_key_value", "dense"], "gemma 3": ALL, "mixtral": ["q_proj", "o_proj"]}  # fmt: skip


@cache
def saved(name: str, kind: str, directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """peft's own merged module, and what it wrote of the adapter: config and tensors."""
    import copy

    import peft

    options = KINDS.get(kind) or {"r": 4, "lora_alpha": 8, "target_modules": OTHERS.get(name, "all-linear")}
    torch.manual_seed(len(kind))
    config = peft.LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt 2", **options)
    made = peft.get_peft_model(copy.deepcopy(family(name)), config)
    with torch.no_grad():
        for label, parameter in made.named_parameters():
            if "lora_" in label:
                parameter.normal_(0, 0.2)
    made.peft_config["default"].base_model_name_or_path = "org/base"
    made.save_pretrained(str(directory), save_embedding_layers=False)
    tensors = load_file(directory / "adapter_model.safetensors")
    raw = (directory / "adapter_config.json").read_bytes()
    return made.merge_and_unload().eval(), {"config": raw, "tensors": tensors}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("adapters")
    for each in (saved, adapter, _alone):
        each.cache_clear()


@cache
def adapter(kind: str, home: Path, name: str = "llama") -> Adapter:
    _, files = saved(name, kind, home / name / kind)
    return read(files["config"], files["tensors"], digest=f"sha256:{kind}")


def read(raw: bytes, tensors: dict[str, torch.Tensor], digest: str = "sha256:x") -> Adapter:
    config = json.loads(raw)
    record = AdapterRecord("org/base", "lora", config["r"], config["lora_alpha"], (), bool(config.get("use_rslora")))
    return Adapter.read(digest, record, raw, frozenset(tensors), tensors.__getitem__)


def served(home: Path, *kinds: str, dtype: torch.dtype = torch.float32, **options: Any) -> OurEngine:
    core = engine(dtype=dtype, **options)
    for kind in kinds:
        core.decoder.lora.put(kind, adapter(kind, home))
    return core


def asked(number: int, lora: str | None = None, **sampling: Any) -> Request:
    prompt = tuple((number * 7 + at * 3) % 97 + 3 for at in range(5 + number * 11 % 70))
    return replace(request(number, prompt, **sampling), lora=lora)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_peft(kind: str, home: Path) -> None:
    core = served(home, kind)
    oracle = TransformersEngine(saved("llama", kind, home / "llama" / kind)[0], frozenset(), 512, 101)
    for number in range(4):
        found = run(core, asked(number, kind))[number]
        assert found == run(oracle, asked(number))[number]
        assert found != run(core, asked(number))[number], "the adapter changes something"


@pytest.mark.parametrize("name", OTHERS)
def test_every_family_takes_adapters(name: str, home: Path) -> None:
    core = engine(name)
    core.decoder.lora.put("a", adapter("other", home, name))
    oracle = TransformersEngine(saved(name, "other", home / name / "other")[0], frozenset(), 512, 101)
    assert run(core, asked(2, "a"))[2] == run(oracle, asked(2))[2]


CHOICES = (None, "narrow", "wide", "patterned")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_is_the_same_alone_and_beside_any_others(dtype: torch.dtype, home: Path) -> None:
    requests = [asked(number, CHOICES[number % 4], max_tokens=16) for number in range(24)]
    core = served(home, *KINDS, dtype=dtype)
    alone = {each.id: run(core, each)[each.id] for each in requests}
    core.scheduler.pages.drop_cached()
    assert run(served(home, *KINDS, dtype=dtype, prefill=60, quantum=30, running=20), *requests) == alone
    base = engine(dtype=dtype)
    for each in requests[::4]:
        assert run(base, each)[each.id] == alone[each.id], "who has no adapter gets the base model's tokens"


def test_a_resume_goes_on_at_every_position(home: Path) -> None:
    first = asked(1, "wide", max_tokens=24, temperature=0.9, seed=3, repetition_penalty=1.1)
    core = served(home, "wide")
    whole = run(core, first)[1]
    core.scheduler.pages.drop_cached()
    resumed = [replace(first, id=at, emitted=whole[:at]) for at in range(len(whole))]
    for at, rest in run(core, *resumed, asked(90)).items():
        assert at == 90 or whole[:at] + rest == whole


@settings(max_examples=examples(10))
@given(st.data())
def test_no_schedule_changes_a_token(home: Path, data: st.DataObject) -> None:
    """Adapters come and go while requests that name them run."""
    core = served(
        home, *KINDS, kv=data.draw(st.integers(3, 8)) * page_bytes(), prefill=data.draw(st.sampled_from([16, 100])),
        running=data.draw(st.integers(1, 6)),
    )  # fmt: skip
    waiting, got, gone = list(data.draw(st.permutations(range(8)))), dict[int, tuple[int, ...]](), set[int]()
    while waiting or core.busy:
        action = data.draw(st.sampled_from(["add", "step", "step", "cancel", "evict", "sleep"]))
        if action == "add" and waiting:
            number = waiting.pop()
            kind = CHOICES[number % 4]
            if kind is not None:
                core.decoder.lora.put(kind, adapter(kind, home))
            core.add(asked(number, kind))
        elif action == "cancel" and got:
            chosen = data.draw(st.sampled_from(sorted(got)))
            gone.add(chosen)
            core.cancel(chosen)
        elif action == "evict":
            core.decoder.lora.drop(data.draw(st.sampled_from(sorted(KINDS))))
        elif action == "sleep":
            core.sleep()
            core.wake()
        for event in core.step():
            assert event.error is None
            got[event.request] = got.get(event.request, ()) + event.ids
    core.scheduler.check()
    for number, tokens in got.items():
        expected = _alone(home, number)
        assert tokens == (expected[: len(tokens)] if number in gone else expected)


@cache
def _alone(home: Path, number: int) -> tuple[int, ...]:
    return run(served(home, *KINDS), asked(number, CHOICES[number % 4]))[number]


def test_pages_belong_to_their_adapter(home: Path) -> None:
    core = served(home, "narrow", "wide")
    made = pages_belong_to_their_adapter(core, tuple(range(3, 101)) * 3, cached=256)
    # Content decides: the same adapter under another name finds the pages too.
    core.decoder.lora.put("alias", adapter("wide", home))
    core.add(replace(made[1], id=30, lora="alias"))
    (event, *_) = finish(core)[30]
    assert event.cached == 256


def test_pages_move_with_their_adapter(home: Path) -> None:
    prompt = tuple(range(3, 101)) * 3
    source, target = served(home, "wide"), served(home, "wide")
    first = replace(request(1, prompt, max_tokens=20), lora="wide")
    whole = run(served(home, "wide"), first)[1]
    source.add(first)
    while source.stats().generated < 4:
        source.step()
    pages, exported = source.export_pages(1), source.export(1)
    assert target.import_pages(pages, "wide") == 2
    target.add(replace(exported.request, emitted=exported.ids))
    events = finish(target)[1]
    assert events[0].cached == 256
    assert exported.ids + ids(events) == whole
    target.add(replace(first, id=2, lora=None))
    assert finish(target)[2][0].cached == 0, "they are not the base model's"


def test_who_names_what_is_not_there_is_refused(home: Path) -> None:
    core = served(home, "narrow")
    core.add(asked(0, "narrow"))
    core.decoder.lora.drop("narrow")
    core.decoder.lora.drop("narrow")
    with pytest.raises(ModelNotFound, match="narrow"):
        core.add(asked(1, "narrow"))
    assert ids(finish(core)[0]) == run(served(home, "narrow"), asked(0, "narrow"))[0], "who runs keeps it"
    with pytest.raises(InvalidRequest, match="runs no adapters"):
        TransformersEngine(family("llama"), frozenset(), 512, 101).add(asked(0, "narrow"))


def test_an_adapter_that_does_not_fit_is_refused_by_name(home: Path) -> None:
    _, files = saved("llama", "narrow", home / "llama" / "narrow")
    raw, tensors = files["config"], files["tensors"]
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert first in tensors
    core = engine()

    def put(changed: dict[str, torch.Tensor]) -> None:
        core.decoder.lora.put("x", read(raw, changed))

    def renamed(old: str, new: str) -> dict[str, torch.Tensor]:
        return {name.replace(old, new): tensor for name, tensor in tensors.items()}

    with pytest.raises(InvalidCheckpoint, match=r"another model.*q_proj"):
        put({**tensors, first: torch.zeros(4, 32)})
    with pytest.raises(InvalidCheckpoint, match=r"another model.*layers\.9"):
        put(renamed("layers.2", "layers.9"))
    with pytest.raises(UnsupportedModel, match="lm_head"):
        put(renamed("model.layers.0.self_attn.q_proj", "lm_head"))
    with pytest.raises(InvalidCheckpoint, match="one half"):
        put({name: tensor for name, tensor in tensors.items() if name != first})
    for name in ("base_model.model.lm_head.weight", first.replace("lora_A", "lora_embedding_A"),
                 first.replace("lora_A.weight", "lora_magnitude_vector")):  # fmt: skip
        with pytest.raises(UnsupportedModel):
            put({**tensors, name: torch.zeros(4)})
    with pytest.raises(UnsupportedModel, match="dora"):
        read(json.dumps({**json.loads(raw), "use_dora": True}).encode(), tensors)
    with pytest.raises(InvalidCheckpoint, match="adapter_config"):
        read(b'{"r": 4, "lora_alpha": 4, "rank_pattern": 5}', tensors)
    with pytest.raises(ModelNotFound):
        core.add(asked(0, "x"))


def test_where_tiles_do_not_hold_each_row_is_a_product_by_itself(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(served(home, "wide"), asked(3, "wide"))[3]
    assert adapter("wide", home).tile == TILE
    monkeypatch.setattr(LowRank, "__call__", _by_place)
    _, files = saved("llama", "wide", home / "llama" / "wide")
    strict = read(files["config"], files["tensors"])
    assert strict.tile == 1
    monkeypatch.undo()
    core = engine()
    core.decoder.lora.put("wide", strict)
    assert run(core, asked(3, "wide"), asked(4))[3] == whole


def _by_place(self: LowRank, x: torch.Tensor) -> torch.Tensor:
    """A library that treats the last rows of a product in another way."""
    made = torch.mm(torch.mm(x, self.a), self.b)
    made[-3:] += 1e-6
    return made


def _reloaded(init: Any, directory: Path) -> tuple[torch.Tensor, bytes, dict[str, torch.Tensor]]:
    """Logits of what peft makes of an adapter that it has saved itself, and what it saved."""
    import copy

    import peft

    options: dict[str, Any] = init if isinstance(init, dict) else {"init_lora_weights": init}
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **options)
    made = peft.get_peft_model(copy.deepcopy(family("llama")), config)
    with torch.no_grad():
        for label, parameter in made.named_parameters():
            if "lora_" in label:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    made.peft_config["default"].base_model_name_or_path = "org/base"
    made.save_pretrained(str(directory), save_embedding_layers=False)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(family("llama")), str(directory)).eval()
    with torch.inference_mode():
        logits: torch.Tensor = again(input_ids=torch.arange(3, 40)[None]).logits
    raw = (directory / "adapter_config.json").read_bytes()
    return logits, raw, load_file(directory / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "init", [True, "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora", {"alora_invocation_tokens": [90, 91]}],
    ids=str,
)  # fmt: skip
def test_an_adapter_is_what_peft_makes_of_it_or_is_refused(init: Any, tmp_path: Path) -> None:
    """Some take away from the base what they add, or count behind some tokens only: their matrices alone are wrong."""
    import copy

    expected, raw, tensors = _reloaded(init, tmp_path)
    if init not in (True, "gaussian", "orthogonal"):
        with pytest.raises(UnsupportedModel, match=r"init_lora_weights|alora_invocation_tokens"):
            read(raw, tensors)
        return
    ours = read(raw, tensors)
    merged = copy.deepcopy(family("llama"))
    with torch.inference_mode():
        for module, half in ours.modules.items():
            merged.get_submodule(module).weight.add_((half.a @ half.b).t())
        found = merged(input_ids=torch.arange(3, 40)[None]).logits
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("which", ["project_in", "project_out"])
def test_projections_around_the_layers_take_no_adapters(which: str, home: Path) -> None:
    """OPT-350m's, of which peft's ``all-linear`` has both: the last one sees no rows but those that are asked for, and
    in a pipeline neither is of a stage's layers. A step with one would end the calls of everybody."""
    _, files = saved("opt 350m", "other", home / "opt 350m" / "other")
    chosen = {name: each for name, each in files["tensors"].items() if which in name or "fc1" in name}
    assert any(which in name for name in chosen)
    core = engine("opt 350m")
    with pytest.raises(UnsupportedModel, match=which):
        core.decoder.lora.put("a", read(files["config"], chosen))
    rest = {name: each for name, each in chosen.items() if which not in name}
    core.decoder.lora.put("a", read(files["config"], rest))
    assert run(core, asked(2, "a"))[2]


def test_an_adapter_of_another_rank_than_its_configuration_says_is_refused(tmp_path: Path) -> None:
    """As peft refuses it: by the configuration alone it would count twice or half as much."""
    import copy

    import peft

    _, raw, tensors = _reloaded(True, tmp_path)
    other = json.dumps({**json.loads(raw), "r": 8}).encode()
    (tmp_path / "adapter_config.json").write_bytes(other)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.PeftModel.from_pretrained(copy.deepcopy(family("llama")), str(tmp_path))
    with pytest.raises(InvalidCheckpoint, match=r"rank 4.* says 8"):
        read(other, tensors)


def test_an_adapter_whose_matrices_lie_the_other_way_round_is_refused(home: Path) -> None:
    """Only GPT-2's are stored as (in, out). A step with one would end the calls of everybody."""
    _, files = saved("llama", "wide", home / "llama" / "wide")
    swapped = {
        name.replace("up_proj", "X").replace("down_proj", "up_proj").replace("X", "down_proj"): tensor
        for name, tensor in files["tensors"].items()
    }
    core = engine()
    with pytest.raises(InvalidCheckpoint, match="another model"):
        core.decoder.lora.put("a", read(files["config"], swapped))

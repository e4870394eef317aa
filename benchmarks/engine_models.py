"""The models of ``engine``: the demo model in either dtype, as ours and as transformers has it; a synthetic one."""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from benchmarks.cold_cases import MODEL
from benchmarks.load_model import Shape, header_of
from benchmarks.programs import ProgramFailed
from sllm_loaderd.convert.directory import convert_directory
from sllm_runtime.protocol.checkpoint import INDEX_NAME, decode_index, partition_name
from sllm_runtime.worker.engine.base import Engine, Request, Sampling
from sllm_runtime.worker.engine.choice import Known, recognise
from sllm_runtime.worker.engine.ours import selftest
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.numerics import FAST, Numerics
from sllm_runtime.worker.tensors import CheckpointTensors, TypedTensors

DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
KV_BYTES: Final = 2**29
_NOISE: Final = 2**22
_MARGIN: Final = 0.5
_OF_SPREAD: Final = 0.25
"""Of a row's standard deviation: rounding explains that a token has a logit so much below the best, and no more than
``_MARGIN``."""
Prompts = Sequence[tuple[int, ...]]
Outputs = Mapping[int, tuple[int, ...]]
"""Ids by the prompt's place."""


@dataclass(frozen=True)
class Demo:
    """One dtype of it. ``theirs`` and ``known`` have the same weights; ``level`` is what the self-test found."""

    dtype: torch.dtype
    theirs: Any
    known: Known
    level: Numerics

    @classmethod
    def load(cls, name: str) -> Demo:
        """``name`` of DTYPES. Raises ``ProgramFailed`` where no level of exactness holds."""
        dtype = DTYPES[name]
        module: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
        module.eval()
        raw = json.loads((MODEL / "config.json").read_bytes())
        tensors = TypedTensors(converted(), dtype)
        known = recognise(raw, "auto", tensors, tensors.shapes, dtype)
        if known is None:
            raise ProgramFailed("the demo model is none of ours")
        proof = selftest.prove(known.decoder, "")
        if not proof.exact:
            raise ProgramFailed(f"no level of exactness holds for {name}")
        return cls(dtype, module, known, proof.numerics)

    @property
    def nbytes(self) -> int:
        """Of the weights that each step reads."""
        return sum(each.nbytes for each in self.theirs.parameters())

    def engine(self, *, exact: bool = True) -> OurEngine:
        """A new one, with an empty cache."""
        return OurEngine(self.known.decoder, frozenset(), self.level if exact else FAST, KV_BYTES)


@dataclass
class Agreement:
    """What systems say to the same prompts, held against each other and against transformers' logits. What was found
    right once is not looked at again. Raises ``ProgramFailed`` for anything else."""

    theirs: Any
    """The model as transformers has it."""
    prompts: Prompts
    known: dict[str, Outputs] = field(default_factory=dict)

    def hold(self, system: str, found: Outputs, *, rounds: bool = False) -> None:
        """The first system's every token has to be transformers' own; the others' are the first one's. Those of a
        system that ``rounds`` (other kernels, another dtype of sums or of a KV cache) may differ where rounding
        explains each."""
        if found == self.known.get(system):
            return
        if not self.known:
            for at, prompt in enumerate(self.prompts):
                follows(self.theirs, prompt, found[at])
        else:
            right = next(iter(self.known.values()))
            for at, prompt in enumerate(self.prompts):
                same(self.theirs, prompt, right[at], found.get(at, ()), rounds=rounds)
        self.known.setdefault(system, found)


def same(theirs: Any, prompt: tuple[int, ...], right: tuple[int, ...], found: tuple[int, ...], *, rounds: bool) -> None:
    """Raise ``ProgramFailed`` where ``found`` differs from what is right, or, if its system ``rounds``, where rounding
    does not explain a token of either, from the first that differs to the end."""
    if found == right:
        return
    at = next((n for n, pair in enumerate(zip(right, found, strict=False)) if pair[0] != pair[1]), -1)
    if not rounds or len(found) != len(right):
        raise ProgramFailed(f"outputs of {len(right)} and {len(found)} tokens differ at {at}")
    for ids in (right, found):
        follows(theirs, prompt, ids, at)


def follows(theirs: Any, prompt: tuple[int, ...], ids: tuple[int, ...], begin: int = 0) -> None:
    """Raise ``ProgramFailed`` if one of ``ids``, from ``begin`` on, is not what transformers takes after those before
    it, by more than rounding explains."""
    weights = next(theirs.parameters())
    with torch.inference_mode():
        given = torch.tensor([(*prompt, *ids[:-1])], device=weights.device)
        rows = theirs(input_ids=given).logits[0, len(prompt) - 1 + begin :].float().cpu()
    said = rows.gather(1, torch.tensor(ids[begin:])[:, None])[:, 0]
    behind = rows.max(-1).values - said
    beyond = behind > torch.clamp(_OF_SPREAD * rows.std(-1), max=_MARGIN)
    if bool(beyond.any()):
        at = int(beyond.nonzero()[0])
        other, gap = int(rows[at].argmax()), float(behind[at])
        raise ProgramFailed(f"token {begin + at} is {ids[begin + at]}, transformers says {other}, {gap:.2g} apart")


def converted() -> CheckpointTensors:
    """The demo model's tensors, in memory as an instance has them."""
    with tempfile.TemporaryDirectory(prefix="be-") as name:
        convert_directory(MODEL, Path(name) / "ck")
        index = decode_index((Path(name) / "ck" / INDEX_NAME).read_bytes())
        data = (Path(name) / "ck" / partition_name(0)).read_bytes()
    return CheckpointTensors(index, (ctypes.c_ubyte * len(data)).from_buffer_copy(data))


def prompts(count: int, length: int, vocabulary: int, seed: int = 1) -> list[tuple[int, ...]]:
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, vocabulary, (length,), generator=generator).tolist()) for _ in range(count)]


def asked(number: int, prompt: tuple[int, ...], tokens: int) -> Request:
    """Greedy, and exactly ``tokens`` of them."""
    return Request(id=number, prompt=prompt, sampling=Sampling(max_tokens=tokens, ignore_eos=True))


def outputs(core: Engine) -> dict[int, tuple[int, ...]]:
    """Step until nothing is left. Raises the first request's error."""
    found: dict[int, tuple[int, ...]] = {}
    while core.busy:
        for event in core.step():
            if event.error is not None:
                raise event.error
            found[event.request] = found.get(event.request, ()) + event.ids
    return found


def write_synthetic(directory: Path, shape: Shape) -> None:
    """A random model whose logits are finite; the same noise again and again."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(shape.config()))
    noise = (torch.randn(_NOISE, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16)
    data = noise.view(torch.uint8).numpy().tobytes()
    with (directory / "model.safetensors").open("wb") as out:
        out.write(header_of(shape.tensors()))
        left = shape.nbytes
        while left:
            left -= out.write(data[:left])

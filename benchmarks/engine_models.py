"""The models of ``engine``: the demo model in either dtype, as ours and as transformers has it; a synthetic one."""

from __future__ import annotations

import ctypes
import json
import tempfile
from dataclasses import dataclass
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

    def same(
        self, prompt: tuple[int, ...], ours: tuple[int, ...], theirs: tuple[int, ...], *, rounded: bool = False
    ) -> None:
        """Raise ``ProgramFailed`` where greedy outputs differ at a token that rounding does not explain. In float32
        none does, unless theirs are of a system that ``rounded`` (a KV cache in float16)."""
        if ours == theirs:
            return
        at = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)
        if at < 0 or (self.dtype is torch.float32 and not rounded):
            raise ProgramFailed(f"outputs of {len(ours)} and {len(theirs)} tokens differ at {at}")
        with torch.inference_mode():
            row = self.theirs(input_ids=torch.tensor([(*prompt, *ours[:at])])).logits[0, -1].float()
        if (gap := abs(float(row[ours[at]] - row[theirs[at]]))) > _MARGIN:
            raise ProgramFailed(f"token {at} is {ours[at]}, transformers says {theirs[at]}, {gap:.2f} apart")


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

"""Which engine runs a model: ours where it knows the architecture, else the one over transformers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
import torch

from sllm_runtime.protocol.errors import UnsupportedModel
from sllm_runtime.worker.engine import admission, devices
from sllm_runtime.worker.engine.base import Engine
from sllm_runtime.worker.engine.ours import selftest
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.model import build, config
from sllm_runtime.worker.engine.ours.model.backend import Backend
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.model.host import Host
from sllm_runtime.worker.engine.ours.model.survey import Needs, survey
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.ours.runner import Runner

log = logging.getLogger(__name__)
_CPU: Final = torch.device("cpu")
_COMPUTES: Final = ("cpu", "cuda")
"""Kinds of devices that our engine computes on."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """An engine, its proof for the starts to come (empty: it has none), and what gives back what it has beside
    memory. ``proved_s``: seconds that the proof took."""

    engine: Engine
    proof: str
    release: Callable[[], None] | None = None
    proved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine is told beside its model. ``model``: digest of the weights.

    ``proof``: what the self-test of an earlier start found (``selftest.Proof`` as JSON), used if it is for the same
    weights, libraries, processor and threads.
    """

    kv_bytes: int
    model: str = ""
    proof: str = ""
    gpu_bytes: int | None = None
    """What may be taken of a GPU beside the weights; ``None``: what is free."""
    layers: int | None = None
    """How many of the first layers this process has; all of them unless it is given."""
    runner: Callable[[selftest.Proof], Runner] | None = None
    """Makes who computes with other processes, once it is known how exact that is; ``None``: this one alone does."""
    proofs: tuple[str, ...] = ()
    """What it found on other machines: used where this one is of the same kind and computes the same (``agrees``)."""
    proved_s: float = 0.0
    """Seconds that ``proof`` took, if it was found in this start."""


@dataclass(frozen=True, slots=True)
class Known:
    """A model that our engine runs, though none of its bytes may be there. ``needs``: what each layer reads."""

    architecture: str
    decoder: Decoder
    needs: Needs

    def proof(self, settings: Settings) -> selftest.Proof | None:
        """What an earlier start found, if it holds for this one: then nothing has to be tested, and no weights read."""
        return selftest.remembered(settings.proof, self.mark(settings))

    def found(self, settings: Settings) -> tuple[selftest.Proof, float]:
        """That, or what another machine found, if this one computes the same, or what a self-test finds now; and the
        seconds that finding out took in this start."""
        if (own := self.proof(settings)) is not None:
            return own, settings.proved_s
        began = time.perf_counter()
        return self._tested(settings), time.perf_counter() - began

    def _tested(self, settings: Settings) -> selftest.Proof:
        mark = self.mark(settings)
        for text in settings.proofs:
            proof = selftest.remembered(text, mark)
            if proof is not None and selftest.agrees(self.decoder, proof, layers=settings.layers):
                return proof
        return selftest.prove(self.decoder, mark, layers=settings.layers)

    def engine(self, files: Mapping[str, bytes], raw: Mapping[str, Any], settings: Settings) -> Chosen:
        """The engine; ``raw`` is config.json."""
        found, proved_s = self.found(settings)
        if not found.exact:
            log.warning(
                "no level of exactness holds for %s on this machine: a resumed call may differ", self.architecture
            )
        make = settings.runner or partial(_on_device, self.decoder, settings.gpu_bytes)
        runner = make(found)
        engine = OurEngine(
            self.decoder,
            admission.end_ids(raw, files.get("generation_config.json"), self.decoder.vocabulary),
            found.numerics,
            settings.kv_bytes,
            proven=found.exact,
            fingerprint=found.numerics_class,
            max_context=admission.max_context(raw),
            runner=runner,
        )
        release = None if runner is None else runner.close
        return Chosen(engine, msgspec.json.encode(found).decode(), release, proved_s)

    def mark(self, settings: Settings) -> str:
        """What decides the bits, as ``selftest.fingerprint`` has it."""
        return selftest.fingerprint(self.architecture, settings.model, self.decoder.dtype, self.decoder.backend)


def recognise(
    raw: Mapping[str, Any],
    loader: str,
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device = _CPU,
) -> Known | None:
    """The model of a config.json (``raw``), if it is one of ours; no byte of ``tensors`` is read, and no module of
    transformers built. ``loader`` is the manifest's; ``device``: where ``tensors`` are. Raises ``InvalidCheckpoint`` if
    ``shapes`` lacks a tensor or has another shape for it."""
    found = config.read(raw, loader)
    if found is None:
        return None
    try:
        decoder = build(*found, tensors, dtype, EXACT.rows, backend_of(device))
        return Known(found[0], decoder, survey(*found, shapes, dtype, EXACT.rows))
    except UnsupportedModel as error:
        log.info("%s; transformers runs it", error.message)
        return None


def choose_engine(module: Any, files: Mapping[str, bytes], raw: Mapping[str, Any], settings: Settings) -> Chosen:
    """The engine for ``module``, a causal language model with its weights bound; ``raw`` is its config.json."""
    architecture = type(module).__name__
    decoder = _known(module, architecture)
    if decoder is not None:
        return Known(architecture, decoder, {}).engine(files, raw, settings)
    from sllm_runtime.worker.engine.transformers_engine import TransformersEngine

    vocabulary = int(module.get_input_embeddings().weight.shape[0])
    eos = admission.end_ids(raw, files.get("generation_config.json"), vocabulary)
    engine = TransformersEngine(
        module, eos, admission.max_context(raw), vocabulary, why_broken=partial(_why_broken, module)
    )
    return Chosen(engine, "")


def _why_broken(module: Any) -> str:
    """See ``Backend.broken``; of each device that ``module`` is on."""
    where = {tensor.device for tensor in module.parameters()}
    found = (devices.why_broken(device, partial(devices.ask, device)) for device in where)
    return next(filter(None, found), "")


def _known(module: Any, architecture: str) -> Decoder | None:
    """Ours, if it is one of transformers' own classes that ours knows, on a CPU or a GPU."""
    tensors = dict(module.named_parameters())
    first: torch.Tensor = next(iter(tensors.values()))
    if not type(module).__module__.startswith("transformers.") or first.device.type not in _COMPUTES:
        return None
    try:
        return build(architecture, module.config, tensors, first.dtype, EXACT.rows, backend_of(first.device))
    except UnsupportedModel as error:
        log.info("%s; transformers runs it", error.message)
        return None


def backend_of(device: torch.device) -> Backend:
    """What computes where ``device`` is."""
    if device.type == "cpu":
        return Host()
    from sllm_runtime.worker.engine.ours.gpu.device import Device  # imports triton, which few instances need

    return Device.here(device)


def kv_room(decoder: Decoder, layers: int, settings: Settings) -> int:
    """Bytes that the KV cache of so many of its layers may take in a process of several: those of ``settings``, or on a
    GPU of its own what is free there and granted. Raises ``OutOfMemory`` where that is not a page."""
    backend = decoder.backend
    if isinstance(backend, Host):
        return settings.kv_bytes
    from sllm_runtime.worker.engine.ours.gpu.device import Device
    from sllm_runtime.worker.engine.ours.gpu.runner import pages_in

    assert isinstance(backend, Device)
    if backend.free is None:
        return settings.kv_bytes
    page = backend.kv_shape(layers, decoder.heads, decoder.dtype).page_bytes
    return pages_in(page, backend.free(), settings.gpu_bytes) * page


def _on_device(decoder: Decoder, granted: int | None, found: selftest.Proof) -> Runner | None:
    """None: the engine's own, on the CPU."""
    if isinstance(decoder.backend, Host):
        return None
    from sllm_runtime.worker.engine.ours.gpu.device import Device
    from sllm_runtime.worker.engine.ours.gpu.runner import DeviceRunner

    assert isinstance(decoder.backend, Device)
    return DeviceRunner(decoder, decoder.backend, found.numerics, granted=granted)

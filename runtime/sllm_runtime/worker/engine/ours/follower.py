"""A process that computes what another one's engine decides: layers, their KV, and nothing else outlives a step.

All it knows of a sequence is what a step says: positions and pages. So there is nothing to get out of step with who
drives, and a call is resumed from its tokens alone when one of them is lost.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Final

import torch

from sllm_runtime.protocol.errors import InternalError, InvalidRequest, ProtocolError, SllmError
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.stages import STAGE_TRANSITIONS, LayerRange, Lend, OnEdge, Sleep, StageState, Step, Wake
from sllm_runtime.worker.engine.ours.batch import Batch
from sllm_runtime.worker.engine.ours.edge import Edges
from sllm_runtime.worker.engine.ours.model.backend import Kv, Steps
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import FAST, GPU_LEVELS, LEVELS, Numerics
from sllm_runtime.worker.engine.ours.pages import pages_for

log = logging.getLogger(__name__)
_LEVELS: Final = {level.name: level for level in (FAST, *LEVELS, *GPU_LEVELS)}


def check_version(version: int, who: str) -> None:
    """Raise ``ProtocolError`` for a version that is not spoken here."""
    if version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
        raise ProtocolError(f"{who} speaks version {version}, {PROTOCOL_VERSION} is served")


def level(name: str) -> Numerics:
    """The level of exactness of that name. Raises ``ProtocolError``."""
    if name not in _LEVELS:
        raise ProtocolError(f"level {name!r} is unknown here")
    return _LEVELS[name]


def check_step(step: Step, number: int, rows: int, pages: int) -> None:
    """Raise ``ProtocolError`` unless ``step`` is the one that is due and names what is there."""
    if step.number != number:
        raise ProtocolError(f"step {number} was due, step {step.number} came")
    if not step.parts or sum(part.count for part in step.parts) > rows:
        raise ProtocolError(f"step {number} has no rows, or more than {rows}")
    for part in step.parts:
        if len(part.pages) < pages_for(part.start + part.count):
            raise ProtocolError(f"step {number}: {len(part.pages)} pages hold no {part.start + part.count} positions")
    named = (page for each in (step.fresh, *(part.pages for part in step.parts)) for page in each)
    if max(named, default=0) >= pages:
        raise ProtocolError(f"step {number} names a page that is not below {pages}")


class Follower(ABC):
    """Layers of ``decoder``, whose KV cache may take ``kv_bytes``. Owns ``edges``."""

    def __init__(self, decoder: Decoder, layers: LayerRange, edges: Edges, kv_bytes: int) -> None:
        if not 0 <= layers.low < layers.high <= decoder.count:
            raise InvalidRequest(f"{layers} are no run of {decoder.count} layers", field="layers")
        self.state = StageState.OPENING
        self._decoder = decoder
        self._layers = layers
        self._edges = edges
        self._shape = decoder.backend.kv_shape(layers.high - layers.low, decoder.heads, decoder.dtype)
        self._room = kv_bytes // self._shape.page_bytes
        self._kv: Kv | None = None
        self._batches: Steps | None = None
        self._next = 0

    @abstractmethod
    def _open(self) -> tuple[Numerics, int]:
        """Come to terms with who drives: the level, and most rows of a step. Raises what speaks against it."""

    @abstractmethod
    def _pass_on(self, message: OnEdge) -> None:
        """Tell who is behind, if anybody is."""

    def _lend(self, message: Lend) -> None:
        """Take adapters. Raises ``ProtocolError`` where there are none."""
        raise ProtocolError(f"what computes {self._layers} runs no adapters, {message.table} bytes of them came")

    @abstractmethod
    def _run(self, step: Step, batch: Batch) -> None:
        """Compute the step."""

    def run(self) -> SllmError:
        """Serve until who drives is gone, or something breaks; says what it was, here and to who listens."""
        try:
            self._numerics, self._rows = self._open()
            self._move(StageState.ASLEEP)
            while True:
                self._handle()
        except SllmError as error:
            failure = error
        except Exception as error:  # a bug, or a library's: nobody may wait for ever
            log.exception("what computes %s failed", self._layers)
            failure = InternalError(f"what computes {self._layers} failed: {type(error).__name__}: {error}")
        finally:
            self._move(StageState.ENDED)
        self._edges.tell(failure)
        self._edges.close()
        return failure

    def _move(self, state: StageState) -> None:
        if state not in STAGE_TRANSITIONS[self.state]:
            raise ProtocolError(f"a stage that is {self.state.value} cannot become {state.value}")
        self.state = state

    def _handle(self) -> None:
        # No deadline: an idle follower waits for its next step as long as who drives it lives.
        message = self._edges.receive(None)
        if isinstance(message, Lend):
            self._lend(message)
            return
        if not isinstance(message, Wake | Sleep | Step):
            raise ProtocolError(f"{type(message).__name__} came where a step was due")
        self._pass_on(message)
        if isinstance(message, Wake):
            self._wake(message.pages)
        elif isinstance(message, Sleep):
            self._move(StageState.ASLEEP)
            self._kv = self._batches = None
        else:
            self._move(StageState.COMPUTING)
            self._compute(message)
            self._move(StageState.AWAKE)

    def _wake(self, pages: int) -> None:
        self._move(StageState.AWAKE)
        if not 0 < pages <= self._room:
            raise ProtocolError(f"{pages} pages of KV cache are not 1 to {self._room}")
        decoder = self._decoder
        self._kv, self._batches = decoder.backend.cache(
            self._shape, pages, decoder.heads, self._numerics, decoder.dtype
        )

    def _compute(self, step: Step) -> None:
        assert self._kv is not None
        assert self._batches is not None
        check_step(step, self._next, self._rows, self._kv.pages)
        self._next += 1
        with torch.inference_mode():
            for page in step.fresh:
                self._kv.clear(page)
            self._run(step, self._batches.make(step.parts))

"""A stage behind the head: its layers, their KV, and nothing that outlives a step but that.

All it knows of a sequence is what a step says: positions and pages. So there is nothing to get out of step with the
head, and a call is resumed from its tokens alone when a stage is lost.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec
import torch

from sllm_runtime.protocol.errors import InternalError, InvalidRequest, ProtocolError, SllmError, StartFailed
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.stages import STAGE_TRANSITIONS, Hello, LayerRange, Sleep, StageState, Step, Wake
from sllm_runtime.worker.engine.ours.batch import Batches
from sllm_runtime.worker.engine.ours.kv import KvShape, KvStore
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import EXACT, FAST, LEVELS, Numerics
from sllm_runtime.worker.engine.ours.pages import pages_for
from sllm_runtime.worker.engine.ours.pipeline.edge import Edges

log = logging.getLogger(__name__)
_LEVELS: Final = {level.name: level for level in (FAST, *LEVELS)}


def dtype_name(dtype: torch.dtype) -> str:
    """As ``Hello.dtype`` has it."""
    return str(dtype).removeprefix("torch.")


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


class Stage:
    """Layers ``[low, high)`` of ``decoder``, whose KV cache may take ``kv_bytes``. Owns ``edges``.

    ``fingerprint``: of this process's numerics (``selftest.fingerprint``), which the head's must equal.
    """

    def __init__(self, decoder: Decoder, low: int, high: int, edges: Edges, *, kv_bytes: int, fingerprint: str) -> None:
        if not 0 <= low < high <= decoder.count:
            raise InvalidRequest(f"layers {low} to {high} are no run of {decoder.count} layers", field="layers")
        self.state = StageState.OPENING
        self._decoder = decoder
        self._layers = LayerRange(low, high)
        self._edges = edges
        self._numerics = EXACT
        self._shape = KvShape(high - low, decoder.heads.kv, decoder.heads.width)
        self._room = kv_bytes // self._shape.page_bytes
        self._fingerprint = fingerprint
        self._hello: Hello | None = None
        self._kv: KvStore | None = None
        self._batches: Batches | None = None
        self._next = 0

    def run(self) -> SllmError:
        """Serve until the stage before is gone, or something breaks; says what it was, here and to the stage behind."""
        try:
            self._open()
            while True:
                self._handle()
        except SllmError as error:
            failure = error
        except Exception as error:  # a bug, or a library's: nobody may wait for ever
            log.exception("stage of %s failed", self._layers)
            failure = InternalError(f"the stage of {self._layers} failed: {type(error).__name__}: {error}")
        finally:
            self._move(StageState.ENDED)
        self._edges.tell(failure)
        self._edges.close()
        return failure

    def _move(self, state: StageState) -> None:
        if state not in STAGE_TRANSITIONS[self.state]:
            raise ProtocolError(f"a stage that is {self.state.value} cannot become {state.value}")
        self.state = state

    def _open(self) -> None:
        hello = self._edges.accept(self._edges.patience_s)
        if hello.layers:
            self._edges.before = f"the stage of {hello.layers[-1]}"
        self._check(hello)
        self._numerics = level(hello.level)
        self._hello = msgspec.structs.replace(
            hello,
            version=PROTOCOL_VERSION,
            layers=(*hello.layers, self._layers),
            pages=min(hello.pages, self._room),
            shared=self._edges.shared,
        )
        self._edges.open(self._hello)
        self._move(StageState.ASLEEP)

    def _check(self, hello: Hello) -> None:
        """Raise what keeps this stage from going on where the one before ends."""
        if hello.version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
            raise ProtocolError(f"{self._edges.before} speaks version {hello.version}, {PROTOCOL_VERSION} is served")
        mine = (self._decoder.hidden, dtype_name(self._decoder.dtype))
        if (hello.hidden, hello.dtype) != mine:
            raise ProtocolError(f"rows are {hello.hidden} numbers of {hello.dtype}, {self._layers} take {mine}")
        if not hello.layers or hello.layers[-1].high != self._layers.low:
            raise ProtocolError(f"{self._edges.before} comes before a stage of {self._layers}")
        if hello.fingerprint != self._fingerprint:
            raise StartFailed(
                f"the stage of {self._layers} would compute other bits than {self._edges.before}: libraries, "
                "processor, threads or weights differ; place the stages on nodes that are alike"
            )

    def _handle(self) -> None:
        # No deadline: an idle stage waits for its next step as long as the stage before lives.
        message = self._edges.receive(None)
        if not isinstance(message, Wake | Sleep | Step):
            raise ProtocolError(f"{type(message).__name__} came where a step was due")
        if self._layers.high < self._decoder.count:
            self._edges.send(message)
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
        self._kv = KvStore(self._shape, pages)
        self._batches = Batches(self._kv, self._decoder.heads, self._numerics)

    def _compute(self, step: Step) -> None:
        assert self._kv is not None
        assert self._batches is not None
        assert self._hello is not None
        check_step(step, self._next, self._hello.rows, self._kv.pages)
        self._next += 1
        with torch.inference_mode():
            for page in step.fresh:
                self._kv.clear(page)
            batch = self._batches.make(step.parts)
            rows = self._edges.receive_rows(step.number, batch.rows)
            rows = self._decoder.run(rows, batch, *msgspec.structs.astuple(self._layers))
            if self._layers.high == self._decoder.count:
                rows = rows.index_select(0, batch.wanted)
            self._edges.send_rows(step.number, rows)

"""What the processes of one engine say to each other: u32 big-endian length + msgpack, on one stream for each edge.

Edges are directed: messages go one way, and an edge that ends means that who sent on it is gone. Stages stand in a
ring: the head, which has the first layers and drives, then each stage in the order of layers, then the head again. Rank
0 of a tensor-parallel engine has an edge to and from every other. Who receives trusts nothing: every number is checked
against what it holds itself.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final

import msgspec

from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.limits import PROTOCOL_VERSION

MAX_STEPS: Final = 16
"""Steps on their way at once, and slots of a ring."""
MAX_STEP_ROWS: Final = 1 << 16
"""Rows of one step, padding included."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Depth = Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)]
RowCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP_ROWS)]


class StageState(Enum):
    """Where a stage stands."""

    OPENING = "opening"
    ASLEEP = "asleep"
    """It holds no KV cache."""
    AWAKE = "awake"
    COMPUTING = "computing"
    """A step was announced; its rows are awaited, or computed."""
    ENDED = "ended"


STAGE_TRANSITIONS: Final[dict[StageState, frozenset[StageState]]] = {
    StageState.OPENING: frozenset({StageState.ASLEEP, StageState.ENDED}),
    StageState.ASLEEP: frozenset({StageState.AWAKE, StageState.ENDED}),
    StageState.AWAKE: frozenset({StageState.COMPUTING, StageState.ASLEEP, StageState.ENDED}),
    StageState.COMPUTING: frozenset({StageState.AWAKE, StageState.ENDED}),
    StageState.ENDED: frozenset(),
}


class LayerRange(msgspec.Struct, frozen=True, array_like=True):
    """Layers ``[low, high)``."""

    low: Count
    high: Count

    def __str__(self) -> str:
        return f"layers [{self.low}, {self.high})"


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First on every edge. Each stage adds its range and hands it on, until it is back at the head.

    With ``shared`` a descriptor comes along: a sealed memfd of ``slots`` times ``rows * hidden`` numbers, in which the
    sender puts the rows of step n at slot n % slots. Without it rows travel in the stream.
    """

    version: int = PROTOCOL_VERSION
    fingerprint: str
    """What decides the bits: libraries, CPU, threads, dtype, weights. Stages must have the same."""
    level: str
    """Level of exactness: what rows are padded to."""
    dtype: str
    """Of activations, as torch names it."""
    hidden: Count
    """Numbers of a row."""
    rows: RowCount
    """Most rows of a step."""
    slots: Depth
    layers: tuple[LayerRange, ...]
    """Of the sender and all before it."""
    pages: Count
    """Pages of KV cache that each of them has room for."""
    shared: bool
    lends: bool = False
    """Whether each of them takes adapters (``Lend``), and can hand on the memory that they come in."""


class RankHello(msgspec.Struct, frozen=True, kw_only=True, tag="rank"):
    """First on the stream between rank 0 and another rank of a tensor-parallel engine; answered alike."""

    version: int = PROTOCOL_VERSION
    fingerprint: str
    level: str
    rank: Count
    """Of the one that is not rank 0."""
    ranks: Count
    rows: RowCount
    pages: Count


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Hold a KV cache of so many pages."""

    pages: Count


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Give the KV cache back, when all steps before this are computed."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Positions ``[start, start + count)`` of one sequence, whose pages are ``pages`` from position 0 on."""

    start: Count
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEP_ROWS)]
    samples: bool
    """Whether its last row comes back."""
    pages: tuple[Count, ...]
    tokens: tuple[Count, ...] = ()
    """Ids of the positions, for who embeds them: a rank does, a stage behind the head does not."""
    adapter: Count | None = None
    """Number of the adapter that its rows go through (``Lent``)."""


class LowRankShape(msgspec.Struct, frozen=True, array_like=True):
    """What an adapter adds to ``module``: A (inputs, rank) and B (rank, outputs)."""

    module: str
    inputs: Count
    rank: Count
    outputs: Count

    @property
    def nbytes(self) -> int:
        """Of both, in float32."""
        return 4 * self.rank * (self.inputs + self.outputs)


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that steps name by ``number``. ``tile``: rows of its products."""

    number: Count
    tile: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEP_ROWS)]
    modules: tuple[LowRankShape, ...]


class Lend(msgspec.Struct, frozen=True, tag="lend"):
    """Adapters that steps may name from now on, and those that none names any more. Goes round as steps do.

    With ``table`` a descriptor comes along: a sealed memfd of a table of so many bytes (``tuple[Lent, ...]``, msgpack)
    and behind it A and B of each module, float32 row by row, in the order of the table.
    """

    table: Count = 0
    drop: tuple[Count, ...] = ()


class Step(msgspec.Struct, frozen=True, tag="step"):
    """What is computed next. It goes ahead of its rows, so that a stage prepares while the one before it computes."""

    number: Count
    """From 0, one by one."""
    parts: tuple[Part, ...]
    fresh: tuple[Count, ...] = ()
    """Pages to be zeroed first."""


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Rows of a step: in the ring's slot, or here from byte ``at`` on, in several messages if need be."""

    step: Count
    rows: RowCount
    at: Count = 0
    data: bytes = b""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Nothing more is computed. Handed on to the head."""

    error: ErrorBody


OnEdge = Hello | RankHello | Wake | Sleep | Lend | Step | Rows | Failed

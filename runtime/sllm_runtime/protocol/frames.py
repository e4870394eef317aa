"""The messages of running calls between gateways and nodes. Hot path: msgpack arrays, several items a message.

A call is bound to ``(call, epoch)``; each hand-over to an instance is a new epoch. Both directions are reliable
streams (``stream.Outbox`` / ``Inbox``): the request's body gateway → node, the frames of the answer node → gateway.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec

from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.limits import FRAME_COST, PROTOCOL_VERSION
from sllm_runtime.protocol.timeline import Span


class FrameKind(IntEnum):
    """What a frame's ``data`` is."""

    OUTPUT = 0  # one value a function yielded or returned, as JSON text
    DELTA = 1  # msgpack ``Delta``: what the engine generated for an OpenAI route
    IDS = 2  # msgpack ``Ids``: engine tokens for resume; no caller sees them
    END = 3  # msgpack ``End``; always the last
    BODY = 4  # a part of the request's body (gateway → node only)


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One item of a call's stream. ``index`` is consecutive from 0 within ``(call, epoch)`` and direction.

    It refers to no other container, so the garbage collector need not look at it: there are very many.
    """

    index: int
    kind: FrameKind
    data: bytes
    more: bool = False
    """This value goes on in the next frame (values above MAX_PART come in parts)."""

    @property
    def cost(self) -> int:
        """Bytes that credit counts for it."""
        return len(self.data) + FRAME_COST


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a call."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token with its log probability (None: it follows nothing); ``top`` the likeliest alternatives.

    ``raw``: the bytes of the token and of each alternative, where one is no text by itself (a part of a character);
    empty where all of them are.
    """

    token: str
    logprob: float | None
    top: tuple[tuple[str, float], ...] = ()
    raw: tuple[bytes, ...] = ()


FinishReason = Literal["stop", "length", "tool_calls"]


class ToolDelta(msgspec.Struct, frozen=True, array_like=True):
    """A part of the ``index``-th call of a function that one choice makes. ``id`` and ``name`` come with its first."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Text that became final for one choice. ``finish`` is set on a choice's last delta."""

    choice: int
    text: str
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolDelta, ...] = ()


class Ids(msgspec.Struct, frozen=True, array_like=True):
    """Token ids ``[first, first + len)`` of the ``generation``-th ``generate`` of this call. None, and not ``ended``:
    it is held (``Hold`` came), and all that it drew is told."""

    generation: int
    first: int
    ids: tuple[int, ...]
    ended: bool = False
    """It has ended with these. Workers of the version before do not say."""
    cached: int | None = None
    """With the first of a generation, or its end without any: tokens of its prompt that were found computed, as usage
    has them. None: not said, also by workers of the version before."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an answer. ``error`` None: it succeeded."""

    error: ErrorBody | None = None
    usage: Usage | None = None
    spans: tuple[Span, ...] = ()
    """Of the call itself, from its arrival at the worker."""
    stopped: bool = False
    """Its instance was ended in order while it ran: no call had a part in that."""
    unseen: bool = False
    """No function has seen the call: its instance ends, and it goes to another one as if it had not been here."""
    yielded: bool | None = None
    """Of a function that succeeded: whether its outputs are what it yielded, else there is one, which it returned.
    Workers of the version before do not say: then it is as the manifest has it."""


class CallHead(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node must know of a call beside its body."""

    call: str
    epoch: int
    instance: str
    function: str
    version: int
    kind: Literal["fn", "chat", "completion"]
    stream: bool
    """Whether the caller reads values as they come (else they are joined by the gateway)."""
    body_bytes: int
    timeout_s: float
    """Remaining, from acceptance by the gateway on; no clock is compared."""
    idle_timeout_s: float
    seed: int
    """For calls that name none: drawn at admission, so that a resume samples the same."""
    recorded: tuple[tuple[int, ...], ...] = ()
    """Resume: token ids of each ``generate`` so far."""
    cached: tuple[int | None, ...] = ()
    """Resume: of each of these, as ``Ids.cached`` had it: usage is what it would have been. None: not known."""
    delivered: int = 0
    """Resume: outputs the caller already has; ``delivered_hash`` is the 16-byte BLAKE2b of their bytes in order."""
    delivered_hash: bytes = b""
    follow: bool = False
    """Migration: ids are sent as they are drawn, not in groups."""
    held: bool = False
    """Migration: it computes what it was told (``recorded``, ``Feed``) and draws no id, until a ``Feed`` lets it."""
    ended: tuple[int, ...] = ()
    """Generations that have ended. With ``held``: how they did is drawn all the same, nothing else follows."""
    credit: int = 0
    """Bytes of frames (``Frame.cost``) the node may send at once."""
    traceparent: str = ""
    created: float = 0.0
    """Unix seconds at which the call was accepted: the date that its prompt names, wherever it goes on. 0: gateways of
    the version before do not say."""
    tracestate: str = ""
    """What came beside ``traceparent``, for the function alone."""


# --- gateway → node -------------------------------------------------------------------------------
class Open(msgspec.Struct, frozen=True, kw_only=True):
    """Request/reply on the node's call subject: take this call? ``first``: body frames that fit in the message."""

    head: CallHead
    first: tuple[Frame, ...] = ()
    version: int = PROTOCOL_VERSION


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The instance is the judge of its slots. ``busy``: not now; ``gone``: drop the route. Idempotent."""

    status: Literal["accepted", "busy", "gone"]
    note: str = ""
    knows_s: float = 0.0
    """Of one that it has not: for so many seconds its node has known of all that it took. 0: also of a node of
    before."""
    feeds: bool = False
    """As ``holds``, for gateways of the version before."""
    holds: bool = False
    """Whether the call keeps ``CallHead.held`` there, and takes ``Feed`` and ``Hold``; one that does not draws from the
    beginning."""


class Parts(msgspec.Struct, frozen=True, array_like=True, tag="parts"):
    """More of the request's body."""

    call: str
    epoch: int
    frames: tuple[Frame, ...]


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """All frames below ``next_index`` are here (drop them); frames may be sent up to ``limit``, a sum of costs.

    ``follow``: the call moves, so its ids are to be sent as they are drawn. The last acknowledgement counts.
    """

    call: str
    epoch: int
    next_index: int
    limit: int
    follow: bool = False


class Resend(msgspec.Struct, frozen=True, array_like=True, tag="resend"):
    """Send again from ``index`` on."""

    call: str
    epoch: int
    index: int


class Feed(msgspec.Struct, frozen=True, array_like=True, tag="feed"):
    """Migration: ids ``[first, first + len)`` of the ``generation``-th ``generate`` are these: the call computes those
    that it has not drawn, and says them as its own. At most FEED_IDS.

    A repetition changes nothing, one that leaves a gap is as if lost; whoever has drawn others ends with
    ``not_deterministic``. One that is lost costs time alone: the same ids are drawn there, or told in the next one.
    """

    call: str
    epoch: int
    generation: int
    first: int
    ids: tuple[int, ...]
    held: bool = False
    """A call that is held stays so; else it draws from now on, each of its generations."""
    ended: bool = False
    """This generation has ended with these ids: see ``CallHead.ended``."""
    cached: int | None = None
    """Of this generation, as ``CallHead.cached``."""


class Hold(msgspec.Struct, frozen=True, array_like=True, tag="hold"):
    """Migration: the call draws no more here, or slower, until a ``Feed`` lets it; what is being drawn is told. One
    that is lost, or comes to an instance that cannot (``Opened.holds``), costs tokens that nobody needs."""

    call: str
    epoch: int
    interval_s: float = 0.0
    """Seconds from one token to the next at least; 0: it draws none."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Stop this call; answered by its END frame. Repeated until that is here. ``code`` is a wire code."""

    call: str
    epoch: int
    code: str = "cancelled"
    reason: str = ""


class ToNode(msgspec.Struct, frozen=True, array_like=True):
    """Everything one gateway has for one node in one loop tick. Subject ``sllm.call.<node>.<gateway>``."""

    items: tuple[Parts | Ack | Resend | Feed | Hold | Cancel, ...]
    version: int = PROTOCOL_VERSION


# --- node → gateway -------------------------------------------------------------------------------
class Segment(msgspec.Struct, frozen=True, array_like=True, tag="frames"):
    """Frames of one call, in order of index."""

    call: str
    epoch: int
    frames: tuple[Frame, ...]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The call is alive; its next frame will have ``next_index``."""

    call: str
    epoch: int
    next_index: int


class Unknown(msgspec.Struct, frozen=True, array_like=True, tag="unknown"):
    """This node has no such call (it restarted, or the call is long over): the gateway treats it as lost."""

    call: str
    epoch: int


class ToGateway(msgspec.Struct, frozen=True, array_like=True):
    """Everything one node has for one gateway in one step. Subject ``sllm.frames.<gateway>.<node>``.

    ``Ack`` and ``Resend`` here concern the request's body.
    """

    items: tuple[Segment | Beat | Unknown | Ack | Resend, ...]
    version: int = PROTOCOL_VERSION

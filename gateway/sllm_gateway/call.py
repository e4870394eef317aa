"""One call: what was asked, where it runs, what has come of it, and the times that its deadlines are counted from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from sllm_gateway.binding import NEVER, Binding
from sllm_gateway.move import Move
from sllm_gateway.pace import Pace
from sllm_gateway.resumption import VALUES, Resumption
from sllm_gateway.table import Version
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.frames import CallHead, End, Frame, Open
from sllm_runtime.protocol.limits import BATCH_BYTES
from sllm_runtime.protocol.records import Route, RouteEntry
from sllm_runtime.protocol.states import CALL, CallState, check, final

MOST_MOVES: Final = 16


@dataclass(frozen=True)
class Order:
    """What the caller asked for. Times are of the gateway's monotonic clock, ``created`` alone of the wall's."""

    id: str
    version: Version
    kind: Literal["fn", "chat", "completion"]
    stream: bool
    body: bytes
    seed: int
    accepted: float
    traceparent: str = ""
    created: float = 0.0
    tracestate: str = ""


@dataclass(frozen=True)
class Earlier:
    """What a call was in an earlier life of its gateway."""

    epoch: int
    numerics: str
    resumption: Resumption | None
    taken: bool
    exact: bool


@dataclass
class Marks:
    """When what happened, for deadlines and the timeline."""

    route: Route
    """As it was when the call came: an instance that is not in it was started while the call waited."""
    sent: float
    """To the instance that the answer began at; until then when it was accepted."""
    resumed: float = 0.0
    """To the instance that goes on with an answer that had begun; until then 0."""
    moves: tuple[float, ...] = ()
    """When it went over to another instance while it ran; the last ones."""
    waited: float = 0.0
    """Seconds it has waited for capacity since it last had an instance, without those in which one was being started
    for it."""
    first: float | None = None
    last: float | None = None
    failed: float | None = None
    again: float | None = None
    """Since when it waits for an instance anew, having had one."""
    read: float = 0.0
    """When its reader last got rid of something."""
    heard: float = 0.0
    """When this gateway last began to listen: when its instance had taken it, or after it had not run for a while."""
    started: RouteEntry | None = None
    """The instance whose start it waited for."""
    ready: float = 0.0
    """When that instance was there."""
    offered: tuple[RouteEntry, float] | None = None
    """An instance that was started while it waited, and since when it is there: asked to take it, and has not yet."""
    instance: str = ""
    """The last one that it has left."""

    def moved(self, now: float) -> None:
        """It goes on at another instance."""
        self.resumed = now
        self.moves = (*self.moves, now)[-MOST_MOVES:]


@dataclass
class Gathered:
    """The value that comes in parts, as far as it is here: a journal takes it whole."""

    nbytes: int = 0
    frames: int = 0
    """Those of other kinds that came between its parts too."""
    more: bool = False
    """Whether more of it is to come."""

    def take(self, frame: Frame) -> None:
        """The next frame of the call, also of no such value."""
        if not self.more:
            self.nbytes = self.frames = 0
        value = frame.kind in VALUES
        if self.more or (value and frame.more):
            self.nbytes += len(frame.data)
            self.frames += 1
        if value:
            self.more = frame.more


@dataclass(eq=False)
class Call:
    """A call's life. ``Calls`` writes it, one reader (the HTTP response) takes from it."""

    order: Order
    marks: Marks
    state: CallState = CallState.QUEUED
    over: bool = False
    """Whether nothing more will come of it. Of one whose reader is a journal it is not ``settled`` by that."""
    epoch: int = 0
    attempts: int = 0
    """Hand-overs that an instance accepted, or may have."""
    binding: Binding | None = None
    frames: list[Frame] = field(default_factory=list)
    """In order, not yet taken by the reader."""
    held: list[Frame] = field(default_factory=list)
    """Taken by the reader and not used yet: parts of a value of which more is to come, where it uses whole ones alone;
    the reserve of a stream (``pace``)."""
    gathered: Gathered = field(default_factory=Gathered)
    """Counted where its reader is a journal."""
    paces: bool = False
    """Whether its reader keeps a reserve when it is to."""
    pace: Pace | None = None
    """Of a stream that moves, or did until just now."""
    before_open: Callable[[], Awaitable[None]] | None = None
    """Done before an instance is asked to take it. Raises ``SllmError``: then none is."""
    buffered: int = 0
    """Cost of frames that the reader has not got rid of."""
    collected: int = 0
    """Cost of an answer that is to be whole, as ``OpenCalls.collects`` counts them."""
    resumption: Resumption | None = None
    """Of a call that another instance could go on with."""
    move: Move | None = None
    """Its way to another instance; it runs at ``binding`` all the while."""
    move_after: float = 0.0
    """No move is begun before."""
    queued: bool = False
    """Whether it was told that it waits, and for what."""
    cold: tuple[str, ...] = ()
    """The instances of which it was told that they were started for this call, and had it."""
    stays: bool = False
    """Another instance did not say the same: it is moved no more."""
    numerics: str = ""
    """Fingerprint of the first instance that took it: only an equal one goes on with what is there of it."""
    inherited: bool = False
    """Of a gateway that is no more: its caller may have had more than is known of."""
    exact: bool = True
    """False: an instance that it had cannot promise that the same tokens come again."""
    of_before: int = 0
    """Cost of frames that came from an instance it has left, and that the reader has not got rid of: nobody waits for
    that credit."""
    taken: bool = False
    """Whether the reader has had any: nothing can be retried from then on."""
    journaled: bool = False
    """Whether its reader is a journal: what that has stays in it, ids too."""
    end: End | None = None
    error: SllmError | None = None
    reading: bool = True
    """Whether the response is still being written."""
    writing: float | None = None
    """Since when the reader waits for its client to take something."""
    unblock: Callable[[], None] | None = None
    """Frees a reader that waits for its client."""
    write_now: Callable[[float], bool] | None = None
    """Set while the reader waits: writes what is here, ``now``, without waking it; False: the reader has to."""
    due: float = 0.0
    """When its deadlines are to be looked at next."""
    wake_at: float = NEVER
    _waker: asyncio.Future[None] | None = None

    @property
    def id(self) -> str:
        return self.order.id

    @property
    def version(self) -> Version:
        return self.order.version

    @property
    def settled(self) -> bool:
        """Whether it has ended, as its state says."""
        return final(CALL, self.state)

    @property
    def bound_to_numerics(self) -> bool:
        """Whether its answer has begun, or may have, so that only an instance of the same numerics class goes on with
        it. In a journal it begins with its first ids: whoever goes on with the call has them."""
        if self.resumption is None:
            return False
        written = self.journaled and self.taken
        return self.resumption.delivered > 0 or written or (self.inherited and bool(self.numerics))

    def go(self, state: CallState) -> None:
        """Move along the table of ``states.CALL``."""
        self.state = check(CALL, self.state, state)
        self.over = self.settled

    def answered(self, end: End) -> None:
        """Its instance has said all of the answer. What a journal is to have counts once it is written: until then it
        can still fail."""
        self.end, self.over = end, True
        if not self.journaled:
            self.settle()

    def settle(self) -> None:
        """The answer is where it is to be: it has succeeded, unless it has failed before."""
        if not self.settled:
            self.go(CallState.SUCCEEDED)

    def go_on(self, now: float) -> None:
        """Back to the queue. What came of it until now stands: an instance that goes on with it is told."""
        self.go(CallState.QUEUED)
        self.of_before = self.buffered
        self.due = now
        self.marks.again = now if self.marks.again is None else self.marks.again

    def begin_again(self, now: float) -> None:
        """Back to the queue: what came of it until now, of which its caller has seen nothing, is thrown away."""
        self.frames.clear()
        self.gathered = Gathered()
        self.buffered = 0
        self.exact = True
        self.marks.first = None
        if self.resumption is not None:
            self.resumption = self.resumption.anew()
        self.go_on(now)

    def draw_anew(self) -> None:
        """What goes on with it draws other ids: those until now, of which nobody has seen a value, are thrown away."""
        cost = sum(frame.cost for frame in self.frames)
        self.frames.clear()
        self.buffered -= cost
        self.of_before -= cost
        self.exact, self.numerics = True, ""
        if self.resumption is not None:
            self.resumption = self.resumption.anew(deaths=True)

    def break_off(self, *, stopped: bool) -> bool:
        """Its instance has died: whether another may go on (``Resumption.break_off``). Half an output is dropped."""
        assert self.resumption is not None
        waiting = [*self.held, *self.frames]
        halves = self.resumption.break_off(waiting, stopped=stopped)
        if halves is None:
            return False
        returned = {id(frame) for frame in self.held}  # that credit is the instance's again
        self.buffered -= sum(frame.cost for frame in halves if id(frame) not in returned)
        self.held, self.frames, self.gathered = [], waiting, Gathered()
        return True

    def drop_gathered(self) -> None:
        """Without the value that comes in parts, of which the last frames are, also those that the reader has taken."""
        left, self.gathered = self.gathered.frames, Gathered()
        for waiting in (self.frames, self.held):
            gone = min(left, len(waiting))
            del waiting[len(waiting) - gone :]
            left -= gone

    def bound(self, epoch: int, node: str) -> Binding | None:
        """Where it runs, or is on its way to, under this epoch at this node."""
        binding = self.binding
        if self.move is not None and self.move.binding.epoch == epoch:
            binding = self.move.binding
        if binding is None or binding.epoch != epoch or binding.node != node:
            return None
        return binding

    # --- the reader's side ------------------------------------------------------------------------
    def take(self) -> list[Frame]:
        """All frames that are here. Tell ``Calls.consumed`` when they are written."""
        frames, self.frames = self.frames, []
        self.taken = self.taken or bool(frames)
        return frames

    def take_due(self, now: float) -> list[Frame]:
        """As ``take``, without what is kept in reserve; of a call that is over all of it."""
        if self.pace is None:
            return self.take()
        self.held += self.take()
        if self.over:
            released, self.held, self.pace = self.held, [], None
            return released
        released = self.pace.release(self.held, now)
        if self.pace.over(self.held, now):
            self.pace = None
        return released

    async def changed(self, until: float) -> None:
        """Wait for frames, the end, progress, or ``until`` (to some 25 ms)."""
        self._waker = asyncio.get_running_loop().create_future()
        self.wake_at = until
        try:
            await self._waker
        finally:
            self._waker = None
            self.wake_at = NEVER

    def wake(self) -> None:
        """Let the reader look again."""
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def free_reader(self) -> None:
        """Let the reader look again, also one that waits for its client."""
        self.wake()
        if self.writing is not None and self.unblock is not None:
            self.unblock()

    # --- what is sent of it -----------------------------------------------------------------------
    def request(self, binding: Binding, now: float) -> Open:
        """Asks to take it. A head with many ids leaves less room for the body."""
        head = self.head(binding, now)
        return Open(head=head, first=binding.first(BATCH_BYTES - len(codec.pack(head))))

    def head(self, binding: Binding, now: float) -> CallHead:
        """What the node must know."""
        manifest = self.version.manifest
        return CallHead(
            call=self.id,
            epoch=binding.epoch,
            instance=binding.instance,
            function=self.version.function,
            version=self.version.number,
            kind=self.order.kind,
            stream=self.order.stream,
            body_bytes=len(self.order.body),
            timeout_s=max(0.0, self.order.accepted + manifest.timeout - now),
            idle_timeout_s=manifest.idle_timeout,
            seed=self.order.seed,
            recorded=self.resumption.recorded if self.resumption is not None else (),
            cached=self.resumption.cached if self.resumption is not None else (),
            ended=self.resumption.ended if self.resumption is not None else (),
            delivered=self.resumption.delivered if self.resumption is not None else 0,
            delivered_hash=self.resumption.digest if self.resumption is not None else b"",
            follow=binding.following,
            held=binding.held,
            credit=binding.inbox.window,
            traceparent=self.order.traceparent,
            tracestate=self.order.tracestate,
            created=self.order.created,
        )

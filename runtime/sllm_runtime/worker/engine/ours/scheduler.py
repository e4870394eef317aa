"""Who computes what in the next step. Pure: no tensors, no clock.

Every running sequence that is complete but for its last token decodes one token a step. What is left of the step's
budget goes to prefills, in chunks, to the one that has the least left first: a short prompt passes any number of long
ones, and long ones that come together are done one after the other, which is the least that they wait on the whole. In
every second step one that was passed for STARVED comes first. Who waits is begun as soon as its pages are there, and
takes what others have computed of its prefix meanwhile. When pages run out the youngest gives its up and is computed
again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from sllm_runtime.protocol.errors import QueueFull
from sllm_runtime.worker.engine.base import Request, TokenChoice
from sllm_runtime.worker.engine.ours.adapter import Adapter
from sllm_runtime.worker.engine.ours.pages import PAGE, ROOT, Pages, page_hash, pages_for
from sllm_runtime.worker.engine.sampling import Seen

STARVED: Final = 32
"""Steps in a row in which a prompt may be passed by those that have less left."""


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """It holds no page."""
    PREFILL = "prefill"
    """More than its last token is to be computed."""
    DECODE = "decode"
    """Its last token alone is to be computed."""
    HELD = "held"
    """As that, but it is not: its next token is not to be drawn yet."""
    DONE = "done"
    """It ended, failed or was cancelled; it holds no page."""


TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    State.WAITING: frozenset({State.PREFILL, State.DONE}),
    State.PREFILL: frozenset({State.DECODE, State.HELD, State.WAITING, State.DONE}),
    State.DECODE: frozenset({State.PREFILL, State.HELD, State.WAITING, State.DONE}),
    State.HELD: frozenset({State.PREFILL, State.DECODE, State.WAITING, State.DONE}),
    State.DONE: frozenset(),
}
"""A sequence goes back to waiting when it is preempted, to prefill when it is fed; from decoding to held when the last
token that it may have is drawn."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. ``tokens``: prompt and output so far."""

    request: Request
    tokens: list[int]
    state: State = State.WAITING
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """Positions whose K and V are in ``pages``."""
    cached: int = 0
    """Of its prompt, those that were found and not computed."""
    served: int = 0
    """The step that last computed a chunk of it, or began it; of one that was passed for STARVED, before it was."""
    worked: bool = False
    """Whether a chunk of it was computed."""
    had: int = 0
    """Of its prompt, those that were found or computed by now; also before it was preempted."""
    adapter: Adapter | None = None
    held: bool = False
    """Whether nothing more of it is to be drawn (``Request.held``, ``Engine.hold``)."""
    scores: list[TokenChoice] = field(default_factory=list)
    """Of the prompt's tokens from the second on, where they are asked for; those that are computed."""
    told: int = 0
    """Ids of its output that are in an event, or were given and need not be (``Request.retell``)."""
    spoken: bool = False
    """Whether it had an event."""
    seen: Seen = field(init=False)
    """What its penalties count."""
    _keys: list[bytes] = field(default_factory=list)
    """Hashes of its full pages."""

    def __post_init__(self) -> None:
        self.seen = Seen(self.request.prompt)

    @property
    def output(self) -> list[int]:
        """Ids after the prompt."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def produced(self) -> int:
        """How many ids there are after the prompt."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def wanted(self) -> int:
        """How many positions a prefill computes. The last one's row draws the next token; one that is held computes
        that too, so that it has but those of the next ids to compute. Where given ids are told with their probabilities
        it does not: the last row is to tell of an id that is not known yet."""
        return len(self.tokens) - (self.held and self.request.retell)

    @property
    def left(self) -> int:
        """How many of them are not computed yet."""
        return self.wanted - self.computed

    def move(self, state: State) -> None:
        """Change the state. Raises ``ValueError`` for what the table does not have."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"sequence {self.request.id} cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def scoring(self) -> bool:
        """Whether scores of its prompt are still to be computed: then each of its positions is, found or not."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and len(self.scores) < len(self.request.prompt) - 1

    def lacking(self) -> Iterator[bytes]:
        """Keys of the pages behind those that it has, as far as they may be found: rows that tell something are
        computed, and one at least, to get logits from."""
        told = 0 if self.scoring else min(len(self.request.prompt) + self.told, len(self.tokens)) - 1
        return (self.key(page) for page in range(len(self.pages), told // PAGE))

    @property
    def root(self) -> bytes:
        """The hash before its first page."""
        return ROOT if self.adapter is None else self.adapter.root

    def key(self, page: int) -> bytes:
        """Hash of its ``page``-th page, which is full."""
        while len(self._keys) <= page:
            at = len(self._keys) * PAGE
            before = self._keys[-1] if self._keys else self.root
            self._keys.append(page_hash(before, self.tokens[at : at + PAGE]))
        return self._keys[page]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute positions ``[start, start + count)`` of ``sequence``, whose pages are there."""

    sequence: Sequence
    start: int
    count: int

    @property
    def tokens(self) -> list[int]:
        """Ids of its positions."""
        return self.sequence.tokens[self.start : self.start + self.count]

    @property
    def pages(self) -> list[int]:
        """Of its sequence, from position 0 on."""
        return self.sequence.pages

    @property
    def samples(self) -> bool:
        """Whether its last row's logits choose the next token."""
        return self.start + self.count == len(self.sequence.tokens) and not self.sequence.held


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the scheduler."""

    running: int = 64
    """Sequences that hold pages."""
    waiting: int = 1024
    """Sequences that do not; more are refused."""
    prefill: int = 256
    """Prompt tokens computed in one step."""
    quantum: int = 128
    """Of these, the most for one sequence while others wait for theirs."""


class Scheduler:
    """Owner of all sequences and of the pages they hold."""

    def __init__(self, pages: Pages, limits: Limits) -> None:
        self.pages = pages
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """By age, the oldest first."""
        self.preempted = 0
        """How often a sequence gave its pages up."""
        self._step = 0
        self._rested: list[Sequence] = []
        self._blocked = False
        """Whether those who wait find no room beside those who are held."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return any(each.state is not State.HELD for each in self.running) or bool(self.waiting and not self._blocked)

    def add(self, request: Request, adapter: Adapter | None = None) -> Sequence:
        """Queue a request. Raises ``QueueFull``."""
        if len(self.waiting) >= self.limits.waiting:
            raise QueueFull(f"{len(self.waiting)} requests wait for this instance's engine; try again later")
        told = 0 if request.retell else len(request.emitted)
        tokens = [*request.prompt, *request.emitted]
        sequence = Sequence(request, tokens, adapter=adapter, held=request.held, told=told)
        self.waiting.append(sequence)
        self._blocked = False
        return sequence

    def schedule(self, depth: int = 1) -> list[Chunk]:
        """The next step: decodes in order of age, then prefill chunks. Empty only if nothing is there to compute.

        ``depth``: steps that may be on their way at once; each takes its part of the decodes.
        """
        self._step += 1
        chunks = self._decodes(-(-len(self.running) // depth))
        room = self.limits.prefill
        while self.waiting and len(self.running) < self.limits.running and self._admit(self.waiting[0]):
            pass
        begun = [sequence for sequence in self.running if sequence.state is State.PREFILL]
        for sequence in begun:
            self._find_more(sequence)
        begun = sorted((each for each in begun if each.state is State.PREFILL), key=lambda each: each.left)
        passed = [sequence for sequence in begun if self._step - sequence.served >= STARVED]
        if passed and self._step % 2:  # one of them, in every second step: else they would take all of each
            # By turns who was longest, and who was longest for what it has left: it would else be passed until the
            # other is done.
            turn = min(passed, key=lambda each: each.served) if self._step % 4 == 1 else max(passed, key=self._due)
            begun.remove(turn)
            begun.insert(0, turn)
        coming: set[bytes] = set()
        for sequence in begun:
            if next(sequence.lacking(), None) in coming and sequence.computed == len(sequence.pages) * PAGE:
                continue  # it finds that page in the next step
            count = self._prefill(sequence, room, chunks)
            room -= count
            if count:
                first, end = chunks[-1].start // PAGE, (chunks[-1].start + count) // PAGE
                coming.update(sequence.key(page) for page in range(first, end))
        self._blocked = not chunks
        return chunks

    def _due(self, sequence: Sequence) -> float:
        """Steps that it was passed, by what it has left: the highest response ratio is next."""
        return (self._step - sequence.served) / sequence.left

    @property
    def tells(self) -> bool:
        """Whether any are to be told of (``rested``): also where nothing is left to compute."""
        return bool(self._rested)

    def rested(self) -> list[Sequence]:
        """Those who have come to be held since the last time."""
        found, self._rested = self._rested, []
        return [sequence for sequence in found if sequence.state is State.HELD]

    def computed(self, chunk: Chunk) -> None:
        """``chunk`` was computed: its full pages may be found from now on."""
        sequence = chunk.sequence
        first, sequence.computed = sequence.computed // PAGE, chunk.start + chunk.count
        for page in range(first, sequence.computed // PAGE):
            self.pages.keep(sequence.pages[page], sequence.key(page))
        self._settle(sequence)

    def feed(self, sequence: Sequence, ids: tuple[int, ...]) -> None:
        """Its output goes on with ``ids``. A token that is being drawn in its place is not taken any more
        (``Step.lengths``)."""
        sequence.tokens += ids
        sequence.told += 0 if sequence.request.retell else len(ids)
        if ids and sequence.state in (State.DECODE, State.HELD) and sequence.left > (not sequence.held):
            sequence.move(State.PREFILL)
        self._blocked = False

    def hold(self, sequence: Sequence) -> None:
        """It is held: the token that a step on its way draws is its last before ``release``. Repeatable."""
        sequence.held = True
        self._settle(sequence)  # that may have been all that it had to prefill

    def release(self, sequence: Sequence) -> None:
        """It is held no longer. Repeatable."""
        sequence.held = False
        if sequence.state is State.HELD:
            sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)  # its last row draws, computed again
            sequence.move(State.DECODE)
        self._blocked = False

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it stands."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)
        sequence.move(State.DONE)
        self._blocked = False

    def preempt_all(self) -> None:
        """Every sequence gives up its pages and waits."""
        self._blocked = False
        for sequence in reversed(list(self.running)):
            self._preempt(sequence)

    def check(self) -> None:
        """Raise ``AssertionError`` unless sequences and pages agree."""
        self.pages.check(sequence.pages for sequence in self.running)
        assert all(not sequence.pages for sequence in self.waiting), "a waiting sequence holds pages"

    def _decodes(self, most: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in list(self.running):
            if len(chunks) >= most:
                break
            awaited = sequence.computed >= len(sequence.tokens)  # its next token is still on its way
            if sequence.state is not State.DECODE or awaited:
                continue
            if sequence.held:
                sequence.move(State.HELD)
                self._rested.append(sequence)
            elif self._grow(sequence, len(sequence.tokens)):
                chunks.append(Chunk(sequence, sequence.computed, 1))
        return [chunk for chunk in chunks if chunk.sequence.state is State.DECODE]

    def _prefill(self, sequence: Sequence, room: int, chunks: list[Chunk]) -> int:
        others = len(self.waiting) + sum(1 for each in self.running if each.state is State.PREFILL) > 1
        count = min(sequence.left, room, self.limits.quantum if others else room)
        if sequence.state is not State.PREFILL or count <= 0:
            return 0
        grown = self._grow(sequence, sequence.computed + count)
        # It took pages from younger ones: what those were to compute in this step is dropped.
        chunks[:] = [chunk for chunk in chunks if chunk.sequence.state is not State.WAITING]
        if not grown:
            return 0
        chunks.append(Chunk(sequence, sequence.computed, count))
        if self._step - sequence.served < STARVED:  # else its turn in every second step stays, until it is done
            sequence.served = self._step
        sequence.worked = True
        sequence.had = max(sequence.had, sequence.computed + count)
        return count

    def _admit(self, sequence: Sequence) -> bool:
        """Begin it with what the prefix cache has, if the rest of its tokens will find room without preempting."""
        found = self.pages.find(sequence.lacking())
        owed = sum(max(0, pages_for(len(each.tokens)) - len(each.pages)) for each in self.running)
        if pages_for(len(sequence.tokens)) - len(found) + owed > self.pages.available:
            self.pages.release(found)
            return False
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.pages = found
        sequence.computed = len(found) * PAGE
        self._found(sequence)
        sequence.served = self._step
        sequence.move(State.PREFILL)
        self._settle(sequence)
        return True

    def _find_more(self, sequence: Sequence) -> None:
        """What others have computed since it began, it need not."""
        if sequence.computed == len(sequence.pages) * PAGE and (more := self.pages.find(sequence.lacking())):
            sequence.pages += more
            sequence.computed = len(sequence.pages) * PAGE
            self._found(sequence)
        self._settle(sequence)

    @staticmethod
    def _found(sequence: Sequence) -> None:
        """Count what it has found; of that, what it had before it was preempted it has computed itself."""
        end = min(sequence.computed, len(sequence.request.prompt))
        if not sequence.worked:
            sequence.cached = sequence.had = end
        elif end > sequence.had:
            sequence.cached, sequence.had = sequence.cached + end - sequence.had, end

    def _settle(self, sequence: Sequence) -> None:
        """Nothing of it is left to prefill, it may be."""
        if sequence.state is not State.PREFILL or sequence.left > 0:
            return
        if sequence.held:
            self._rested.append(sequence)
        sequence.move(State.HELD if sequence.held else State.DECODE)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for ``tokens`` positions, the youngest's if none is left. False: it was the youngest itself."""
        while len(sequence.pages) < pages_for(tokens):
            page = self.pages.take()
            if page is not None:
                sequence.pages.append(page)
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.move(State.WAITING)
        self.waiting.appendleft(sequence)
        self.preempted += 1

    def _release(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        sequence.pages = []
        sequence.computed = 0

"""What another instance needs to go on with a call whose own has died or is left: the ids its engine drew, and what its
caller was given. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import NotDeterministic
from sllm_runtime.protocol.frames import Frame, FrameKind, Ids
from sllm_runtime.protocol.limits import ID_END, MOST_GENERATIONS, MOST_IDS

_MOST_IN_VAIN: Final = 2
"""Instances that may die one after the other without anything new from them: then it is the call that kills them."""
VALUES: Final = (FrameKind.OUTPUT, FrameKind.DELTA)
"""Frames that callers see."""


class Resumption:
    """Kept of a call that may go on elsewhere (an engine-backed one that is ``resumable``)."""

    def __init__(self, had: int = 0, had_digest: bytes = b"") -> None:
        """``had``: whole outputs of an earlier gateway, which come once more; ``had_digest``: theirs, as ``digest``."""
        self._had, self._had_digest = had, had_digest
        self.delivered = 0
        """Whole outputs so far."""
        self._hash = hashlib.blake2b(digest_size=16)
        self._begun = 0
        """Parts of an output of which more is to come; none of them is kept, ..."""
        self._whole = self._hash
        """... but what ``_hash`` was before them."""
        self._ids: dict[int, list[int]] = {}
        self._ended: set[int] = set()
        self._cached: dict[int, int] = {}
        self._count = 0
        self._seen = (0, 0)
        self._in_vain = 0
        self._trail: list[bytes] = []
        self._trail_from: int | None = None

    def anew(self, *, deaths: bool = False) -> Resumption:
        """Of the same call, begun again. ``deaths``: those of its instances still count."""
        other = Resumption(self._had, self._had_digest)
        if deaths:
            other._seen, other._in_vain = self._seen, self._in_vain
        return other

    @property
    def count(self) -> int:
        """Ids that are known."""
        return self._count

    def take(self, frames: Sequence[Frame]) -> None:
        """Frames have come, in order. Raises ``ProtocolError`` if ids cannot be read, ``NotDeterministic`` where
        they are not what an earlier gateway had: nobody may read on from that."""
        for frame in frames:
            if frame.kind in VALUES:
                if frame.more:
                    self._whole = self._whole if self._begun else self._hash.copy()
                    self._begun += 1
                self._hash.update(frame.data)
                if not frame.more:
                    self._begun = 0
                    self.delivered += 1
                    if self.delivered == self._had and self.digest != self._had_digest:
                        raise NotDeterministic(
                            f"the first {self._had} outputs are not what they were before the call's gateway died: its"
                            " function is not deterministic; call again"
                        )
                    if self._trail_from is not None:
                        self._trail.append(self._hash.digest())
            elif frame.kind is FrameKind.IDS:
                self._record(codec.unpack(Ids, frame.data))

    def _record(self, ids: Ids) -> None:
        """Ids that leave a gap, are too many, or can be none are of no use: what follows is drawn again. After a resume
        an instance gives those out again that it was told. None say that it rests, or has ended."""
        if not 0 <= ids.generation < MOST_GENERATIONS:
            return
        if ids.ended:
            self._ended.add(ids.generation)
        if ids.cached is not None and 0 <= ids.cached < ID_END:
            self._cached.setdefault(ids.generation, ids.cached)
        if not ids.ids or self._count + len(ids.ids) > MOST_IDS or not 0 <= min(ids.ids) <= max(ids.ids) < ID_END:
            return
        known = self._ids.setdefault(ids.generation, [])
        if ids.first <= len(known):
            more = ids.ids[len(known) - ids.first :]
            known.extend(more)
            self._count += len(more)

    @property
    def lacks(self) -> bool:
        """Whether outputs that an earlier gateway had have not come again."""
        return self.delivered < self._had

    @property
    def digest(self) -> bytes:
        """Of the bytes of all whole outputs, as ``CallHead.delivered_hash``."""
        return self._of_whole.digest() if self.delivered else b""

    @property
    def _of_whole(self) -> hashlib.blake2b:
        return self._whole if self._begun else self._hash

    @property
    def recorded(self) -> tuple[tuple[int, ...], ...]:
        """Ids by generation, as ``CallHead.recorded``."""
        return tuple(tuple(self._ids.get(number, ())) for number in range(max(self._ids, default=-1) + 1))

    @property
    def cached(self) -> tuple[int | None, ...]:
        """Of each generation, as ``CallHead.cached``."""
        return tuple(self._cached.get(number) for number in range(max(self._cached, default=-1) + 1))

    def cached_of(self, generation: int) -> int | None:
        """As ``Feed.cached``."""
        return self._cached.get(generation)

    @property
    def ended(self) -> tuple[int, ...]:
        """Generations that have, as ``CallHead.ended``."""
        return tuple(sorted(self._ended))

    # --- while it moves (``move``) ------------------------------------------------------------------
    def hashed(self) -> hashlib.blake2b:
        """Of all whole outputs so far; a copy."""
        return self._of_whole.copy()

    def watch(self) -> None:
        """From now on ``digest_at`` knows each output's."""
        self._trail_from, self._trail = self.delivered, [self._of_whole.digest()]

    def unwatch(self) -> None:
        self._trail_from, self._trail = None, []

    def digest_at(self, outputs: int) -> bytes:
        """``hashed`` as it was after so many outputs, at least those of ``watch``."""
        assert self._trail_from is not None
        return self._trail[outputs - self._trail_from]

    @property
    def half(self) -> bool:
        """Whether of an output only a part is here."""
        return self._begun > 0

    def known(self, generation: int) -> Sequence[int]:
        """Ids of a generation."""
        return self._ids.get(generation, ())

    @property
    def counts(self) -> dict[int, int]:
        """How many ids of each generation are known."""
        return {generation: len(ids) for generation, ids in self._ids.items()}

    def break_off(self, waiting: list[Frame], *, stopped: bool = False) -> list[Frame] | None:
        """Its instance has died: what is taken out of ``waiting`` (frames that the caller has not had), half an output.
        None if no other instance may go on: it is this call that has killed several, or the caller has begun to read an
        output that is not whole. ``stopped``: it was ended in order, or never had the call: no death of that kind."""
        begun = self._begun
        half = [index for index, frame in enumerate(waiting) if frame.kind in VALUES][-begun:] if begun else []
        if len(half) < begun or not all(waiting[index].more for index in half):
            return None
        if not stopped:
            seen = (self.delivered, self._count)
            self._in_vain = self._in_vain + 1 if seen <= self._seen else 0
            self._seen = max(seen, self._seen)
        if self._in_vain >= _MOST_IN_VAIN:
            return None
        self._hash, self._begun = self._of_whole, 0
        return [waiting.pop(index) for index in reversed(half)]

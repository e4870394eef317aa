"""What a peer is lent comes back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sllm_loaderd.peer import exports as peer_exports
from sllm_loaderd.peer.exports import Exports
from sllm_loaderd.verify import open_checkpoint
from sllm_runtime.protocol.checkpoint import partition_name
from tests.fixtures.loaderd import small_checkpoint


class Lending:
    """A residency that has all of a model, and who holds of it."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint
        self.holders = set[str]()

    def find(self, digest: str, rank: int) -> Any:
        chunks = [SimpleNamespace(fd=3)] * 100
        return SimpleNamespace(model=SimpleNamespace(checkpoint=self._checkpoint), chunks=chunks, there=lambda _: True)

    def hold(self, chunks: Sequence[Any], holder: str) -> None:
        self.holders.add(holder)

    def forget(self, holder: str) -> None:
        self.holders.discard(holder)


def test_a_loader_that_answers_too_late_lends_nothing_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped; the peer is gone by the time its question comes to its turn."""
    monkeypatch.setattr(peer_exports, "_ANSWER_S", 0.01)
    directory, digest = small_checkpoint(tmp_path)
    residency: Any = Lending(open_checkpoint(directory, digest))
    store: Any = SimpleNamespace(directory=lambda _: directory)
    posted = list[Callable[[], None]]()
    exports = Exports(store, residency, posted.append)
    with pytest.raises(TimeoutError), exports.pieces(digest, partition_name(0), 0, 10):
        raise AssertionError
    for action in posted:
        action()
    assert len(posted) == 2
    assert not residency.holders


def test_what_was_lent_is_given_back_when_it_is_sent(tmp_path: Path) -> None:
    directory, digest = small_checkpoint(tmp_path)
    residency: Any = Lending(open_checkpoint(directory, digest))
    store: Any = SimpleNamespace(directory=lambda _: directory)
    exports = Exports(store, residency, lambda action: action())
    with exports.pieces(digest, partition_name(0), 0, 10) as pieces:
        assert sum(piece.nbytes for piece in pieces) == 10
        assert residency.holders
    assert not residency.holders


@pytest.mark.parametrize("held", ["its later conversion", "a part of it"])
def test_what_is_not_in_memory_as_it_is_asked_for_comes_from_the_disk(tmp_path: Path, held: str) -> None:
    directory, digest = small_checkpoint(tmp_path)
    checkpoint: Any = open_checkpoint(directory, digest)

    class Otherwise(Lending):
        def find(self, digest: str, rank: int) -> Any:
            found = super().find(digest, rank)
            found.there = lambda number: held != "a part of it" or not number
            return found

    form = SimpleNamespace(encoded=b"another index") if held == "its later conversion" else checkpoint
    residency: Any = Otherwise(form)
    store: Any = SimpleNamespace(directory=lambda _: directory)
    exports = Exports(store, residency, lambda action: action())
    whole = (directory / partition_name(0)).read_bytes()
    with exports.pieces(digest, partition_name(0), 10, checkpoint.index.chunk_bytes) as (piece,):
        assert os.pread(piece.fd, piece.nbytes, piece.offset) == whole[10 : 10 + checkpoint.index.chunk_bytes]
    assert not residency.holders

"""Ranks that gather, each in a thread."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from sllm_runtime.worker.engine.ours.parallel.meeting import Peers
from tests.fixtures.waiting import GIVE_UP_S


class Closing(Protocol):
    """What is to be closed."""

    def close(self) -> None: ...


G = TypeVar("G", bound=Closing)
T = TypeVar("T")


@contextlib.contextmanager
def met(make: Callable[[int, Peers], G], count: int) -> Iterator[tuple[list[G], Callable[[Callable[[G], T]], list[T]]]]:
    """The groups of ``count`` ranks, each of which ``make`` makes of its number and its sockets to the others, and what
    runs something in all of them at once."""
    peers: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for one, other in itertools.combinations(range(count), 2):
        peers[one][other], peers[other][one] = socket.socketpair()

    with ThreadPoolExecutor(count) as pool, contextlib.ExitStack() as stack:
        meeting = [pool.submit(make, rank, peers[rank]) for rank in range(count)]
        groups = [stack.enter_context(contextlib.closing(each.result(GIVE_UP_S))) for each in meeting]

        def everywhere(run: Callable[[G], T]) -> list[T]:
            return [each.result(GIVE_UP_S) for each in [pool.submit(run, group) for group in groups]]

        yield groups, everywhere

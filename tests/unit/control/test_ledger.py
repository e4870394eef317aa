"""Who waits for the store."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from sllm_runtime.control import ledger
from sllm_runtime.control.changes import Write
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import NotStorable, Unavailable
from sllm_runtime.protocol.records import FunctionRecord, Record
from tests.fixtures.nats import CONTROLLER, Nats, nats  # noqa: F401 - a fixture is used by being here
from tests.fixtures.waiting import GIVE_UP_S, until

KEY = "functions.chat"
OLD, NEW = (Write(KEY, FunctionRecord(function="chat", active=number, last_version=2)) for number in (1, 2))
GONE = Write(KEY, None)


class Store:
    """Takes everything, at once or when it is ``open``."""

    def __init__(self) -> None:
        self.written: list[Write] = []
        self.open = asyncio.Event()
        self.open.set()

    async def put(self, key: str, record: Record | None) -> None:
        self.written.append(Write(key, record))
        await self.open.wait()

    async def delete(self, key: str) -> None:
        await self.put(key, None)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
async def book(store: Store) -> AsyncIterator[ledger.Ledger]:
    book = ledger.Ledger(cast(StateStore, store))
    running = asyncio.create_task(book.run())
    yield book
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_decision_that_was_stored_is_not_written_again_when_it_is_done(
    store: Store, book: ledger.Ledger
) -> None:
    for decision in (NEW, GONE, OLD):
        await book.stored([decision], GIVE_UP_S)
        book.take([decision])
        await book.settled(GIVE_UP_S)
    await book.stored([OLD], GIVE_UP_S)
    assert store.written == [NEW, GONE, OLD]


async def test_it_is_written_again_where_something_newer_came_between(store: Store, book: ledger.Ledger) -> None:
    """Whether the store has that already, is just taking it, or is still to."""
    await book.stored([OLD], GIVE_UP_S)
    book.take([NEW])
    await book.settled(GIVE_UP_S)
    book.take([OLD])
    await book.settled(GIVE_UP_S)
    assert store.written == [OLD, NEW, OLD]
    store.open.clear()
    book.take([NEW])
    await until(lambda: len(store.written) == 4)
    book.take([OLD])
    store.open.set()
    await book.settled(GIVE_UP_S)
    assert store.written == [OLD, NEW, OLD, NEW, OLD]
    await book.stored([NEW], GIVE_UP_S)
    book.take([GONE])
    book.take([NEW])
    await book.settled(GIVE_UP_S)
    assert store.written[5:] == [NEW, NEW]


async def test_what_is_decided_after_all_was_written_is_written_at_once(
    store: Store, book: ledger.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rests where nothing that waits finds room, not where nothing waits."""
    monkeypatch.setattr(ledger, "AGAIN_S", 3600.0)
    for decision in (NEW, GONE, OLD):
        await book.stored([decision], ledger.FULL_S)
    assert store.written == [NEW, GONE, OLD]


async def test_whoever_writes_several_records_hears_of_the_one_that_was_refused(
    store: Store, book: ledger.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the others were stored after it."""
    put, later = store.put, Write("versions.chat.2", FunctionRecord(function="chat", active=1, last_version=2))

    async def put_or_not(key: str, record: Record | None) -> None:
        if key == KEY:
            raise NotStorable(f"{key} is too large")
        await put(key, record)

    monkeypatch.setattr(store, "put", put_or_not)
    with pytest.raises(NotStorable, match="too large"):
        await book.stored([OLD, later], GIVE_UP_S)
    assert store.written == [later]


async def test_what_is_newer_is_written_after_what_was_taken_before_it(store: Store, book: ledger.Ledger) -> None:
    """Also where an older record of its key waits: what it builds on is stored first."""
    first, other = Write("functions.first", None), Write("versions.chat.2", None)
    store.open.clear()
    book.take([first])
    await until(lambda: store.written == [first])
    book.take([OLD, other, NEW])
    store.open.set()
    await book.settled(GIVE_UP_S)
    assert store.written == [first, other, NEW]


async def test_on_a_full_disk_nobody_waits_long_and_the_disk_is_named(
    nats: Nats,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "FULL_S", 0.01)
    full = ledger.Ledger(StateStore(await nats.bus(CONTROLLER)), lambda: "the disk of /x is full")
    full.take([Write("functions.x", None)])
    with pytest.raises(Unavailable, match="cannot be stored now: the disk of /x is full"):
        await full.settled(3600)
    assert full.waiting == 1, "it is written later"


async def test_who_waits_hears_of_a_disk_that_becomes_full_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "FULL_S", 0.01)
    said = iter(["", "", "the disk of /x is full"])
    filling = ledger.Ledger(cast(StateStore, store), lambda: next(said))
    filling.take([OLD])
    with pytest.raises(Unavailable, match="cannot be stored now: the disk of /x is full"):
        await filling.settled(3600)


async def test_who_waits_for_one_record_does_not_wait_for_others(store: Store) -> None:
    nobody_writes = ledger.Ledger(cast(StateStore, store))
    nobody_writes.take([NEW])
    await nobody_writes.settled(GIVE_UP_S, "instances.i")
    with pytest.raises(Unavailable, match="cannot be stored now"):
        await nobody_writes.settled(0.01, KEY)

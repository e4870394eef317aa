"""A disk that is full, with a real one, and a real server that writes to it."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats import errors as nats_errors

from sllm_runtime.platform import log_files
from sllm_runtime.platform.disk import DiskWatch, Pauses, free, require_room, shortage
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import LEAST_FREE, MIB
from sllm_runtime.protocol.records import Term
from sllm_runtime.protocol.subjects import BUNDLES, TERM_KEY
from tests.fixtures.nats import CONTROLLER, Nats
from tests.fixtures.small_disk import fill, small_disk  # noqa: F401 - a fixture is used by being here
from tests.fixtures.waiting import GIVE_UP_S, until

BUNDLE = f"$O.{BUNDLES}.C.test"


def test_what_is_too_little_is_said_with_the_disk_and_its_bytes(small_disk: Path) -> None:  # noqa: F811
    later = small_disk / "not" / "yet"
    assert shortage(None) == shortage(later) == ""
    filled = fill(small_disk)
    with pytest.raises(Unavailable, match=f"{later} is full: 0 B free, the state needs 8.0 MiB") as caught:
        require_room(later)
    assert caught.value.retryable
    filled.unlink()
    require_room(later)
    assert free(later) >= LEAST_FREE


def test_a_log_for_whose_copy_there_is_no_room_takes_none_of_what_is_left(small_disk: Path) -> None:  # noqa: F811
    log = small_disk / "x.log"
    log.write_bytes(bytes(log_files.ROTATE_AT - MIB // 2) + bytes(MIB))
    left = free(small_disk)
    assert 0 < left < LEAST_FREE
    for _ in range(2):  # it is looked at every 5 s
        log_files.rotate(log)
        assert free(small_disk) > left, "the state lies on this disk"
    assert list(small_disk.iterdir()) == [log]


def test_a_log_is_put_aside_in_the_room_of_the_one_before(
    small_disk: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_files, "ROTATE_AT", MIB)
    log, aside = small_disk / "x.log", small_disk / "x.log.1"
    log.write_bytes(b"n" * 5 * MIB)
    aside.write_bytes(bytes(9 * MIB + MIB // 2))
    (small_disk / "state").write_bytes(bytes(5 * MIB))
    assert 4 * MIB < free(small_disk) < 5 * MIB, "a copy breaks off within a write"
    assert log_files.rotate(log)
    assert (log.stat().st_size, aside.read_bytes() == b"n" * 5 * MIB) == (0, True)


async def test_a_server_whose_write_failed_writes_again_once_there_is_space(small_disk: Path) -> None:  # noqa: F811
    nats = Nats(small_disk / "nats")
    await nats.start()
    try:
        bus = await nats.bus(CONTROLLER)
        store = await StateStore.open(bus, create=True)
        await store.elect("first")
        restarts: list[int] = []

        async def restart() -> None:
            restarts.append(1)
            await nats.server.stop()
            await nats.start()

        watch = DiskWatch(small_disk / "nats", nats.server.log_file, restart)
        filled = fill(small_disk)
        with pytest.raises(nats_errors.Error):
            await bus.jetstream.publish(BUNDLE, bytes(200_000), timeout=1)
        assert not await watch.look(), "there is no space yet"
        filled.unlink()
        with pytest.raises(nats_errors.Error):  # the server does not try again by itself
            await bus.jetstream.publish(BUNDLE, bytes(200_000), timeout=1)
        await until(watch.look)
        assert restarts == [1]
        await bus.jetstream.publish(BUNDLE, bytes(200_000), timeout=GIVE_UP_S)
        kept = await store.get(TERM_KEY, Term)
        assert kept is not None
        assert kept.controller == "first"
        assert not await watch.look()
        assert restarts == [1], "nothing is wrong any more"
        await store.close()
    finally:
        await nats.stop()


async def test_restarts_keep_their_distance(tmp_path: Path) -> None:
    now, left, restarts = [100.0], [0], []
    log_file = tmp_path / "nats.log"

    async def restart() -> None:
        restarts.append(now[0])

    watch = DiskWatch(tmp_path, log_file, restart, clock=lambda: now[0], space=lambda _: left[0])
    assert not await watch.look()
    left[0] = 100 * MIB
    assert await watch.look()
    for _ in range(100):  # each start of the server meets a full disk anew
        with log_file.open("a") as file:
            file.write("[ERR] Critical write error: no space left on device\n")
        now[0] += 0.5
        await watch.look()
    assert restarts == [100.0, 102.0, 106.0, 114.0, 130.0]


async def test_a_log_that_was_put_aside_is_read_from_its_beginning(tmp_path: Path) -> None:
    restarts: list[int] = []

    async def restart() -> None:
        restarts.append(1)

    log_file = tmp_path / "nats.log"
    log_file.write_text("[ERR] no space left on device, long ago\n")
    watch = DiskWatch(tmp_path, log_file, restart, space=lambda _: 100 * MIB)
    assert not await watch.look()
    log_file.write_text("no space left on device\n")
    assert await watch.look()
    assert restarts == [1]


@given(pause=st.floats(0, 60), since=st.floats(0, 1000))
def test_pauses_grow_up_to_their_limit_and_begin_anew_when_it_is_calm(pause: float, since: float) -> None:
    pauses = Pauses()
    found = pauses.next(pause, since)
    assert found == (pauses.first_s if since > pauses.calm_s or not pause else min(pauses.longest_s, 2 * pause))
    assert 0 < found <= pauses.longest_s


def test_a_log_that_has_no_room_leaves_the_state_its_room(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(log_files, "ROTATE_AT", MIB)
    path = small_disk / "x.log"
    with log_files.open_log(path) as log:
        log.write(bytes(MIB + 1))
        (small_disk / "state").write_bytes(bytes(free(small_disk) - LEAST_FREE - MIB // 2))
        for _ in range(12):
            with contextlib.suppress(OSError):
                log.write(b"l" * MIB)
                log_files.rotate(path)
    assert free(small_disk) >= LEAST_FREE - 2 * MIB, f"{free(small_disk)} bytes are left"

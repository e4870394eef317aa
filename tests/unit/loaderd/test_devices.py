"""Fake devices and their links, without a daemon."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_loaderd.client import memory
from sllm_loaderd.client.device_memory import open_device_memory
from sllm_loaderd.devices.fake import FakeDevice, FakeSpecification, fake_devices, parse_fake_devices
from sllm_loaderd.devices.link import SLACK_S, Link
from sllm_loaderd.devices.registry import Devices, open_devices
from sllm_runtime.protocol.errors import Conflict, DeviceOutOfMemory, InvalidRequest, ProtocolError
from sllm_runtime.protocol.loader import MEMFD, POSIX_FD, DeviceMemory
from tests.fixtures.waiting import GIVE_UP_S

MIB = 2**20


class Clock:
    """Time that passes only when somebody sleeps, or when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device(clock: Clock) -> Iterator[FakeDevice]:
    with contextlib.closing(FakeDevice(0, 6 * MIB, Link(1e9, clock, clock.sleep))) as made:
        yield made


# --- settings --------------------------------------------------------------------------------------------
def test_what_a_setting_means() -> None:
    assert parse_fake_devices("4x2GiB@8GB/s") == FakeSpecification(4, 2 * 2**30, 8e9)
    assert parse_fake_devices(" 1x64mib@0.5GB/s ") == FakeSpecification(1, 64 * MIB, 5e8)


@pytest.mark.parametrize("text", ["4", "0x2GiB@8GB/s", "4x0GiB@8GB/s", "4x2GiB@0GB/s", "65x2GiB@8GB/s", "4x2GiB@8GB"])
def test_what_a_setting_cannot_mean(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"4x2GiB@8GB/s|1 to 64"):
        parse_fake_devices(text)


def test_a_node_has_the_devices_that_are_asked_for_and_no_others() -> None:
    assert open_devices("", "") == []
    with contextlib.closing(Devices(open_devices("2x2MiB@1GB/s", ""))) as devices:
        assert [device.name for device in devices] == ["fake:0", "fake:1"]
        assert devices.get("fake:1").path == "link fake:1"
        assert [(status.name, status.limit, status.used) for status in devices.status()] == [
            ("fake:0", 2 * MIB, 0),
            ("fake:1", 2 * MIB, 0),
        ]
        with pytest.raises(Conflict, match=r"cuda:0.*cpu, fake:0, fake:1"):
            devices.get("cuda:0")


# --- links ---------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 3)), min_size=1, max_size=30))
def test_a_link_is_never_faster_than_its_bandwidth_and_idles_only_when_nothing_comes(
    copies: list[tuple[int, float]],
) -> None:
    clock = Clock()
    link = Link(1e9, clock, clock.sleep)
    began, total = clock.now, 0
    for nbytes, pause in copies:
        clock.now += pause
        before = clock.now
        link.wait(link.take(nbytes))
        total += nbytes
        assert clock.now <= before + nbytes / 1e9 + 1e-6, "a copy waits for no more than its own bytes"
        assert clock.now - began >= total / 1e9 - SLACK_S - 1e-6, "at most the slack is caught up"


def test_copies_of_several_threads_queue_on_one_link_and_not_on_another(clock: Clock) -> None:
    one, two = Link(1e9, clock, clock.sleep), Link(1e9, clock, clock.sleep)
    ends = [link.take(500_000_000) - clock.now for link in (one, two, one)]
    assert ends == pytest.approx([0.5, 0.5, 1.0], abs=0.01)


def test_a_late_wake_up_is_caught_up_within_the_slack() -> None:
    clock = Clock()
    link = Link(1e9, clock, lambda seconds: clock.sleep(seconds + SLACK_S / 4))
    for _ in range(1000):
        link.wait(link.take(1_000_000))
    assert clock.now - 100.0 == pytest.approx(1.0, abs=0.01)


# --- memory ----------------------------------------------------------------------------------------------
def test_what_was_written_is_seen_through_the_exported_descriptor(device: FakeDevice) -> None:
    allocation = device.allocate(3 * MIB)
    assert (allocation.nbytes, allocation.size, device.used) == (3 * MIB, 4 * MIB, 4 * MIB)
    message = DeviceMemory(request=1, device="fake:0", nbytes=3 * MIB, size=allocation.size, kind=allocation.kind)
    seen = open_device_memory(message, [allocation.export()])
    allocation.write(MIB, memoryview(bytearray(b"x" * 100)))
    allocation.write(3 * MIB - 1, memoryview(bytearray(b"y")))
    buffer = memoryview(seen.exporter()).cast("B")
    assert len(buffer) == 3 * MIB
    assert bytes(buffer[MIB - 1 : MIB + 101]) == b"\0" + b"x" * 100 + b"\0"
    buffer[MIB] = 0  # this process's own copy now
    other = open_device_memory(message, [allocation.export()])
    assert memoryview(other.exporter()).cast("B")[MIB] == ord("x")
    allocation.free()
    assert bytes(memoryview(other.exporter()).cast("B")[-1:]) == b"y", "what is mapped outlives the device"
    del buffer
    seen.release()
    other.release()


def test_nobody_else_can_write_to_device_memory(device: FakeDevice) -> None:
    fd = device.allocate(MIB).export()
    try:
        with pytest.raises(PermissionError):
            memory.map_shared(fd, 2 * MIB)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_device_memory_ends(device: FakeDevice) -> None:
    first = device.allocate(4 * MIB)
    with pytest.raises(DeviceOutOfMemory, match=rf"fake:0 has {6 * MIB} bytes, {4 * MIB} in 1 partitions") as caught:
        device.allocate(3 * MIB)
    assert (caught.value.code, caught.value.retryable) == ("device_out_of_memory", True)
    assert device.used == 4 * MIB
    first.free()
    first.free()
    assert device.used == 0
    device.allocate(6 * MIB).free()


def test_a_device_that_is_closed_gives_everything_back(clock: Clock) -> None:
    (device,) = fake_devices(FakeSpecification(1, 4 * MIB, 1e9))
    left = [device.allocate(MIB) for _ in range(2)]
    device.close()
    assert device.used == 0
    for allocation in left:
        allocation.free()


def test_two_devices_are_written_by_two_threads_at_once() -> None:
    """Neither waits for the other: each copy ends while the other one's clock stands still."""
    clocks = [Clock(), Clock()]
    together = threading.Barrier(2, timeout=60)
    devices = []
    for number, clock in enumerate(clocks):

        def sleep(seconds: float, clock: Clock = clock) -> None:
            together.wait()  # both links are busy now, or this breaks
            clock.sleep(seconds)

        devices.append(FakeDevice(number, 2 * MIB, Link(1e6, clock, sleep)))
    view = memoryview(bytearray(MIB))
    with contextlib.ExitStack() as stack:
        for device in devices:
            stack.callback(device.close)
        threads = [threading.Thread(target=device.allocate(MIB).write, args=(0, view)) for device in devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GIVE_UP_S)
    assert [clock.now - 100.0 for clock in clocks] == pytest.approx([MIB / 1e6] * 2, abs=0.01)
    assert not together.broken


@pytest.mark.parametrize("kind", [MEMFD, POSIX_FD, "carrier pigeon"])
def test_memory_that_comes_without_its_descriptor_is_refused(kind: str) -> None:
    with pytest.raises(ProtocolError, match="fake:0"):
        open_device_memory(DeviceMemory(request=1, device="fake:0", nbytes=1, size=MIB, kind=kind), [])


def test_the_descriptor_of_a_message_that_is_refused_is_closed() -> None:
    fd = os.dup(0)
    with pytest.raises(ProtocolError):
        open_device_memory(DeviceMemory(request=1, device="x", nbytes=1, size=MIB, kind="?"), [fd])
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_pages_are_where_huge_pages_can_be(device: FakeDevice) -> None:
    allocation = device.allocate(MIB)
    message = DeviceMemory(request=1, device="fake:0", nbytes=MIB, size=allocation.size, kind=allocation.kind)
    mapping = open_device_memory(message, [allocation.export()])
    assert mapping.address % memory.HUGE_PAGE == 0
    mapping.release()

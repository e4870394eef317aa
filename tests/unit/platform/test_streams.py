"""The streams are made with patience; what JetStream has acknowledged is there again when its server was killed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import nats.errors
import pytest
from nats.js.api import StorageType, StreamConfig
from nats.js.manager import JetStreamManager

from sllm_runtime.platform import bundles, nats_server
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.streams import (
    BUNDLE_STREAM,
    STATE_STREAM,
    _configs,
    await_streams,
    ensure_streams,
    room_for_bundles,
)
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import KIB, MIB
from sllm_runtime.protocol.subjects import (
    CALLS_STREAM,
    JOURNAL_STREAM,
    KEY_CLAIMS,
    KEYS_STREAM,
    LIVES_STREAM,
    call_entries,
    call_entry,
    life_beat,
    life_log,
)
from tests.fixtures.nats import CONTROLLER, GATEWAY, Nats
from tests.fixtures.waiting import GIVE_UP_S, until

COUNT = 5


@pytest.mark.parametrize(
    ("stream", "subjects"),
    [
        (JOURNAL_STREAM, [call_entry(JOURNAL_STREAM, "call-1", f"batch-{number}") for number in range(COUNT)]),
        (CALLS_STREAM, [call_entry(CALLS_STREAM, "call-1", f"batch-{number}") for number in range(COUNT)]),
        (LIVES_STREAM, [life_beat("a"), *(life_log("a", number) for number in range(COUNT - 1))]),
    ],
)
async def test_an_entry_that_was_acknowledged_outlives_a_killed_server(
    nats: Nats, stream: str, subjects: list[str]
) -> None:
    controller, gateway = await nats.streams(), await nats.bus(GATEWAY)
    for subject in subjects:
        acknowledged = await gateway.jetstream.publish(subject, subject.encode(), timeout=GIVE_UP_S)
    await nats.kill()
    await until(lambda: not controller.connected and not gateway.connected)
    await nats.start()
    await until(lambda: controller.connected and gateway.connected)
    last = await gateway.jetstream.get_last_msg(stream, subjects[-1], direct=True)
    assert (last.seq, last.data) == (acknowledged.seq, subjects[-1].encode())
    await controller.flush()


@pytest.mark.parametrize(("replicas", "journals"), [(1, StorageType.FILE), (3, StorageType.MEMORY)])
def test_what_gateways_keep_of_calls_is_bounded_and_lies_where_it_outlives_a_server(
    replicas: int, journals: StorageType
) -> None:
    """Journals and logs of streams in the memory of three servers, or written through by one; calls that were answered
    with 202, and the state, in files."""
    made = {config.name: config for config in _configs(replicas)}
    assert {config.num_replicas for config in made.values()} == {replicas}
    assert {name for name, config in made.items() if config.storage is journals} >= {JOURNAL_STREAM, LIVES_STREAM}
    for name in (CALLS_STREAM, STATE_STREAM, BUNDLE_STREAM):
        assert made[name].storage is StorageType.FILE
        assert made[name].persist_mode is None, "what is acknowledged is on the disk"
    assert all(config.max_bytes for name, config in made.items() if name != BUNDLE_STREAM)
    bounded = _configs(replicas, Settings().bundle_bytes)
    assert all(config.max_bytes for config in bounded), "on somebody else's server each has a limit of its own"
    assert len({subject for config in bounded for subject in config.subjects or ()}) >= len(bounded)


def test_bundles_leave_room_for_what_the_others_may_take() -> None:
    others = sum(config.max_bytes or 0 for config in _configs(1) if config.name != BUNDLE_STREAM)
    assert room_for_bundles(nats_server.LEAST_STORE) >= 64 * MIB
    for store in (nats_server.LEAST_STORE, 8 * nats_server.LEAST_STORE):
        assert others + room_for_bundles(store) + 32 * MIB == store


async def test_bundles_on_somebody_else_s_server_have_a_limit_of_their_own(nats: Nats) -> None:
    controller, gateway = await nats.bus(CONTROLLER), await nats.bus(GATEWAY)
    await ensure_streams(controller, bundle_bytes=MIB, within_s=GIVE_UP_S)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield bytes(256 * KIB)

    with pytest.raises(Unavailable, match=r"maximum bytes exceeded; delete functions .* or raise SLLM_BUNDLE_BYTES"):
        await bundles.store(gateway, f"sha256:{'0' * 64}", chunks())
    state = (await controller.jetstream.stream_info(BUNDLE_STREAM)).state
    assert state.bytes == 0, "nothing of it is left"
    most = room_for_bundles(nats.server.store_bytes)
    for _ in range(2):  # the second time there is no room for another one of that size, and none is made
        await ensure_streams(controller, bundle_bytes=most, within_s=GIVE_UP_S)
    with pytest.raises(Unavailable, match=r"SLLM_BUNDLE_BYTES to less than 1125899906842624, which is set aside"):
        await ensure_streams(controller, bundle_bytes=2**50, within_s=0.0)


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The streams about which JetStream does not answer the next time it is asked to make them, one of them taken away
    with each such question."""
    left: list[str] = []
    add = JetStreamManager.add_stream

    async def answer(self: JetStreamManager, config: Any) -> Any:
        if config.name in left:
            left.remove(config.name)
            raise nats.errors.TimeoutError
        return await add(self, config)

    monkeypatch.setattr(JetStreamManager, "add_stream", answer)
    return left


async def test_streams_are_asked_for_again_until_jetstream_answers(
    nats: Nats, unanswered: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    unanswered += [STATE_STREAM, STATE_STREAM, LIVES_STREAM]
    controller, gateway = await nats.bus(CONTROLLER), await nats.bus(GATEWAY)
    waiting = asyncio.create_task(await_streams(gateway, within_s=GIVE_UP_S))
    await ensure_streams(controller, within_s=GIVE_UP_S)
    await waiting
    assert not unanswered
    told = [record.getMessage() for record in caplog.records if "asked again" in record.getMessage()]
    assert len([line for line in told if STATE_STREAM in line]) == 1, "the first refusal alone is told"


async def test_who_gives_up_says_which_stream_was_waited_for(nats: Nats, unanswered: list[str]) -> None:
    unanswered += [LIVES_STREAM] * 1000
    controller = await nats.bus(CONTROLLER)
    with pytest.raises(Unavailable, match=rf"about the stream {LIVES_STREAM}: nats: timeout \(asked again"):
        await ensure_streams(controller, within_s=0.1)
    with pytest.raises(Unavailable, match=r"no controller has started \(asked again"):
        await await_streams(controller, within_s=0.1)


async def test_a_stream_that_had_the_subjects_of_a_newer_one_gives_them_away(nats: Nats) -> None:
    """Of an earlier release, which kept all keys beside the answers."""
    controller = await nats.bus(CONTROLLER)
    both = [call_entries(CALLS_STREAM), KEY_CLAIMS]
    before = next(config for config in _configs(1) if config.name == CALLS_STREAM)
    await controller.jetstream.add_stream(before.evolve(subjects=both))
    await ensure_streams(controller, within_s=GIVE_UP_S)
    made = [(await controller.jetstream.stream_info(name)).config.subjects for name in (CALLS_STREAM, KEYS_STREAM)]
    assert made == [both[:1], both[1:]]


@pytest.mark.parametrize("bundle_bytes", [0, MIB])
async def test_streams_that_are_as_they_should_be_are_not_made_again(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, bundle_bytes: int
) -> None:
    """Of two controllers that change a stream at once, servers that are a cluster answer one."""
    controller = await nats.bus(CONTROLLER)
    await ensure_streams(controller, bundle_bytes=bundle_bytes, within_s=GIVE_UP_S)
    updated, update = list[str](), JetStreamManager.update_stream

    async def told(self: JetStreamManager, config: StreamConfig) -> Any:
        updated.append(config.name or "")
        return await update(self, config)

    monkeypatch.setattr(JetStreamManager, "update_stream", told)
    await ensure_streams(controller, bundle_bytes=bundle_bytes, within_s=GIVE_UP_S)
    assert updated == []
    await ensure_streams(controller, bundle_bytes=2 * MIB, within_s=GIVE_UP_S)
    assert updated == [BUNDLE_STREAM]
    limit = (await controller.jetstream.stream_info(BUNDLE_STREAM)).config.max_bytes
    assert limit == 2 * MIB


async def test_a_setting_that_was_made_and_is_wanted_no_more_is_taken_back(nats: Nats) -> None:
    controller = await nats.bus(CONTROLLER)
    before = next(config for config in _configs(1) if config.name == CALLS_STREAM)
    await controller.jetstream.add_stream(before.evolve(no_ack=True, max_age=60.0, max_msgs=7))
    await ensure_streams(controller, within_s=GIVE_UP_S)
    made = (await controller.jetstream.stream_info(CALLS_STREAM)).config
    assert (made.no_ack, made.max_age, made.max_msgs) == (False, 0.0, -1)

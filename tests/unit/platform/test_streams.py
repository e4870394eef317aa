"""What JetStream has acknowledged is there again when its server was killed."""

import pytest

from sllm_runtime.platform.streams import ensure_streams
from sllm_runtime.protocol.subjects import CALLS_STREAM, JOURNAL_STREAM, LIVES_STREAM, call_entry, life_beat, life_log
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
    controller, gateway = await nats.bus(CONTROLLER), await nats.bus(GATEWAY)
    await ensure_streams(controller)
    for subject in subjects:
        acknowledged = await gateway.jetstream.publish(subject, subject.encode(), timeout=GIVE_UP_S)
    await nats.kill()
    await until(lambda: not controller.connected and not gateway.connected)
    await nats.start()
    await until(lambda: controller.connected and gateway.connected)
    last = await gateway.jetstream.get_last_msg(stream, subjects[-1], direct=True)
    assert (last.seq, last.data) == (acknowledged.seq, subjects[-1].encode())
    await controller.flush()

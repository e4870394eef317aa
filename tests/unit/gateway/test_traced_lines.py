"""What a gateway logs of a request has its trace, whoever makes the line: a reader, a frame that came, a ticker."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from sllm_runtime.platform import trace
from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.protocol.http import EVENT_STREAM
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import Run, entry, manifest, world
from tests.unit.platform.test_trace import TRACE

SSE = {"accept": EVENT_STREAM, "traceparent": TRACE}


class Lines(logging.Handler):
    """Message and trace of each line that names a call, as a formatter sees them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("sllm_gateway") and hasattr(record, "call"):
            self.said.append((record.getMessage(), trace.current()))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    caplog.set_level(logging.INFO)
    kept = Lines()
    logging.getLogger().addHandler(kept)
    yield kept
    logging.getLogger().removeHandler(kept)


async def test_that_a_call_begins_again_is_logged_within_its_trace(nats: Nats, lines: Lines) -> None:
    async def dies(run: Run) -> None:
        if run.head.instance == "i1":
            run.end(InstanceLost("it died"))
        else:
            run.out(1)
            run.end()

    async with world(nats) as w:
        await w.deploy(manifest("dies", retries=1), entry(concurrency=1), entry("i2", concurrency=1), script=dies)
        for _ in range(2):  # one of them is at the one that dies first
            assert (await w.http.post("/fn/dies", headers=SSE)).status_code == 200
        again = [each for each in lines.said if each[0].startswith("call begins again")]
        assert again
        assert {traced for _, traced in again} == {TRACE}


@pytest.mark.parametrize("kept", [False, True])
async def test_that_a_call_failed_is_logged_within_its_trace(nats: Nats, lines: Lines, kept: bool) -> None:
    """Its node confirms the end after its caller has gone."""

    async def slow(run: Run) -> None:
        run.out("begun")
        await run.cancelled.wait()
        await asyncio.sleep(0.2)
        run.end()

    async with world(nats) as w:
        await w.deploy(manifest("slow", timeout=1.0, idle_timeout=0.9, queue_timeout=0.5), entry(), script=slow)
        headers = SSE | ({"prefer": "respond-async"} if kept else {})
        await w.http.post("/fn/slow", headers=headers)
        await until(lambda: [each for each in lines.said if each[0].startswith("call.failed")], what="it has failed")
        assert {traced for said, traced in lines.said if said.startswith("call.failed")} == {TRACE}

"""What gateways write of calls and lives states its schema; what a later release wrote is left to its gateways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from sllm_gateway.journal import entry_of, order_of
from sllm_gateway.lives import life_of, log_of
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.calls import Batch, Began, BodyPart, CancelAsked, Ended, Kept, KeyClaim
from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.lives import Gone, Life, Log
from sllm_runtime.protocol.states import CallState
from sllm_runtime.protocol.subjects import CALLS_STREAM, call_entry
from tests.fixtures.nats import GATEWAY_2, Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import entry, manifest, world
from tests.unit.gateway.test_kept_calls import ASYNC, Gate, count, key, reaches
from tests.unit.gateway.test_succession import asked

LATER = PROTOCOL_VERSION + 1
WRITTEN: list[tuple[Callable[[bytes], Any], Any]] = [
    (order_of, asked("call-1")),
    *(
        (entry_of, written)
        for written in (
            asked("call-1"),
            BodyPart(0, b"x"),
            Began(at=0.0, numerics="", epoch=1),
            Batch(0, ()),
            Ended(at=0.0, state=CallState.SUCCEEDED),
            Kept(),
            CancelAsked(),
        )
    ),
    (life_of, Life(life="a", gateway="g")),
    (log_of, Log((Gone("call-1"),))),
]


@pytest.mark.parametrize(("read", "written"), WRITTEN, ids=lambda each: type(each).__name__)
def test_what_gateways_write_states_its_schema(read: Callable[[bytes], Any], written: Any) -> None:
    assert written.schema == PROTOCOL_VERSION
    for schema in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
        known = replace(written, schema=schema)
        assert read(codec.pack(known)) == known
    with pytest.raises(ProtocolError, match=rf"has schema {LATER}, .* are read; run the version that wrote it"):
        read(codec.pack(replace(written, schema=LATER)))


async def test_calls_and_lives_of_a_later_release_are_left_to_it(nats: Nats) -> None:
    """Their readers are told so; all others go on."""
    async with world(nats) as w:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        await w.deploy(manifest("count"), entry("i2"), script=count)
        other = (await nats.bus(GATEWAY_2)).jetstream
        later = asked("call-9", "9" * 12, function="gate", parts=0, durable=True, schema=LATER)
        await other.publish(call_entry(CALLS_STREAM, "call-9", "order"), codec.pack(later))
        life = Life(life="9" * 12, gateway="g9", over=True)
        await other.publish(subjects.life_beat(life.life), codec.pack(replace(life, schema=LATER)))
        known = asked("call-8", "8" * 12, function="count", parts=1, durable=True)
        await other.publish(call_entry(subjects.BODIES_STREAM, "call-8", "body-0"), codec.pack(BodyPart(0, b'{"n":1}')))
        await other.publish(call_entry(CALLS_STREAM, "call-8", "order"), codec.pack(known))
        w.gateway._taking_up.look(["call-9"])
        assert (await reaches(w.http, "call-8", "SUCCEEDED"))["result"] == [0]
        answer = await w.http.get("/v1/calls/call-9")
        assert answer.json()["error"]["code"] == "protocol_error"
        assert f"has schema {LATER}" in answer.json()["error"]["message"]
        assert [each["id"] for each in (await w.http.get("/v1/calls")).json()["calls"]] == ["call-8"]
        assert not gate.runs
        running = (await w.http.post("/fn/gate", json={}, headers=ASYNC | key("k"))).json()["id"]
        await until(lambda: gate.runs, what="it runs")
        claim = await other.get_last_msg(subjects.KEYS_STREAM, subjects.KEY_CLAIMS)
        taken = replace(codec.unpack(KeyClaim, claim.data or b""), schema=LATER)
        await other.publish(claim.subject or "", codec.pack(taken))
        again = await w.http.post("/fn/gate", json={}, headers=key("k"))
        assert (again.status_code, again.json()["error"]["code"]) == (500, "protocol_error")
        gate.opened.set()
        assert (await reaches(w.http, running, "SUCCEEDED"))["result"] == [0, 1]

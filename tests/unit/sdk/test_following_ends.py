"""A call that ended with an error of the platform, read on after its connection broke."""

from __future__ import annotations

import json

from sllm.answers import Trace, problem_of
from sllm.following import FOLLOW_S, Following
from sllm.gateways import Gateways
from sllm.sse import Event
from sllm_runtime.protocol.errors import InstanceLost, SllmError, Unavailable


def test_how_a_call_ended_is_told_also_where_that_is_what_a_gateway_says_that_cannot_read_it() -> None:
    following = Following(Gateways(("http://a", "http://b")), call="c1")
    trace = Trace()
    trace.call, trace.broken, trace.gateway = "c1", True, "http://a"
    following.broke(InstanceLost("the connection broke"), trace, 0.0)
    body = Unavailable("the engine of this instance has stopped")
    told = json.dumps({"error": {"code": body.code, "message": body.message, "retryable": True}})
    event = Event(event="error", data=told, id=None)
    now, raised = 0.0, None
    trace.broken = False
    while raised is None and now < 10 * FOLLOW_S:
        if not following.is_no_end(event):
            raised = problem_of(event)
            break
        try:
            now += 0.01 + following.broke(problem_of(event), trace, now)
        except SllmError as error:
            raised = error
    assert isinstance(raised, Unavailable), f"{raised!r} after {now:.0f} s"
    assert raised.message == body.message

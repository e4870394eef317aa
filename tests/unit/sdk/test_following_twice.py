"""A call that runs on, of which no gateway can tell just now how it stands: it is not called again."""

from __future__ import annotations

import json

import pytest

from sllm.answers import Trace, problem_of
from sllm.following import FOLLOW_S, Following
from sllm.gateways import Gateways
from sllm.retry import Retry
from sllm.sse import Event
from sllm_runtime.protocol.errors import InstanceLost, SllmError, Unauthorized, Unavailable


def test_what_cannot_be_read_on_is_not_called_again_by_itself() -> None:
    following = Following(Gateways(("http://a", "http://b")), call="c1")
    trace = Trace()
    trace.call, trace.broken, trace.gateway = "c1", True, "http://a"
    following.broke(InstanceLost("the connection broke"), trace, 0.0)
    body = Unavailable("CALLS cannot be read: no responders")  # ``sllm_gateway.follow``, of a call that runs
    told = json.dumps({"error": {"code": body.code, "message": body.message, "retryable": True}})
    event = Event(event="error", data=told, id=None)
    now, raised = 0.0, None
    trace.broken = False
    while raised is None and now < 10 * FOLLOW_S:
        assert following.is_no_end(event)
        try:
            now += 0.01 + following.broke(problem_of(event), trace, now)
        except SllmError as error:
            raised = error
    assert raised is not None
    assert Retry().wait(1, raised, repeatable=False) is None, f"{raised!r}: the call would run twice"


def test_a_token_that_was_taken_away_meanwhile_is_what_is_told() -> None:
    """As by a roll of tokens: both gateways were restarted for it, and nobody who reads on is let in."""
    following = Following(Gateways(("http://a", "http://b")), "/api/v1/events?follow=true")
    following.broke(InstanceLost("the stream broke off"), Trace(broken=True), 0.0)
    with pytest.raises(Unauthorized):
        following.broke(Unauthorized("the bearer token is not the one of this platform"), Trace(), 1.0)


def test_a_call_that_may_have_run_is_not_told_of_as_one_that_was_not_let_in() -> None:
    """Who gives it the right token, and calls again, would have it done twice; docs/sdk.md says ``InstanceLost``."""
    following, trace = Following(Gateways(("http://a", "http://b"))), Trace(call="call-1", broken=True)
    following.broke(InstanceLost("the stream of call call-1 broke off; it may have been done in part"), trace, 0.0)
    with pytest.raises(InstanceLost, match="it may have been done") as told:
        following.broke(Unauthorized("the bearer token is not the one of this platform"), Trace(), 1.0)
    assert isinstance(told.value.__cause__, Unauthorized)

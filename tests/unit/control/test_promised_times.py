"""Times that are promised in words: what is measured against a name moves with it."""

from __future__ import annotations

from sllm_runtime.control.daemon import ControllerSettings
from sllm_runtime.control.lease import SURE_S
from sllm_runtime.control.scheduling.policies import DEFAULT, POLICIES
from sllm_runtime.control.standby import stand_by
from sllm_runtime.protocol import calls, limits
from sllm_runtime.protocol.records import Lease
from sllm_runtime.protocol.subjects import LEASE_KEY
from tests.fixtures.nats import CONTROLLER, CONTROLLER_2, Nats
from tests.unit.control.test_standby import Time


async def test_a_standby_takes_over_within_three_seconds_of_the_last_beat(nats: Nats) -> None:
    leader, standby, time = await nats.store(CONTROLLER), await nats.store(CONTROLLER_2), Time()
    await leader.elect(CONTROLLER)
    await leader.put(LEASE_KEY, Lease(term=1, controller=CONTROLLER, beat=1))
    await stand_by(standby, CONTROLLER_2, lambda: None, clock=time.clock, pause=time.pause)
    assert SURE_S < time.now < 2.5, "what is read before it leads takes some of the three seconds"


def test_what_is_said_in_seconds() -> None:
    assert ControllerSettings.model_fields["settled"].default == 30.0
    assert POLICIES[DEFAULT]()._settled_s == 30.0  # type: ignore[attr-defined]
    assert limits.CONTROLLER_WAIT_S == 15.0
    assert (calls.RESUME_WINDOW_S, calls.JOURNAL_TTL_S) == (60.0, 300.0)

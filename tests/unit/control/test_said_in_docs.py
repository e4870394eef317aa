"""What docs/control.md and docs/migration.md say in numbers. Tests of what follows from them take them by their names,
and so move with them."""

from __future__ import annotations

from sllm_runtime.control import (
    autoscale,
    backoff,
    decisions,
    deploy,
    draining,
    explain,
    history,
    instances,
    lease,
    ledger,
    loop,
    migration,
    models,
    nodes,
    plan,
    popularity,
    pulling,
    registry,
    remembering,
    replicas,
    spreading,
    standby,
    sweeping,
    turns,
    warmup,
)
from sllm_runtime.control.scheduling import learned, moving, remembered, rooms, startup
from sllm_runtime.platform import state, streams
from sllm_runtime.protocol import limits, secrets
from tests.fixtures.said import unkept

CONTROL = [
    ("every 0.25 s. A report", 0.25, loop.TICK_S),
    ("looks for 64 places at the most", 64, turns.MOST),
    ("repeated every second until", 1.0, plan.REPEAT_S),
    ("does not take an instance within 30 s has failed it", 30.0, plan.TAKE_S),
    ("is left alone for 1 s and another place is looked for", 1.0, loop.REFUSED_S),
    ("1 s, then doubling to 60 s", (1.0, 60.0), (backoff.FIRST_S, backoff.LONGEST_S)),
    ("left alone until a minute after the back-off", 60.0, instances.BARRED_S),
    ("one that had run for 60 s counts from the beginning again", 60.0, backoff.STABLE_S),
    ("The fourth in a row without one that gets ready", 4, backoff.MOST_TAKEN),
    ("A deployment gives up at the third", 3, deploy.CRASHES),
    ("does not end within 1 s of READY", 1.0, autoscale.HANDOVER_S),
    ("may end 0.25 s after a call that it has served", 0.25, autoscale.BETWEEN_S),
    ("not within 5 s of a change of leaders", 5.0, limits.LOST_AFTER_S),
    ("5 s after nobody asks for it any more", 5.0, warmup.GRACE_S),
    ("quicker by 5 ms", 0.005, rooms.CLOSE_S),
    ("looked for on the four servers", 4, moving.MOST_SERVERS),
    ("of 64 that is asked", 64, moving.MOST_LOOKED),
    ("Moves that take 5 s longer than expected", 5.0, startup.OVERDUE_S),
    ("begin no more than 0.5 s later", 0.5, plan.WORTH_S),
    ("of a move at most 60 s, for so long it is remembered", 60.0, migration.KEEP_S),
    ("median of the last nine starts", 9, learned.RECENT),
    ("while less than three that waited", 3, learned.OWN),
    ("0.2 s until one has", 0.2, learned.RELEASE_S),
    ("one is at most 1.5 times the other", 1.5, learned.ALIKE),
    ("every 60 s, and at once by `sllm model place`", 60.0, spreading.SPREAD_S),
    ("one more a minute for each instance that works", 60.0, popularity.WORKED_S),
    ("half as much after every hour", 3600.0, popularity.HALF_LIFE_S),
    ("in steps of a factor of 1.4", 1.4, round(2 ** (1 / replicas.STEPS), 1)),
    ("two models at a time (16 on all nodes)", (2, 16), (replicas.AT_ONCE_THERE, replicas.AT_ONCE)),
    ("no more comes for 120 s is given up", 120.0, pulling.STALLED_S),
    ("twice as long each time, at most an hour", 3600.0, spreading.LONGEST_S),
    ("asked again, six times in 3 s", (6, 3.0), (models.TRIES, models.TRIES * models.AGAIN_S)),
    ("the last five are kept; of versions that ran, the last fifty", (5, 50),
     (registry.KEEP_FAILED, registry.KEEP_RETIRED)),
    ("of a model's places the 16 newest are kept", 16, registry.KEEP_SOURCES),
    ("a manifest has at most 256 KiB", 256 * 2**10, deploy.MAX_MANIFEST),
    ("within 2 minutes; the newest 1,000 such are known", (120.0, 1000), (deploy.KEEP_S, deploy.MOST_WITHDRAWN)),
    ("Every 5 minutes the leader sweeps", 300.0, sweeping.SWEEP_S),
    ("the same of the last 256 starts", 256, history.MOST),
    ("the last 32 of it", 32, explain.MOST_OUTCOMES),
    ("0.1 s later, and again with what it took; ten a second at most", 0.1, decisions.PACE_S),
    ("of 16 nodes, those with the weights first", 16, explain.RECORDED),
    ("the last 64 messages of a function", 64, streams.DECISIONS_KEPT),
    ("written every 10 s where it is new", 10.0, remembering.REMEMBER_S),
    ("of the last 300 of a kind", 300, remembered.MOST),
    ("writes the `lease` key every 0.4 s", 0.4, lease.RENEW_S),
    ("within 1.5 s plans nothing", 1.5, lease.SURE_S),
    ("looks every 0.1 s; a lease that has not changed for 2 s", (0.1, 2.0), (standby.POLL_S, standby.SILENT_S)),
    ("gets `unavailable` after 15 s (3 s on a full disk", (15.0, 3.0), (loop.STORE_S, ledger.FULL_S)),
    ("above three quarters new deployments, models and secrets are refused", 3 / 4, 1 - state._FOR_WHAT_RUNS),
    ("a value 16 KiB; a function 16 of them; a platform 1,000", (16 * 2**10, 16, 1000),
     (secrets.MAX_SECRET, secrets.MAX_SECRETS, secrets.MAX_STORED)),
]  # fmt: skip
MIGRATION = [
    ("those that are idle for half a second end", 0.5, draining.SURE_S),
    ("for 5 minutes where one did not start", 300.0, migration.FAILED_S),
    ("One that has no room just now is waited for, 60 s", 60.0, migration.PLACE_S),
    ("ten seconds later where what ended for it", 10.0, migration.RELEASED_S),
    ("once the move has taken 5 s longer than expected", 5.0, startup.OVERDUE_S),
]


def test_what_the_control_plane_promises_in_numbers() -> None:
    assert unkept("control.md", CONTROL) == []
    assert unkept("migration.md", MIGRATION) == []
    # 60 s is what nginx and most load balancers wait for a byte of an answer.
    assert unkept("http.md", [("while it goes on (after 45 s", 45.0, nodes.VALIDATE_S)]) == []

"""What docs/gateway.md and docs/migration.md say in numbers. Tests of what follows from them take them by their names,
and so move with them."""

from __future__ import annotations

from sllm_gateway import (
    arguments,
    backlog,
    binding,
    expansion,
    headroom,
    journal,
    lives,
    lookup,
    move,
    moves,
    overheard,
    pace,
    queue,
    resumption,
    room,
    server,
    starts,
    succession,
    taking_up,
    tempo,
)
from sllm_gateway.settings import GatewaySettings
from sllm_runtime.platform import presence, streams, trace
from sllm_runtime.platform.connection import ELECTION_S
from sllm_runtime.protocol import calls, limits, subjects
from sllm_runtime.protocol import lives as life
from tests.fixtures.said import unkept

MIB = 2**20
SETTINGS = GatewaySettings.load({})

GATEWAY = [
    ("holds the instance for 20 ms, doubling to 500 ms", (0.02, 0.5), (queue.BUSY_FIRST_S, queue.BUSY_MOST_S)),
    ("16 are on their way at once", 16, lookup.ASKING_MOST),
    ("is not asked for again for 0.25 s", 0.25, lookup.UNKNOWN_S),
    ("is waited for (2 s, then 503)", 2.0, lookup.ROUTE_WAIT_S),
    ("told ten times a second at most", 0.1, starts.PROGRESS_EVERY_S),
    ("after two deaths in a row that brought nothing new", 2, resumption._MOST_IN_VAIN),
    ("takes less than that in 30 s is found by the write", 30.0, SETTINGS.slow_consumer),
    ("and reset 10 s later", 10.0, server.CLOSE_AFTER_S),
    ("to JetStream (`sllm_lives`) once a second", 1.0, life.BEAT_S),
    ("with all that begin within 20 ms", 0.02, succession.ORDERS_S),
    ("the ids that have come since every 250 ms", 0.25, succession.IDS_S),
    ("written whole every 20 s, so the log of 120 s", (20.0, 120.0), (life.WHOLE_S, life.LIVES_AGE_S)),
    ("of 8 MiB that wait all is given up", 8 * MIB, backlog.MOST),
    ("keeps what it hears, 120 s and 16 MiB", (120.0, 16 * MIB), (life.LIVES_AGE_S, overheard.MOST)),
    ("who does not answer is asked again for 10 s", 10.0, succession.SAID_S),
    ("has not beaten during five beats of another gateway", 5, life.SILENT_BEATS),
    ("After two such beats NATS is asked", 2, life.OVERDUE_BEATS),
    ("when it was not for 1.5 s its life is over", 1.5, presence.LEFT_S),
    ("and gone on with, 16 together", 16, taking_up.AT_ONCE),
    ("which is looked for once a second: any gateway", 1.0, taking_up.AGAIN_S),
    ("2.5 s in which its process did not run", 2.5, lives.STILL_S),
    ("neither is seen within 30 s, the answer is 503", 30.0, succession.COMING_S),
    ("every 5 s; of one that does not answer within 1 s nothing", (5.0, 1.0), (headroom.LOOK_S, headroom.WAIT_S)),
    ("(of more than 512 characters the long entries", 512, trace._STATE_CHARS),
    ("asked for from 0.5 s without a word on", 0.5, limits.CALL_OVERDUE_S),
    ("5 s without frame or beat while connected", 5.0, limits.LOST_AFTER_S),
    ("30 to 60 s (`SLLM_HEAD_TIMEOUT`); 64 KiB", (30.0, 64 * 2**10), (SETTINGS.head_timeout, limits.MAX_HEAD)),
    ("`SLLM_BODY_TIMEOUT` (60 s) after the headers", 60.0, SETTINGS.body_timeout),
    ("A new one is refused after 15 s (`unavailable`)", 15.0, ELECTION_S),
    ("less than a quarter is left", 1 / 4, room.FOR_ANSWERS),
    ("until an eighth is left; then they are paused, looked at every second", (1 / 8, 1.0),
     (room.FOR_ENDS, room.LOOK_S)),
    ("who waits for news: within 10 s", 10.0, calls.READING_S),
    ("claimed anew every 20 s", 20.0, journal.CLAIMED_S / 3),
    ("for longer than an hour and a kept call's timeouts", 3600.0, calls.KNOWN_S),
    ("open ones have `SLLM_DRAIN` (5 s", 5.0, SETTINGS.drain),
    ("What is still being written has 2 s more", 2.0, server.REST_S),
    ("`SLLM_BACKLOG` (2048", 2048, SETTINGS.backlog),
    ("where one argument may take more than 100,000", 100_000, arguments.CHECKS),
    ("100,000 and 16 for each byte, and 20 million in all", (16, 20_000_000),
     (arguments.CHECKS_A_BYTE, arguments.MOST_CHECKS)),
    ("more than 2,000 parts", 2000, expansion._PARTS),
    ("any at all for a body above 64 KiB", 64 * 2**10, arguments.PATTERNED),
]  # fmt: skip
MIGRATION = [
    ("two rounds in a row had two tokens or less", (2, 2), (move.IN_STEP, move.NEAR)),
    ("after 32 tokens or 1 s its source is told to stop", (32, 1.0), (tempo.OVERTAKES, tempo.QUIET_S)),
    ("Where a round and 4 ms of messages take no longer", 0.004, tempo.MESSAGES_S),
    (
        "4.6 intervals where three may wait, 2.8 where two may; 2 in any case",
        (4.6, 2.8, 2.0),
        (sum(pace.STRETCH), round(sum(pace.STRETCH[:2]), 9), tempo.QUICK),
    ),
    ("from round 5 on: as many as the source draws in one", 5, move.PATIENT),
    ("a token in 1.25 intervals (more after each 8 tokens)", (1.25, 8), (tempo.SLOWER, tempo.PATIENCE)),
    ("two rounds and at most 8 tokens missing are enough", 8, move.BEHIND),
    ("A call that is computed waits 5 s for others", 5.0, move.TOGETHER_S),
    ("50 ms at least, 1 s at most", (0.05, 1.0), (tempo.STOP_S, tempo.QUIET_S)),
    ("After twelve rounds", 12, move.ROUNDS),
    (
        "1.3 usual intervals, 1.5 when one is missing in the reserve and 1.8 when two are, until three wait",
        ((1.3, 1.5, 1.8), 3),
        (pace.STRETCH, pace.MOST),
    ),
    ("fewer where that were more than 50 ms; one where a token takes up to 0.25 s", (0.05, 0.25),
     (pace.LATE_S, pace.SLOW_S)),
    ("have their reserve, or after 0.3 s", 0.3, moves.RESERVE_S),
    ("16 intervals after the call has gone over", 16.0, pace.STAYS),
    ("a token in 0.6 intervals", 0.6, pace.QUICKEN),
    ("of which no id is known within 1 s", 1.0, moves.FIRST_S),
    ("repeated after 0.3 s and then at most every 2 s", (0.3, 2.0), (limits.RESEND_AFTER_S, binding.MOST_WAIT_S)),
]  # fmt: skip


def test_what_the_gateway_promises_in_numbers() -> None:
    assert unkept("gateway.md", GATEWAY) == []
    assert unkept("migration.md", MIGRATION) == []
    (log,) = (each for each in streams._configs(1) if each.name == subjects.LIVES_STREAM)
    assert unkept("gateway.md", [("(at most 64 MiB) is enough", 64 * MIB, log.max_bytes)]) == []

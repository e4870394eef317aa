"""What docs/invoker.md says in numbers. Tests of what follows from them take them by their names, and so move with
them."""

from __future__ import annotations

from pathlib import Path

from sllm_invoker import (
    bounds,
    bundle_parts,
    call,
    exits,
    follower,
    kernel_kills,
    lines,
    loader,
    logs,
    old_logs,
    pressure,
    relay,
    report,
)
from sllm_invoker.settings import InvokerSettings
from sllm_runtime.platform import descriptors, wire
from sllm_runtime.protocol import limits
from tests.fixtures.said import unkept

KIB, MIB = 2**10, 2**20
SETTINGS = InvokerSettings(node="n1", data_dir=Path("/data"), loaderd_socket=Path("/socket"))

INVOKER = [
    ("in the last 15 s, `kernel_kills.py`", 15.0, kernel_kills.RECENT_S),
    ("nine tenths of its limit itself", 0.9, exits._NEAR),
    ("or after `SLLM_LOADER_WAIT` (5 s) without it", 5.0, SETTINGS.loader_wait),
    ("goes on with a call 5 s after its cancel", 5.0, limits.LOST_AFTER_S),
    ("8 MiB above its credit", 8 * MIB, call.CREDIT_SLACK),
    ("takes nothing though 4 MiB wait", 4 * MIB, wire._MAX_QUEUED),
    ("which is given 30 s to say why", 30.0, follower.CAUSE_S),
    ("at other changes within 20 ms (numbers of running calls: within 0.2 s)", (0.02, 0.2),
     (report.COALESCE_S, limits.COUNTS_S)),
    ("A report has 480 KiB", 480 * KIB, limits.MAX_REPORT),
    ("that have ended to 200 bytes", 200, report.BRIEF_BYTES),
    ("names to 512 bytes together, errors to 2,000", (512, 2000), (bounds.NAMES_BYTES, bounds.REPORTED_BYTES)),
    ("a cancel that overtakes its call is remembered for 10 s", 10.0, relay.REMEMBER_S),
    ("an END that nobody acknowledges for 60 s", 60.0, relay.KEEP_ENDED_S),
    ("its gateway says nothing for 30 s, while connected, is let draw", 30.0, relay.HELD_S),
    ("when it has less than three quarters of a window left", 3 / 4, call.PLENTY),
    ("A frame takes 64 bytes of it beside its data", 64, limits.FRAME_COST),
    ("one that says nothing for 1.25 s is asked for", 1.25, limits.OVERDUE_S),
    ("A call is cancelled 2 s after its `timeout` as well", 2.0, relay.DEADLINE_SLACK_S),
    ("may open half of what the invoker may (32,768 at most)", 32_768, descriptors.HANDED_ON // 2),
    ("has no room for is sent again for 10 s", 10.0, wire.SHORT_S),
    ("It waits 0.3 s after a start before it forks again", 0.3, SETTINGS.refill_delay),
    ("(three files of 8 MiB)", (3, 8 * MIB), (logs.FILES, logs.FILE_BYTES)),
    ("The files of the 32 functions that wrote last are open", 32, logs.OPEN_FILES),
    ("Above 1 GiB of all functions", 1024 * MIB, old_logs.LOGS_BYTES),
    ("(`old_logs.py`, every 10 minutes)", 600.0, old_logs.EVERY_S),
    ("once a minute for each function", 60.0, logs.SAY_AGAIN_S),
    ("written to the pipe itself is cut at 8 KiB", 8 * KIB, lines.LINE_BYTES),
    ("a traceback has 128 KiB at most", 128 * KIB, logs.MAX_TEXT),
    ("an instance has 200 lines a second and 2,000 at once", (200.0, 2000.0), (logs.LINES_PER_S, logs.BURST_LINES)),
    ("| `SLLM_POOL_SIZE` | 2 |", 2, SETTINGS.pool_size),
    ("| `SLLM_POOL_FLOOR` | 256 MiB | available memory below which none waits, until there is twice as much",
     (256 * MIB, 2), (SETTINGS.pool_floor, pressure.ENOUGH)),
    ("| `SLLM_CPU_OVERCOMMIT` | 8 |", 8.0, SETTINGS.cpu_overcommit),
    ("| `SLLM_BUNDLE_CACHE` | 1000 MiB |", 1000 * MIB, SETTINGS.bundle_cache),
    ("| `SLLM_POOL_KINDS` | 4 |", 4, SETTINGS.pool_kinds),
    ("| `SLLM_LOADER_WAIT`, `SLLM_NAME_WAIT` | 5, 1.25 |", (5.0, 1.25), (SETTINGS.loader_wait, SETTINGS.name_wait)),
]  # fmt: skip


def test_what_the_invoker_promises_in_numbers() -> None:
    assert unkept("invoker.md", INVOKER) == []
    assert unkept("control.md", [("the node, after 10 s | the start fails", 10.0, bundle_parts.WITHIN_S)]) == []
    assert unkept("loaderd.md", [("Where 15 models come at a time", 15, loader.MOST_FETCHES)]) == []

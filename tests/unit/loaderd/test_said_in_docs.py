"""What docs/loaderd.md says in numbers. Tests of what follows from them take them by their names, and so move with
them."""

from __future__ import annotations

import inspect

from sllm_loaderd import doubt, eviction, path_queue, pool, prefaulting, probe
from sllm_loaderd.convert import direct
from sllm_loaderd.daemon import holders, keeper, measuring, registration, sandbox, service
from sllm_loaderd.daemon.settings import LoaderSettings
from sllm_loaderd.peer import server, signature
from sllm_loaderd.sources import attempts, fetch, s3
from sllm_loaderd.ssd import fill
from sllm_runtime.protocol import limits, loader
from tests.fixtures.said import unkept

KIB, MIB = 2**10, 2**20
PATIENCE = attempts.RemoteLimits()
FIELDS = LoaderSettings.model_fields

LOADERD = [
    ("eight times 32 MiB of the largest file", (8, 32 * MIB), (probe.READS, probe.MOST)),
    ("0.2 s apart, in the last class", 0.2, measuring.BETWEEN_S),
    ("once half of the processor time is idle (after 5 s in any case)", (0.5, 5.0),
     (measuring.IDLE, measuring.QUIET_WITHIN_S)),
    ("again 5 s later what was not done within 10 s", (5.0, 10.0), (measuring.AGAIN_S, measuring.READ_WITHIN_S)),
    ("0.25 s, 16 MiB at most, eight stores at a time", (0.25, 16 * MIB, 8),
     (probe.STORE_S, probe.MOST_OF_STORE, probe.MOST_STORES)),
    ("chunks (16 MiB), which is the same on all nodes", 16 * MIB, limits.CHUNK_BYTES),
    ("at most 512 KiB, descriptors by SCM_RIGHTS", 512 * KIB, limits.MAX_MESSAGE),
    ("chunk descriptors, at most 253 a message", 253, limits.MAX_FDS),
    ("beside the bandwidth of the last three seconds", 3.0,
     inspect.signature(path_queue.Bandwidth).parameters["horizon"].default),
    ("four reads of a chunk at a time", 4, FIELDS["io_threads"].default),
    ("at least 256 MiB, at most half of the pool", 256 * MIB, prefaulting.LEAST),
    ("none was taken for half a second (three where some are taken", (0.5, 3.0), (pool.QUIET_S, pool.LONGEST_S)),
    ("(`/proc` is read twice)", 2, holders._CLEAN_LOOKS),
    ("is let end first, at most 20 s", 20.0, eviction.EVICT_S),
    ("at most four batches of 253 unacknowledged", 4, keeper._IN_FLIGHT),
    ("(more than 1,012 chunks at once)", 1012, keeper._IN_FLIGHT * limits.MAX_FDS),
    ("fewer than 64 KiB in 20 s", (64 * KIB, 20.0), (attempts.GAIN, PATIENCE.stall_s)),
    ("until five tries in a row have failed", 5, PATIENCE.attempts),
    ("`Retry-After` counts up to 5 s", 5.0, PATIENCE.longest_delay_s),
    ("(8 MiB parts, 8 at a time;", (8 * MIB, 8), (fetch.PART, fetch.THREADS)),
    ("and 512 MiB for all else that is written there", 512 * MIB, fetch.RESERVE),
    ("or of local files 64 pages spread over each", 64, direct._SAMPLES),
    ("(or after ten minutes without one)", 600.0, registration.FIRST_LOAD_S),
    ("brings it through at most four chunks of the pool", 4, fill.LANES),
    ("for five minutes. So the nodes' clocks agree", 300, signature.WINDOW_S),
    ("At most 128 connections are served", 128, server._MOST_PEERS),
    ("It ends after 10 s whatever it says, and there are at most 64", (10.0, 64),
     (server._STRANGE_S, server._MOST_STRANGERS)),
    ("after 120 s (`--listing-timeout`)", 120.0, FIELDS["listing_timeout"].default),
    ("fetched and converted meanwhile, 16 at a time: only what is whole waits for one of the `--conversions` (1)",
     (16, 1), (registration.MOST_CHILDREN, FIELDS["conversions"].default)),
    ("nobody used for seven days is removed, once a day", (7 * 86400.0, 86400.0), (fetch.KEPT_S, service._TIDY_S)),
    ("is waited for, at most 10 s (then `unavailable`)", 10.0, 2 * registration._STOP_S),
    ("more than 256 requests of one control connection at once", 256, loader.MOST_REQUESTS),
    ("or for more than 64 at once", 64, sandbox._MOST_LOADS),
    ("(five tries of 10 s for a connection, of 20 s for silence: 50 to 105 s)", (5, 10.0, 20.0),
     (PATIENCE.attempts, PATIENCE.connect_s, PATIENCE.stall_s)),
    ("for 30 s, twice as long after each failure that follows, at most ten minutes", (30.0, 600.0),
     (doubt.FIRST_S, doubt.LONGEST_S)),
    ("`unavailable` after 30 s for who waits for it", 30.0, s3.CREDENTIALS_S),
]  # fmt: skip


def test_what_loaderd_promises_in_numbers() -> None:
    assert unkept("loaderd.md", LOADERD) == []

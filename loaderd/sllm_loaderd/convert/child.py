"""`python -m sllm_loaderd.convert.child`: fetch and convert one model, in a process of its own.

So the daemon never imports torch, a hub's or a store's library, and a conversion can be killed. Says one JSON object
per line on stdout: progress, then an outcome. Fetching is nobody else's affair; before it converts it waits for its
turn, a line on stdin.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from sllm_loaderd.convert.child_messages import ChildError, ChildMessage, ChildOutcome, ChildProgress, ChildReady
from sllm_loaderd.convert.direct import index_directly
from sllm_loaderd.convert.directory import ConvertOptions, write_checkpoint
from sllm_loaderd.convert.formats import is_converted
from sllm_loaderd.convert.remote import take_index
from sllm_loaderd.files import FULL
from sllm_loaderd.sources import PEER_TOKEN, Source, SourceSettings, open_source
from sllm_loaderd.sources.attempts import changed
from sllm_loaderd.sources.directory import DirectorySource
from sllm_loaderd.sources.fetch import Progress, forget, needed, resolve
from sllm_loaderd.sources.listing import is_partition
from sllm_loaderd.verify import copy_checkpoint, open_checkpoint
from sllm_runtime.platform.process import die_with_parent
from sllm_runtime.protocol.errors import (
    InternalError,
    InvalidCheckpoint,
    InvalidRequest,
    OutOfMemory,
    SllmError,
    Unavailable,
    UnsupportedModel,
)
from sllm_runtime.protocol.limits import CHUNK_BYTES

_REPORT_EVERY_S = 0.1
_COLLECT_AFTER = (100_000, 50, 1000)
"""Imports keep what they make; at the usual thresholds the collector takes a sixth of a small conversion's time."""


def _say(message: ChildMessage) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(message) + b"\n")


def _reporter(stage: str) -> Progress:
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _REPORT_EVERY_S or done == total:
            last = now
            _say(ChildProgress(stage, done, total))

    return report


def _wait_for_turn() -> None:
    """Until the daemon says so. It ends us when it is asked to, and we end when it does."""
    _say(ChildReady())
    if not sys.stdin.readline():
        raise SystemExit(1)


def bring(
    uri: str,
    staging: Path,
    cache: Path,
    known: str,
    *,
    direct: bool = False,
    turn: Callable[[], None] = lambda: None,
    chunk_bytes: int = CHUNK_BYTES,
) -> ChildOutcome:
    """Put the checkpoint of ``uri`` into ``staging``, unless its fingerprint is ``known``. Raises ``SllmError``.

    ``direct``: safetensors are not converted, where they can be loaded as they are. ``turn`` returns when a conversion
    may begin.
    """
    source = open_source(uri, SourceSettings(peer_token=os.environ.get(PEER_TOKEN, "")))
    with contextlib.closing(source):
        before = source.entries() if isinstance(source, DirectorySource) else []
        fingerprint = source.fingerprint()
        if fingerprint == known or (known and fingerprint.startswith("offline:")):
            return ChildOutcome("", fingerprint)
        remote = source.local() is None
        entries = source.entries() if remote or direct else []
        if remote:
            _say(ChildProgress("fetch", 0, sum(entry.nbytes for entry in entries)))
        converted = is_converted({entry.name for entry in entries})
        if remote and converted:
            digest = take_index(source, entries, staging, _named(uri))
            return ChildOutcome(digest, fingerprint, tuple(entry for entry in entries if is_partition(entry.name)))
        if direct and not converted:
            try:
                digest = index_directly(source, entries, staging, chunk_bytes=chunk_bytes, progress=_reporter("index"))
            except UnsupportedModel as reason:
                shutil.rmtree(staging)
                sys.stderr.write(f"{uri} is converted first: {reason}\n")
            else:
                read = needed(source, entries)
                return ChildOutcome(digest, fingerprint, tuple(e for e in read if e.name.endswith(".safetensors")))
        outcome = _converted(source, fingerprint, staging, cache, turn, chunk_bytes)
        # It waited for its turn and read for minutes, and nobody keeps a local directory as it was meanwhile.
        if before and source.entries() != before:
            raise changed(uri, "its files are others than when its conversion began")
        return outcome


def _named(uri: str) -> str:
    """The digest that a peer's address names; other addresses name none."""
    return uri.rpartition("/")[2] if uri.startswith("peer://") else ""


def _converted(
    source: Source, fingerprint: str, staging: Path, cache: Path, turn: Callable[[], None], chunk_bytes: int
) -> ChildOutcome:
    directory = resolve(source, cache, _reporter("fetch"), fingerprint, converted=True)
    turn()
    if directory.is_dir() and is_converted({path.name for path in directory.iterdir()}):
        checkpoint = open_checkpoint(directory)
        copy_checkpoint(checkpoint, staging, _reporter("convert"))
        return ChildOutcome(checkpoint.digest, fingerprint)
    try:
        digest = write_checkpoint(
            directory, staging, options=ConvertOptions(chunk_bytes=chunk_bytes), progress=_reporter("convert")
        )
    except (InvalidRequest, InvalidCheckpoint):  # these files will do no better the next time
        forget(directory, cache)
        raise
    except OSError as error:
        if error.errno in FULL:  # what else is written there needs the room
            forget(directory, cache)
        raise
    forget(directory, cache)  # the checkpoint has it all now
    return ChildOutcome(digest, fingerprint)


def _step_back() -> None:
    """Leave processor and disk to everybody else: nobody waits for this conversion."""
    os.nice(19)
    psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main() -> None:
    """Entry point; exit status 0 with an outcome, 1 with an error line."""
    gc.set_threshold(*_COLLECT_AFTER)
    parser = argparse.ArgumentParser(prog="sllm_loaderd.convert.child")
    for name in ("--uri", "--staging", "--cache", "--known", "--parent"):
        parser.add_argument(name, required=True)
    parser.add_argument("--chunk-bytes", type=int, default=CHUNK_BYTES)
    for name in ("--direct", "--idle"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    if args.idle:
        _step_back()
    die_with_parent(signal.SIGKILL, int(args.parent))
    signal.signal(signal.SIGTERM, _stop)
    try:
        staging, cache = Path(args.staging), Path(args.cache)
        _say(
            bring(
                args.uri, staging, cache, args.known,
                direct=args.direct, turn=_wait_for_turn, chunk_bytes=args.chunk_bytes,
            )
        )  # fmt: skip
    except SllmError as error:
        failure = error
    except MemoryError:
        failure = OutOfMemory("the conversion ran out of memory; free some and try again", stage="convert")
    except OSError as error:
        text = f"{error.strerror} ({error.filename or args.uri}); check disk space and permissions"
        failure = Unavailable(text, stage="convert")
    except Exception as error:  # the daemon reports a bug here as what it is
        failure = InternalError(f"conversion failed: {error!r}", stage="convert")
    else:
        os._exit(0)  # all is durable and said; taking torch down in order would only take time
    _say(ChildError(failure.body()))
    os._exit(1)


if __name__ == "__main__":
    main()

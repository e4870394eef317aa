"""What functions write: from a worker's pipes and messages into rotated files on this node and the LOGS stream.

Neither may hold up a worker or the relay: what the rate limit or a bus that is away does not let pass is dropped,
and the next line that passes says how many were.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from sllm_invoker.lines import LINE_BYTES, LineCutter, TokenBucket, thinned
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.clipping import clip
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.events import LogRecord

log = logging.getLogger(__name__)

TAIL_LINES: Final = 50
FILE_BYTES: Final = 8 * limits.MIB
FILES: Final = 3
OPEN_FILES: Final = 32
"""Functions whose file is open: those that wrote last."""
SAY_AGAIN_S: Final = 60.0
"""That a function's file cannot be written is said so often: it holds for each of its lines."""
MAX_WAITING: Final = 10_000
MAX_WAITING_BYTES: Final = 16 * limits.MIB
"""Of their texts together: a line may have MAX_TEXT."""
LINES_PER_S: Final = 200.0
BURST_LINES: Final = 2000.0
_READ: Final = 64 * 1024
_STEP: Final = 256
"""Read at a time while lines may pass: each that does costs the loop as much as thousands that are dropped."""
_LAST: Final = 2 * limits.MIB
"""Read of a pipe at its worker's end; more than a pipe holds."""
MAX_TEXT: Final = 16 * LINE_BYTES
"""A message from the worker (a traceback) may have this many bytes."""


class _File(RotatingFileHandler):
    """Raises what goes wrong; logging's own prints it with a traceback, for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise  # it is called where that is handled


class LogSink:
    """One per node. ``run`` publishes; files are written at once."""

    def __init__(self, folder: Path, publish: Callable[[LogRecord], Awaitable[None]]) -> None:
        self._folder = folder
        self._publish = publish
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._said: dict[str, float] = {}
        """When it was said last that a function's file cannot be written."""
        self._waiting: deque[LogRecord] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._dropped = 0
        self._lost: dict[str, int] = {}
        """Lines of a function that the stream lacks since its last one there."""

    @property
    def writing(self) -> frozenset[str]:
        """Functions whose file is open."""
        return frozenset(self._files)

    def add(self, record: LogRecord) -> None:
        """Keep ``record``: in its function's file, and for the stream if there is room."""
        try:
            self._write(record)
        except (OSError, ValueError) as error:
            self._failed(record, error)
        if len(self._waiting) >= MAX_WAITING or self._waiting_bytes >= MAX_WAITING_BYTES:
            self._dropped += 1
            self._lost[record.function] = self._lost.get(record.function, 0) + 1 + record.dropped
            return
        if lost := self._lost.pop(record.function, 0):
            record = replace(record, dropped=record.dropped + lost)
        self._waiting.append(record)
        self._waiting_bytes += len(record.text)
        self._wake.set()

    def _failed(self, record: LogRecord, error: Exception) -> None:
        """Its file is opened anew for the next line: what a handler holds of this one it would write again."""
        if (file := self._files.pop(record.function, None)) is not None:
            _close(file)
        self._said = {name: at for name, at in self._said.items() if abs(record.at - at) < SAY_AGAIN_S}
        if record.function not in self._said:
            self._said[record.function] = record.at
            log.error("log of function %s cannot be written: %s", record.function, error)

    def _file(self, function: str) -> _File:
        """The open file of ``function``; that of the one silent for longest is closed for it if need be."""
        handler = self._files.get(function)
        if handler is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{function}.jsonl"
            handler = _File(path, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8")
            handler.setFormatter(logging.Formatter("%(message)s"))
            self._files[function] = handler
        self._files.move_to_end(function)
        if len(self._files) > OPEN_FILES:
            _close(self._files.popitem(last=False)[1])
        return handler

    def _write(self, record: LogRecord) -> None:
        fields = {
            "at": round(record.at, 3),
            "version": record.version,
            "instance": record.instance,
            "call": record.call,
            "stream": record.stream,
            "level": record.level,
            "text": record.text,
            "dropped": record.dropped,
        }
        line = json.dumps({key: value for key, value in fields.items() if value}, ensure_ascii=False)
        self._file(record.function).emit(logging.makeLogRecord({"msg": line, "levelno": logging.INFO}))

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                record = self._waiting[0]
                try:
                    await self._publish(record)
                except Unavailable:
                    await asyncio.sleep(0.5)  # the bus is away; it says no more than that
                    continue
                except SllmError as error:
                    log.error("a log line of function %s cannot be published: %s", record.function, error.message)
                self._waiting.popleft()
                self._waiting_bytes -= len(record.text)
                if self._dropped:
                    log.warning("%d log lines were not published: too many waited", self._dropped)
                    self._dropped = 0

    def close(self) -> None:
        """Close all files."""
        for handler in self._files.values():
            _close(handler)
        self._files.clear()


def _close(file: _File) -> None:
    """What it still holds may have no room."""
    with contextlib.suppress(OSError):
        file.close()


@dataclass(frozen=True)
class Writer:
    """Who wrote a line: node, instance, function and version."""

    function: str
    version: int
    instance: str
    node: str


class InstanceLog:
    """The lines of one instance: rate limited, stamped, the last ones kept for error messages."""

    def __init__(self, writer: Writer, sink: LogSink, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._writer = writer
        self._sink = sink
        self._clock = clock
        self._wall = wall
        self._bucket = TokenBucket(LINES_PER_S, BURST_LINES)
        self._dropped = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines of stderr, as its processes wrote them."""

    def line(self, stream: str, text: str, *, level: str = "info", call: str | None = None) -> None:
        """One line, or the text of one message."""
        if stream == "stderr" and level != "error":  # that is what a call was told that has ended
            self.tail.append(text[:500])
        if not self._bucket.take(1 + len(text) / LINE_BYTES, self._clock()):
            self._dropped += 1
            return
        self._emit(stream, clip(text, MAX_TEXT), level, call)

    def room(self) -> int:
        """How many lines may pass now, at most."""
        return int(self._bucket.room(self._clock()))

    def dropped(self, lines: int) -> None:
        """So many were not even looked at."""
        self._dropped += lines

    def _emit(self, stream: str, text: str, level: str, call: str | None) -> None:
        writer = self._writer
        record = LogRecord(
            at=self._wall(),
            function=writer.function,
            version=writer.version,
            instance=writer.instance,
            node=writer.node,
            stream=stream,
            text=text,
            level=level,
            call=call,
            dropped=self._dropped,
        )
        self._dropped = 0
        self._sink.add(record)

    def close(self) -> None:
        """Say how many lines were dropped since the last one that passed."""
        if self._dropped:
            self._emit("platform", f"{self._dropped} more lines were dropped: too many a second", "warning", None)


class PipeReader:
    """Reads one pipe on the event loop until its end: ``stream`` of ``log``, lines that cannot pass by their number
    alone. The pipe's owner closes the descriptor after ``stop``."""

    def __init__(self, fd: int, log: InstanceLog, stream: str) -> None:
        self._fd = fd
        self._log = log
        self._stream = stream
        self._cutter = LineCutter()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._readable)
        self._open = True

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            self._read()

    def _read(self) -> int:
        """Take some of what is there; bytes. Raises ``BlockingIOError`` where nothing is."""
        room = self._log.room()
        data = os.read(self._fd, _STEP if room and not self._cutter.skipping else _READ)
        if data:
            kept, dropped = thinned(data, room, TAIL_LINES)
            self._log.dropped(dropped)
            self._tell(self._cutter.feed(kept))
        else:
            self._finish()
        return len(data)

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            self._log.line(self._stream, line)

    def _finish(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._tell(self._cutter.end())

    def stop(self) -> None:
        """Take what is there now (bounded), then stop. Repeatable."""
        left = _LAST
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._open and left > 0:
                left -= self._read()
        self._finish()

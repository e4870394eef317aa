"""Plays loaderd to one worker, over the session's own socket and real chunks, and lets blocks land when a test says."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol.checkpoint import INDEX_NAME, decode_index, rank_blocks
from sllm_runtime.protocol.codec import pack, unpack
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.loader import (
    Answer,
    Chunks,
    Done,
    Failed,
    FileEntry,
    Files,
    Hello,
    Load,
    LoadProgress,
    Message,
    Ready,
    Request,
    Welcome,
)

_DEADLINE_S = 60.0


class ScriptedLoaderd:
    """Serves the converted checkpoint ``directory`` as ``model``. ``session`` is the worker's end, which it owns."""

    def __init__(self, directory: Path, model: str) -> None:
        self._model = model
        self._files = {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix == ".json"}
        self._data = (directory / "partition_0.bin").read_bytes()
        self.blocks = rank_blocks(decode_index(self._files[INDEX_NAME]), 0)
        self._chunk = os.memfd_create("chunk", os.MFD_CLOEXEC)
        os.ftruncate(self._chunk, len(self._data))
        ours, theirs = socket.socketpair()
        ours.settimeout(_DEADLINE_S)
        self.session = theirs.detach()
        self._wire = BlockingWire(ours)
        self._request = 0
        self._thread = threading.Thread(target=self._greet, name="scripted-loaderd")
        self._thread.start()

    def _greet(self) -> None:
        """Everything up to the memory, none of whose bytes is there."""
        assert isinstance(self._next(), Hello)
        self._send(Welcome(model=self._model))
        load = self._next()
        assert isinstance(load, Load)
        self._request = load.request
        blob = os.memfd_create("files", os.MFD_CLOEXEC)
        try:
            names = [INDEX_NAME, *(name for name in self._files if name != INDEX_NAME)]
            entries, at = [], 0
            for name in names:
                entries.append(FileEntry(name, at, os.write(blob, self._files[name])))
                at += entries[-1].nbytes
            self._send(Files(request=self._request, files=tuple(entries)), blob)
        finally:
            os.close(blob)
        chunk = Chunks(request=self._request, numbers=(0,), chunk_bytes=len(self._data), fds=1, last=True)
        self._send(chunk, self._chunk)

    def land(self, *numbers: int) -> None:
        """These blocks' bytes are there."""
        self._thread.join(_DEADLINE_S)
        for number in numbers:
            block = self.blocks[number]
            os.pwrite(self._chunk, self._data[block.offset : block.offset + block.nbytes], block.offset)
            self._send(Ready(request=self._request, block=number))

    def finish(self) -> None:
        """All of them are."""
        self._send(LoadProgress(request=self._request, stage="load", done=len(self._data), total=len(self._data)))
        self._send(Done(request=self._request))

    def fail(self, error: SllmError) -> None:
        """The rest will not come."""
        self._thread.join(_DEADLINE_S)
        self._send(Failed(request=self._request, error=error.body()))

    def close(self) -> None:
        """Hang up."""
        self._thread.join(_DEADLINE_S)
        self._wire.close()
        os.close(self._chunk)

    def _next(self) -> Request | Hello:
        payload = self._wire.receive()
        assert payload is not None
        message: Request | Hello = unpack(Hello | Load, payload)  # type: ignore[arg-type]
        return message

    def _send(self, message: Message | Answer, *fds: int) -> None:
        self._wire.send(pack(message), fds)

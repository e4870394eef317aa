"""Plays loaderd to one worker, over the session's own socket and real chunks, and lets blocks land when a test says."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol.checkpoint import INDEX_NAME, decode_index, partition_name, rank_blocks
from sllm_runtime.protocol.codec import pack, unpack
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.loader import (
    CPU,
    MEMFD,
    Answer,
    Chunks,
    DeviceMemory,
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


class _Part:
    """One partition: what its bytes will be, and the memory where none is yet."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.data = (directory / partition_name(rank)).read_bytes()
        self.blocks = rank_blocks(decode_index((directory / INDEX_NAME).read_bytes()), rank)
        self.fd = os.memfd_create("partition", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, len(self.data))
        self.request = 0

    def memory(self, device: str) -> Chunks | DeviceMemory:
        """What a load to ``device`` is told of it: one chunk, or a fake device's allocation."""
        size = len(self.data)
        if device == CPU:
            return Chunks(request=self.request, numbers=(0,), chunk_bytes=size, fds=1, last=True)
        return DeviceMemory(request=self.request, device=device, nbytes=size, size=size, kind=MEMFD)


class ScriptedLoaderd:
    """Serves the converted checkpoint ``directory`` as ``model``. ``session`` is the worker's end, which it owns."""

    def __init__(self, directory: Path, model: str) -> None:
        self._model = model
        self._files = {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix == ".json"}
        ranks = range(len(decode_index(self._files[INDEX_NAME]).partitions))
        self._parts = [_Part(directory, rank) for rank in ranks]
        self.devices: dict[int, str] = {}
        """To which device each partition was asked for."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_DEADLINE_S)
        self.session = theirs.detach()
        self._wire = BlockingWire(ours)
        self._thread = threading.Thread(target=self._greet, name="scripted-loaderd")
        self._thread.start()

    @property
    def blocks(self) -> int:
        """How many there are, in all partitions."""
        return sum(len(part.blocks) for part in self._parts)

    def _greet(self) -> None:
        """Everything up to the memory, none of whose bytes is there."""
        assert isinstance(self._next(), Hello)
        self._send(Welcome(model=self._model, partitions=tuple(range(len(self._parts)))))
        for _ in self._parts:
            load = self._next()
            assert isinstance(load, Load)
            self.devices[load.partition] = load.device
            part = self._parts[load.partition]
            part.request = load.request
            self._send_files(part)
            self._send(part.memory(load.device), part.fd)

    def _send_files(self, part: _Part) -> None:
        blob = os.memfd_create("files", os.MFD_CLOEXEC)
        try:
            names = [INDEX_NAME, *(name for name in self._files if name != INDEX_NAME)]
            entries, at = [], 0
            for name in names:
                entries.append(FileEntry(name, at, os.write(blob, self._files[name])))
                at += entries[-1].nbytes
            self._send(Files(request=part.request, files=tuple(entries)), blob)
        finally:
            os.close(blob)

    def land(self, *numbers: int, rank: int = 0) -> None:
        """The bytes of these blocks of a partition are there; of all its blocks, if none is named."""
        self._thread.join(_DEADLINE_S)
        part = self._parts[rank]
        for number in numbers or range(len(part.blocks)):
            block = part.blocks[number]
            os.pwrite(part.fd, part.data[block.offset : block.offset + block.nbytes], block.offset)
            self._send(Ready(request=part.request, block=number))

    def finish(self) -> None:
        """All of them are, everywhere."""
        self._thread.join(_DEADLINE_S)
        for part in self._parts:
            nbytes = len(part.data)
            self._send(LoadProgress(request=part.request, stage="load", done=nbytes, total=nbytes))
            self._send(Done(request=part.request))

    def fail(self, error: SllmError, rank: int = 0) -> None:
        """The rest of a partition will not come."""
        self._thread.join(_DEADLINE_S)
        self._send(Failed(request=self._parts[rank].request, error=error.body()))

    def hang_up(self) -> None:
        """It is gone. Repeatable."""
        self._thread.join(_DEADLINE_S)
        self._wire.close()

    def close(self) -> None:
        """Hang up, and give back the memory."""
        self.hang_up()
        for part in self._parts:
            os.close(part.fd)

    def _next(self) -> Request | Hello:
        payload = self._wire.receive()
        assert payload is not None
        message: Request | Hello = unpack(Hello | Load, payload)  # type: ignore[arg-type]
        return message

    def _send(self, message: Message | Answer, *fds: int) -> None:
        self._wire.send(pack(message), fds)

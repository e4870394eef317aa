from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from sllm_loaderd.client import LoaderControl
from tests.fixtures.models import save_byte_tokenizer, save_model
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.worker.harness import Worker, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    server = Zygote()
    yield server
    server.close()


@pytest.fixture
def worker(zygote: Zygote) -> Iterator[Worker]:
    one = zygote.spawn()
    yield one
    one.close()
    zygote.exited(zygote.count)


@pytest.fixture(scope="session", autouse=True)
def _servers(zygote: Zygote, loader: Loader) -> None:
    """Both start before any module's tests, so that they belong to the session; neither is waited for."""


class Loader:
    """A real loaderd with two fake devices; ``grant`` makes sessions of models in directories."""

    def __init__(self, home: Path) -> None:
        self._socket = home / "loaderd.sock"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sllm_loaderd", "--node", "test", "--data", str(home / "data"), "--socket",
             str(self._socket), "--pool-bytes", str(256 * 2**20), "--prefault-bytes", "0"],
            env={**os.environ, "SLLM_FAKE_DEVICES": "2x64MiB@4GB/s"},
        )  # fmt: skip

    def _wait(self) -> None:
        end = time.monotonic() + 60
        while not self._socket.exists():
            assert self._process.poll() is None, "loaderd ended"
            assert time.monotonic() < end
            time.sleep(0.01)

    def grant(self, directory: Path, partitions: Sequence[int] = (), devices: Sequence[str] = ()) -> int:
        """A session's descriptor for the model in ``directory`` (for these of its partitions, to these devices)."""
        self._wait()
        return asyncio.run(self._grant(directory, partitions, devices))

    async def _grant(self, directory: Path, partitions: Sequence[int], devices: Sequence[str]) -> int:
        async with LoaderControl(self._socket) as control:
            info = await control.register(str(directory))
            return await control.grant(f"h{time.monotonic_ns()}", info.model, partitions, devices=devices)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(GIVE_UP_S)


@pytest.fixture(scope="session")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    one = Loader(tmp_path_factory.mktemp("loaderd"))
    yield one
    one.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of tiny random models by name, with a tokenizer of printable ASCII."""
    root = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        if not (root / name).exists():
            save_model(name, root / name)
            save_byte_tokenizer(root / name)
        return root / name

    return make


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)  # tiny models: a second thread only waits, the more so on a busy machine

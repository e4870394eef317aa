"""The platform of ``replay``: nodes with virtual devices, a store of models behind a narrow line, and one beginning for
all runs: functions deployed, one copy of each model on a node's SSD, nothing in memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from benchmarks import beginning
from benchmarks.chaos_faults import counted
from benchmarks.cold_cases import CODER, MODEL
from benchmarks.load_store import rclone
from benchmarks.platform import Platform, stream
from benchmarks.programs import Program, ProgramFailed, await_port
from benchmarks.replay_client import LIMIT_S, Call, Heard
from benchmarks.replay_trace import LENGTHS, Arrival
from sllm_loaderd.convert.directory import convert_directory
from sllm_runtime.platform.local import Layout
from sllm_runtime.platform.running import read_running
from sllm_runtime.protocol.checkpoint import INDEX_NAME, FileRecord, decode_index, digest_hex, encode_index
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.limits import CHUNK_BYTES, MIB
from sllm_runtime.protocol.loader import DISK, path_of
from sllm_runtime.protocol.timeline import WEIGHTS

PROMPT: Final = "class Parser"
STORE_MIB_S: Final = 20
"""What the store gives to all nodes together: a model takes 0.7 s, a hundred times as long as from a disk."""
LINK: Final = "400MB/s"
PUBLISHED: Final = "published"
"""The model's own files in the store, for who does not read converted ones."""
_DEVICE: Final = "virtual"
_DEVICE_MEMORY: Final = "64MiB"
_MARK: Final = "processor_config.json"
"""A small file that the demo model has not and nothing reads: by it the models differ, in digest alone."""
_SPARE_CHUNKS: Final = 2
_THERE_S: Final = 120.0
MEASURED_S: Final = 20.0
_LOOK_S: Final = 0.05
_READY_S: Final = 20.0


@dataclass(frozen=True)
class Scene:
    """``nodes`` with ``devices`` each, and the number of models. DRAM of all nodes holds half of them, SSD 1.5 times
    as many."""

    nodes: int
    devices: int
    functions: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of the nodes."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    @property
    def dram_models(self) -> int:
        """That a node's DRAM tier holds, beside chunks for loads."""
        return max(1, self.functions // (2 * self.nodes))

    @property
    def ssd_models(self) -> int:
        """That a node's SSD tier holds."""
        return max(1, 3 * self.functions // (2 * self.nodes))

    def settings(self, policy: str, devices: int | None = None) -> dict[str, str]:
        """Environment of a platform; ``devices`` in place of its own number a node."""
        count = devices or self.devices
        return {
            "SLLM_POLICY": policy,
            "SLLM_PRELOAD": "engine",
            "SLLM_GPUS": ",".join([f"{_DEVICE}:{_DEVICE_MEMORY}"] * count),
            "SLLM_FAKE_DEVICES": f"{count}x{_DEVICE_MEMORY}@{LINK}",
            "SLLM_POOL_BYTES": str((self.dram_models + _SPARE_CHUNKS) * CHUNK_BYTES),
            "SLLM_SSD_BYTES": str(self.ssd_models * CHUNK_BYTES),
        }


def name_of(function: int) -> str:
    """Of a function, and of its model in the store."""
    return f"m{function:02d}"


def write_models(directory: Path, count: int) -> None:
    """The demo model as it is, and ``count`` converted ones: the same weights, each another model to the platform."""
    published = directory / PUBLISHED
    published.mkdir(parents=True)
    for file in filter(Path.is_file, MODEL.iterdir()):
        shutil.copy(file, published)
    first = directory / "converted"
    convert_directory(MODEL, first)
    index = decode_index((first / INDEX_NAME).read_bytes())
    for number in range(count):
        home = directory / name_of(number)
        shutil.copytree(first, home, copy_function=os.link, ignore=shutil.ignore_patterns(INDEX_NAME))
        mark = json.dumps({"number": number}).encode()
        (home / _MARK).write_bytes(mark)
        files = (*index.files, FileRecord(_MARK, len(mark), hashlib.sha256(mark).hexdigest()))
        (home / INDEX_NAME).write_bytes(encode_index(msgspec.structs.replace(index, files=files)))


@dataclass(frozen=True)
class Store:
    """A server of files over HTTP, always at one port, so that nodes find their models again."""

    directory: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def serving(self, mib_s: int = 0) -> Iterator[None]:
        """Serve, at most ``mib_s`` MiB a second to all together (0: as fast as it can)."""
        limit = ["--bwlimit", f"{mib_s}M"] if mib_s else []
        argv = [rclone(), "serve", "http", "--addr", f"127.0.0.1:{self.port}", "--read-only", *limit]
        with Program([*argv, str(self.directory)], self.directory.parent / "store.log") as server:
            await_port(server, self.port, _READY_S)
            yield


def prepare(directory: Path, scene: Scene, store: Store) -> Beginning:
    """Deploy everything once, by a platform that is stopped then; its SSDs have room for all models meanwhile. Every
    node knows every model; a copy of each stays on one node, in turn."""
    settings = scene.settings("startup-time") | {"SLLM_SSD_BYTES": str(scene.functions * CHUNK_BYTES)}
    with Platform(directory / "first", settings, nodes=scene.nodes) as platform:
        until_there(platform, scene.nodes)
        for number in range(scene.functions):
            platform.deploy(
                CODER,
                name=name_of(number),
                model=f"{store.url}/{name_of(number)}",
                gpu=(_DEVICE,),
                memory=256 * MIB,
                concurrency=1,
                max_instances=scene.devices,
                keep_alive=60.0,
                timeout=LIMIT_S,
                queue_timeout=LIMIT_S,
                max_queue=4096,
            )
        right = {tokens: platform.stream(name_of(0), asked(tokens)).text for tokens in LENGTHS}
        _until_copied(platform, scene)
        models = [platform.function(name_of(number))["versions"][0]["model"] for number in range(scene.functions)]
        for model in models:
            platform.client.operation(f"{API}/models/{model}/pull", {"nodes": list(scene.names)})
    share_out(platform.data, scene.names, models)
    return Beginning(platform.home, right)


def share_out(data: Path, nodes: Sequence[str], models: Sequence[str]) -> None:
    """Of the copies that all nodes of a stopped platform have, leave each model's on one node, in turn."""
    for number, model in enumerate(models):
        for node in nodes:
            if node != nodes[number % len(nodes)]:
                (Layout(data).node(node) / "loaderd" / "ssd" / f"{digest_hex(model)}.0.bin").unlink()


def asked(tokens: int) -> dict[str, Any]:
    """Arguments of a call, of which all answers of one length are the same."""
    return {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0.0}


def until_there(platform: Platform, nodes: int) -> None:
    """Until all nodes are heard and their warm pools full. Raises ``ProgramFailed``."""
    wanted = int(platform.settings.get("SLLM_POOL_SIZE", "2"))

    def there() -> bool:
        found = platform.client.request("GET", f"{API}/nodes")["nodes"]
        return len(found) == nodes and all(int(node["pool_idle"]) >= wanted for node in found)

    _until(there, f"{nodes} nodes with full pools")


def until_measured(platform: Platform, scene: Scene, store: Store) -> bool:
    """Until each node knows what its disk gives, and ``store``: they measure both when they have begun, so that a
    platform which is up for some seconds knows. False: some do not after MEASURED_S; their first loads will tell."""
    wanted = {DISK, path_of(store.url)}
    until = time.monotonic() + MEASURED_S
    while not (there := all(platform.measured(node) >= wanted for node in scene.names)) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    return there


def _until_copied(platform: Platform, scene: Scene) -> None:
    """Until each model lies on some node's SSD: copies are written beside the loads."""

    def there() -> bool:
        details = [platform.client.request("GET", f"{API}/nodes/{node}")["tiers"] for node in scene.names]
        copied = {model for tiers in details for model, found in tiers.items() if "ssd" in found}
        return len(copied) >= scene.functions

    _until(there, f"copies of {scene.functions} models on the nodes' SSDs")


def _until(there: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + _THERE_S
    while not there():
        if time.monotonic() > until:
            raise ProgramFailed(f"{what} are not there after {_THERE_S:g} s")
        time.sleep(_LOOK_S)


@dataclass(frozen=True)
class Beginning:
    """A stopped platform's home, from a copy of which each run begins. ``right``: the answers, by their tokens."""

    home: Path
    right: Mapping[int, str]

    def copy(self, directory: Path) -> None:
        """The home of a platform in ``directory``."""
        beginning.copy(self.home, directory / "home")


def caller(platform: Platform) -> Call:
    """Calls of the platform, each over a connection of its own."""

    def call(arrival: Arrival) -> Heard:
        with contextlib.closing(platform.connect()) as connection:
            before = time.perf_counter()
            answer = stream(connection, platform.token, name_of(arrival.function), asked(arrival.tokens))
        cold = any(span.name == WEIGHTS for span in answer.spans)
        return Heard(before + answer.first_ms / 1e3, answer.text, cold)

    return call


@dataclass(frozen=True)
class Counts:
    """What a platform has counted since it is up. ``read_mib``: what a disk has given its loaderds, so nothing that the
    page cache had; None where the kernel does not tell."""

    moved: int
    resumed: int
    read_mib: float | None

    @classmethod
    def of(cls, platform: Platform) -> Counts:
        """As of now."""
        calls = [sum(counted([platform.url], platform.token, what).values()) for what in ("moved", "resumed")]
        return cls(int(calls[0]), int(calls[1]), _read_mib(platform))

    def since(self, before: Counts) -> dict[str, int]:
        """What came to it, by the names of the record."""
        found = {"moved": self.moved - before.moved, "preempted": self.resumed - before.resumed}
        if self.read_mib is not None and before.read_mib is not None:
            found["ssd_read_mib"] = round(self.read_mib - before.read_mib)
        return found


def _read_mib(platform: Platform) -> float | None:
    running = read_running(platform.data)
    pids = running.pids if running is not None else {}
    try:
        loaders = [psutil.Process(pid) for name, pid in pids.items() if name.startswith("loaderd")]
        return sum(loader.io_counters().read_bytes for loader in loaders) / MIB
    except (psutil.Error, OSError):
        return None

"""The cases ``held_out_ssd`` and ``held_out_dram`` of ``estimator``: paths (node and tier) from which nothing was ever
started.

Functions are started on node n1 from both tiers, until what can be learned there is. Copies of their models lie on the
SSDs of the other nodes, on which nothing starts meanwhile. Then platform after platform begins on a copy of that home,
and each other node starts one function once from its SSD, and then once from its memory: of its disk there is but what
its loaderd has probed when it had begun, and of the node nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from benchmarks import beginning
from benchmarks.estimator_starts import DRAM, LEAST, MIB, SEEN_S, SSD, Start, begin, deployed, forget, tell
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed
from benchmarks.record import Case
from benchmarks.runner import Run
from sllm_runtime.control.remembering import REMEMBER_S
from sllm_runtime.control.scheduling.learned import RECENT
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.loader import DISK

TIERS: Final = {"held_out_ssd": "ssd", "held_out_dram": "dram"}
"""By case."""
LIMITS: Final = {"ssd": SSD, "dram": DRAM}
KNOWN: Final = "n1"
ROUNDS: Final = 2 * RECENT
"""Of training: the first ones teach while nothing is known yet, and the medians of the last ones have none of these."""
MEASURES_S: Final = 3.0
"""A node reads from its disk more than once, the last time within this of the first."""
SETTINGS: Final = {"SLLM_POOL_SIZE": "1", "SLLM_POOL_BYTES": str(1024 * MIB)}


@dataclass(frozen=True)
class Trained:
    """A home that has learned of KNOWN, and of no other node."""

    home: Path
    functions: Sequence[str]
    nodes: Sequence[str]
    """The others."""


def measure(run: Run, directory: Path, sizes: Sequence[int], cases: Sequence[str]) -> None:
    """Both tiers by turns, one start each of every path."""
    trained = _trained(directory, sizes, 2 if run.quick else 4, 2 if run.quick else ROUNDS)
    run.note("held out: trained")
    wanted = 6 if run.quick else LEAST
    starts: dict[str, list[Start]] = {case: [] for case in TIERS}
    turns = count()
    for life in count():
        if all(len(each) >= wanted for each in starts.values()):
            break
        with _life(trained, directory / f"life-{life}") as platform, run.spending(platform.program.usage, *_ours(run)):
            for node in trained.nodes:
                name = trained.functions[next(turns) % len(trained.functions)]
                _only(platform, node)
                for case, tier in TIERS.items():
                    platform.until_cold(*trained.functions)
                    starts[case].append(_from(platform, name, tier))
        run.note(f"held out: {len(starts[cases[0]])} starts of a tier")
    for case in cases:
        tell(run, case, starts[case], LIMITS[TIERS[case]])


def _ours(run: Run) -> list[Case]:
    return [run.case(case, "sllm") for case in TIERS]


def _from(platform: Platform, name: str, tier: str) -> Start:
    start = begin(platform, name)
    if start.tier != tier:
        raise ProgramFailed(f"{name} was to start from {tier}, not from {start.tier}")
    return start


def _trained(directory: Path, sizes: Sequence[int], others: int, rounds: int) -> Trained:
    nodes = [f"n{number + 2}" for number in range(others)]
    with Platform(directory / "trained", SETTINGS, nodes=1 + others) as platform:
        _only(platform, KNOWN, nodes)
        functions = [deployed(platform, directory, size) for size in sizes]
        for name in functions:
            model = platform.function(name)["versions"][0]["model"]
            platform.client.operation(f"{API}/models/{model}/pull", {"nodes": nodes})
        _until_copied(platform, nodes, len(functions))
        for _ in range(rounds):
            for name in functions:
                for tier in TIERS.values():
                    forget(platform, functions, dram=tier == "dram")
                    _from(platform, name, tier)
        time.sleep(REMEMBER_S + 1.0)  # it has stored what it learned
    return Trained(platform.home, functions, nodes)


def _until_copied(platform: Platform, nodes: Sequence[str], models: int) -> None:
    until = time.monotonic() + SEEN_S
    for node in nodes:
        while sum("ssd" in tiers for tiers in _described(platform, node)["tiers"].values()) < models:
            if time.monotonic() > until:
                raise ProgramFailed(f"{models} models are not on the SSD of {node} after {SEEN_S:g} s")
            time.sleep(0.05)


def _until_measured(platform: Platform, nodes: Sequence[str]) -> None:
    """As of a node that has been there for some seconds: its disk was measured, and so were its neighbours'."""
    until = time.monotonic() + SEEN_S
    for node in nodes:
        while DISK not in platform.measured(node):
            if time.monotonic() > until:
                raise ProgramFailed(f"node {node} has not measured its disk after {SEEN_S:g} s")
            time.sleep(0.05)
    time.sleep(MEASURES_S)


@contextmanager
def _life(trained: Trained, directory: Path) -> Iterator[Platform]:
    """A platform that begins where the trained one ended, with nothing in memory, nor cached."""
    beginning.copy(trained.home, directory / "home")
    beginning.drop_copies(directory / "home")
    try:
        with Platform(directory, SETTINGS, nodes=1 + len(trained.nodes)) as platform:
            platform.until_cold(*trained.functions)
            _until_measured(platform, [KNOWN, *trained.nodes])
            yield platform
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _only(platform: Platform, node: str, others: Sequence[str] = ()) -> None:
    """Of all nodes only ``node`` may be started on."""
    until = time.monotonic() + SEEN_S
    while len(nodes := platform.client.request("GET", f"{API}/nodes")["nodes"]) <= len(others):
        if time.monotonic() > until:
            raise ProgramFailed(f"{1 + len(others)} nodes are not there after {SEEN_S:g} s")
        time.sleep(0.05)
    for name in (each["node"] for each in nodes):
        wish = "uncordon" if name == node else "cordon"
        platform.client.request("POST", f"{API}/nodes/{name}/{wish}")


def _described(platform: Platform, node: str) -> dict[str, Any]:
    said: dict[str, Any] = platform.client.request("GET", f"{API}/nodes/{node}")
    return said

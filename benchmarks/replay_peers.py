"""Ray Serve beside the platform in ``replay``: the same models behind as many slots."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.cold_peers import SCRIPTS, post_text
from benchmarks.programs import PEER_ENVIRONMENT, PEERS, Program
from benchmarks.replay_client import LIMIT_S, Call, Heard
from benchmarks.replay_platform import PROMPT, PUBLISHED, Store
from benchmarks.replay_trace import LENGTHS, Arrival
from sllm_runtime.platform.nats_server import free_port

RAY: Final = {"cache": "ray serve, local cache", "store": "ray serve, no cache"}
"""Systems by where their models come from."""
NOTES: Final = {
    "cache": "checkpoints of all models on the local disk (and in the page cache)",
    "store": "each load fetches the checkpoint from the same store",
}
WHAT: Final = (
    "one deployment of serve.multiplexed, a replica for each device, one model and one call each, LRU; transformers, "
    "greedy, one thread; replicas run, and have imported all, before the first call; no sandbox; no limit of a link; "
)
_STARTED_S: Final = 600.0
_PIECE_S: Final = 120.0


@dataclass(frozen=True)
class RaySlots:
    """A Ray of its own that serves."""

    program: Program
    port: int

    def caller(self, kind: str) -> Call:
        """Calls of models that come from ``kind`` of RAY."""

        def call(arrival: Arrival) -> Heard:
            before = time.perf_counter()
            body: dict[str, object] = {"prompt": PROMPT, "count": arrival.tokens}
            model = {"serve_multiplexed_model_id": f"{kind}-{arrival.function}"}
            first_ms, text = post_text(self.port, "/stream", body, model, LIMIT_S)
            return Heard(before + first_ms / 1e3, text)

        return call


@contextlib.contextmanager
def ray_slots(directory: Path, slots: int, store: Store) -> Iterator[RaySlots]:
    """Start it, with all replicas. ``directory`` has nothing of an earlier one. Raises ``ProgramFailed``."""
    port, home = free_port(), directory / "home"
    home.mkdir(parents=True)
    published = store.directory / PUBLISHED
    argv = [str(PEERS / "python"), str(SCRIPTS / "ray_slots.py"), str(port), str(directory / "r"), str(slots)]
    env = {**PEER_ENVIRONMENT, "HOME": str(home), "PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"}
    words = [*argv, str(published), f"{store.url}/{PUBLISHED}"]
    with Program(words, directory / "ray.log", env=env, cwd=home, own_namespace=True) as program:
        program.hear(_STARTED_S)
        yield RaySlots(program, port)


def greedy_texts(directory: Path, store: Store) -> dict[int, str]:
    """The answers by their tokens, as transformers says them in a script that nothing runs beside, in the peers' own
    environment. Raises ``ProgramFailed``."""
    directory.mkdir(parents=True)
    model, most = store.directory / PUBLISHED, max(LENGTHS)
    argv = [str(PEERS / "python"), str(SCRIPTS / "plain.py"), str(model), PROMPT, str(most)]
    pieces: list[str] = []
    env = {**PEER_ENVIRONMENT, "HOME": str(directory), "OMP_NUM_THREADS": "1"}
    with Program(argv, directory / "plain.log", env=env, cwd=directory, own_namespace=True) as script:
        while "done" not in (said := script.hear(_PIECE_S)):
            pieces.append(said["piece"])
    return texts_of(pieces)


def texts_of(pieces: Sequence[str]) -> dict[int, str]:
    """The answers by their tokens, of the longest one's, a piece each."""
    return {tokens: "".join(pieces[:tokens]) for tokens in LENGTHS}

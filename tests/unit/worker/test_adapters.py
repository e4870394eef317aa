"""Which adapters of an instance are in memory: brought once, kept while used, given up when their room is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from sllm_runtime.protocol.errors import CorruptCheckpoint, DeadlineExceeded, InvalidRequest, ModelNotFound
from sllm_runtime.worker.adapters import Adapters, Load
from sllm_runtime.worker.engine.ours.adapter import Adapter, LowRank
from sllm_runtime.worker.engine.ours.lora import Lora

DIGESTS = {name: f"sha256:{name}" for name in "abcd"}
DEADLINE_S = 60.0


def small(digest: str) -> Adapter:
    half = LowRank(torch.ones(8, 2), torch.ones(2, 8))
    return Adapter(digest, {"q": half})


SIZE = small("x").nbytes


def table() -> Lora:
    return Lora({"q.weight": torch.zeros(8, 8)})


class Loads:
    """Counts, and waits for ``go`` where there is one."""

    def __init__(self, made: Callable[[str], Adapter] = small) -> None:
        self.digests: list[str] = []
        self.begun = threading.Event()
        self.go: threading.Event | None = None
        self._made = made

    def __call__(self, digest: str) -> Adapter:
        self.digests.append(digest)
        self.begun.set()
        if self.go is not None:
            assert self.go.wait(DEADLINE_S)
        return self._made(digest)


def adapters(load: Load, room: int = 2 * SIZE, timeout_s: float = DEADLINE_S) -> Adapters:
    return Adapters(DIGESTS, load, room, timeout_s)


def use(kept: Adapters, lora: Lora, *names: str) -> None:
    for name in names:
        kept.hold(name, lora)
        assert lora.get(name) is not None
        kept.release(name, lora)


def test_the_least_recently_used_goes_when_room_is_needed() -> None:
    load, lora = Loads(), table()
    kept = adapters(load)
    use(kept, lora, "a", "b", "a", "c")
    assert kept.present == ("a", "c")
    with pytest.raises(ModelNotFound):
        lora.get("b")
    assert lora.get("a") is not None
    use(kept, lora, "b")
    assert kept.present == ("c", "b")
    assert load.digests == [DIGESTS[name] for name in ("a", "b", "c", "b")]


def test_who_is_used_stays_however_little_room_there_is() -> None:
    lora = table()
    kept = adapters(Loads(), room=0)
    kept.hold("a", lora)
    kept.hold("a", lora)
    use(kept, lora, "b", "c")
    assert list(kept.present) == ["a"]
    kept.release("a", lora)
    assert list(kept.present) == ["a"], "one of two uses it still"
    kept.release("a", lora)
    assert not kept.present


def test_all_who_want_it_wait_for_one_load() -> None:
    load, lora = Loads(), table()
    load.go = threading.Event()
    kept = adapters(load)
    threads = [threading.Thread(target=kept.hold, args=("a", lora)) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert load.begun.wait(DEADLINE_S)
    assert not kept.present
    load.go.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert load.digests == [DIGESTS["a"]]
    assert list(kept.present) == ["a"]
    for _ in threads:
        kept.release("a", lora)


def test_a_load_that_fails_is_told_and_tried_again() -> None:
    def broken(digest: str) -> Adapter:
        if len(load.digests) == 1:
            raise CorruptCheckpoint("its bytes are others")
        return small(digest)

    load, lora = Loads(broken), table()
    kept = adapters(load)
    with pytest.raises(CorruptCheckpoint):
        kept.hold("a", lora)
    assert not kept.present
    use(kept, lora, "a")


def test_a_load_that_does_not_come_has_a_deadline() -> None:
    load, lora = Loads(), table()
    load.go = threading.Event()
    kept = adapters(load, timeout_s=0.01)
    first = threading.Thread(target=kept.hold, args=("a", lora))
    first.start()
    assert load.begun.wait(DEADLINE_S)
    with pytest.raises(DeadlineExceeded, match="'a'"):
        kept.hold("a", lora)
    load.go.set()
    first.join(DEADLINE_S)
    kept.release("a", lora)


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ModelNotFound, match="a, b, c, d"):
        adapters(small).hold("e", table())
    with pytest.raises(InvalidRequest, match="runs no adapters"):
        adapters(small).hold("a", None)
    with pytest.raises(ModelNotFound, match="none"):
        Adapters.none().hold("a", table())

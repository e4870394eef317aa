"""Why something waits: the words are made for whoever asks, once, and at no plan."""

import pytest

from sllm_runtime.control import placement
from sllm_runtime.control.fits import short
from sllm_runtime.control.reason import Reason
from tests.unit.control.world import FakeNode, World, deployed, manifest

FULL, WAITS = ("full", 1), ("waits", 1)


def test_words_are_made_once_and_only_for_who_asks() -> None:
    made: list[str] = []

    def words() -> str:
        made.append("all is in use")
        return made[-1]

    reason = Reason(words)
    assert made == []
    assert (str(reason), f"{reason}", repr(reason)) == ("all is in use", "all is in use", "'all is in use'")
    assert reason == "all is in use"
    assert reason == Reason(lambda: "all is in use")
    assert reason != Reason(lambda: "another")
    assert len({reason, Reason(words)}) == 1
    assert made == ["all is in use"] * 2, "once for each"


def test_plans_of_a_full_cluster_make_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(*asked: object) -> tuple[str, ...]:
        made.append("words")
        return short(*asked)  # type: ignore[arg-type]

    world = World(FakeNode("n1", cpu=1, gpus=0), FakeNode("n2", cpu=1, gpus=0))
    world.hear_all()
    world.view = deployed(deployed(world.view, manifest("full", max_instances=2)), manifest("waits"))
    world.wait_for(FULL, 2)
    world.plan()
    world.hear_all()
    world.wait_for(WAITS, 1)
    world.plan()
    monkeypatch.setattr(placement, "short", counted)
    world.plan()
    plain = len(made)
    assert world.view.why(WAITS) == "all capacity is in use: needs 1 CPUs (has 0) on n1"
    assert len(made) == plain + 4, "each node: whether it could run it, and what it lacks now"
    assert world.view.why(WAITS)
    assert len(made) == plain + 4, "and no more for the next one who asks"
    assert plain == 1, "that a node could ever run it, no more"

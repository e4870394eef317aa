"""A rollback that is asked again is done once, whatever was asked between."""

from __future__ import annotations

from sllm_runtime.control import registry
from sllm_runtime.control.view import View
from tests.unit.control.world import World, deployed, manifest


def versions(count: int) -> View:
    view = World().view
    for number in range(1, count + 1):
        view = deployed(view, manifest("chat", cpu=float(number)), number)
    return view


def active(view: View) -> int | None:
    return view.functions["chat"].active


def test_what_is_asked_again_after_somebody_else_s_rollback_goes_no_further_back() -> None:
    """Two people at the same time; the first one's answer is lost with its controller."""
    view = registry.rollback(versions(5), "chat", None, "mine")
    view = registry.rollback(view, "chat", None, "another's")
    assert active(view) == 3
    assert active(registry.rollback(view, "chat", None, "mine")) == 3


def test_one_that_found_its_version_in_place_is_done_as_well() -> None:
    view = registry.rollback(versions(2), "chat", 2, "mine")
    view = deployed(view, manifest("chat", cpu=3.0), 3)
    assert active(view) == 3
    assert active(registry.rollback(view, "chat", 2, "mine")) == 3

"""A node that can make no sandboxes says so, and is left alone until it can."""

from __future__ import annotations

import msgspec
import pytest

from sllm_runtime.control.explain import explained
from sllm_runtime.control.placement import Place, Wait
from sllm_runtime.control.reports import news, observe
from sllm_runtime.control.scheduling.policies import POLICIES, StartupTime
from tests.unit.control.scheduling.cluster import NOW, cluster, function, node, place

BROKEN = "`podman run` has not ended within 60 s"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_nothing_is_placed_on_it_until_it_says_no_more(name: str) -> None:
    policy = POLICIES[name]()
    broken = node("a", condition=BROKEN)
    view, _ = function(cluster(broken, node("b")), "chat")
    assert isinstance(there := place(policy, view, "chat"), Place)
    assert there.node == "b"
    alone, _ = function(cluster(broken), "chat")
    assert isinstance(place(policy, alone, "chat"), Wait)
    works = msgspec.structs.replace(broken, condition="", sequence=2)
    assert news(broken, works)
    healed = observe(alone, works, NOW, 0.0)
    assert isinstance(place(policy, healed, "chat"), Place)


def test_why_is_said_to_who_asks() -> None:
    view, _ = function(cluster(node("a", condition=BROKEN)), "chat")
    (candidate,) = explained(view, ("chat", 1), StartupTime(), NOW).candidates
    assert candidate.why == f"it can make no sandbox: {BROKEN}"

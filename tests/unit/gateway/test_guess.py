"""What a name that nobody has is taken for, and what that costs who streams meanwhile."""

import time

import pytest

from sllm_gateway.table import RouteTable
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import FunctionNotFound
from sllm_runtime.protocol.records import Route
from tests.unit.gateway.peer import manifest


def table(names: list[str]) -> RouteTable:
    made = RouteTable(lambda _: None)
    for name in names:
        route = Route(function=name, version=1, manifest=manifest(name), active=True)
        made.apply(subjects.route_key(name, 1), route)
    return made


def test_a_wrong_name_among_thousands_keeps_nobody_waiting() -> None:
    made = table([f"team-{number % 40}-model-{number:05}" for number in range(5000)])
    took = []
    for _ in range(3):
        began = time.thread_time()
        with pytest.raises(FunctionNotFound, match="did you mean 'team-12-model-"):
            made.find("team-12-model-9x")
        took.append(time.thread_time() - began)
    assert min(took) < 0.03, f"no stream goes on for {min(took):.3f} s"


def test_of_few_all_are_compared() -> None:
    with pytest.raises(FunctionNotFound, match="did you mean 'coder'"):
        table(["coder", "zebra"]).find("xcoder")

"""What a node that joins needs to know, and how it tells of its boot."""

import pytest

from sllm_runtime.platform.joining import Boot, JoinSettings
from sllm_runtime.protocol.errors import InvalidRequest


@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, "SLLM_NODE"), ({"SLLM_NODE": "i-1"}, "SLLM_NATS_URL")],
    ids=["no name", "no cluster"],
)
def test_what_is_missing_is_named(given: dict[str, str], missing: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{missing} is not set: .*sllm up --node"):
        JoinSettings.load(given).required()


@pytest.mark.parametrize(("variable", "text"), [("NODE", "a b"), ("NODE_DRAIN", "-1"), ("NODE_OWNER", "me")])
def test_a_wrong_value_names_its_variable(variable: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"SLLM_{variable}"):
        JoinSettings.load({f"SLLM_{variable}": text})


def test_each_stage_of_the_boot_is_told_and_their_sum() -> None:
    told: list[str] = []
    times = iter([41.5, 42.0, 44.25])
    boot = Boot(told.append, lambda: next(times))
    for stage in ("machine", "nats", "daemons"):
        boot.reached(stage)
    boot.ready()
    assert told == [
        "boot machine: 41.50 s",
        "boot nats: 0.50 s",
        "boot daemons: 2.25 s",
        "READY 44.2 s after boot (machine 41.5, nats 0.5, daemons 2.2)",
    ]

"""What a command says that waits for a controller."""

import pytest

from sllm.cli import output, patient
from sllm.cli.context import Target
from sllm.cli.patient import Patient
from sllm.client import Client
from tests.fixtures.waiting import until
from tests.unit.sdk.gateway import Answer, Gateway

STATUS = {"version": "1", "gateway": "g1", "nodes": 0, "functions": 0}


@pytest.mark.parametrize("controller", [False, True])
async def test_a_controller_that_is_waited_for_is_said_and_a_slow_answer_is_not(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, controller: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(patient, "TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(output, "note", said.append)
    gateway.will(Answer(json={**STATUS, "controller": controller}))
    with Target().client() as client, patient._told(client.profile):
        await until(lambda: said or (controller and gateway.asked), what="the status is asked for")
    assert said == ([] if controller else [patient.WAITS])


async def test_for_programs_nothing_is_said(gateway: Gateway) -> None:
    with Target().client(quiet=True) as quiet, Target().client() as telling:
        assert type(quiet) is Client
        assert isinstance(telling, Patient)

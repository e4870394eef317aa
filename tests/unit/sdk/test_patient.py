"""What a command says that waits for a controller."""

import asyncio
from collections.abc import Callable

import pytest

from sllm import following, profiles
from sllm.cli import output, patient
from sllm.cli.context import Target
from sllm.cli.patient import Patient
from sllm.client import Client
from sllm_runtime.protocol.errors import InstanceLost
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


async def test_a_gateway_that_stands_still_is_said(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(patient, "TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(patient, "STATUS_S", 0.1)
    monkeypatch.setattr(output, "note", said.append)
    gateway.will(Answer(silent=True))
    with Target().client() as client, patient._told(client.profile):
        await until(lambda: said, what="the gateway is said")
    assert said == [patient.SILENT.format(gateway.url)]


@pytest.mark.parametrize("how", ["stream", "call", "follow"])
async def test_so_it_is_to_who_waits_for_a_call_or_for_events(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(patient, "TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(patient, "STATUS_S", 0.1)
    monkeypatch.setattr(output, "note", said.append)
    gateway.will(Answer(silent=True))

    monkeypatch.setattr(following, "FOLLOW_S", 0.0)
    asks: dict[str, Callable[[Client], object]] = {
        "call": lambda client: client.call("chat", {}),
        "stream": lambda client: list(client.stream("chat", {})),
        "follow": lambda client: list(client.follow("/api/v1/events", {})),
    }

    def ask() -> None:
        with Patient(gateway.url, timeout=2.0) as client, pytest.raises(InstanceLost):
            asks[how](client)

    await asyncio.to_thread(ask)
    assert set(said) == {patient.SILENT.format(gateway.url)}


async def test_who_asks_has_the_token_of_the_command_alone(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's is for another platform where a profile is named."""
    profiles.save("dev", gateway.url, None)
    monkeypatch.setattr(patient, "TOLD_AFTER_S", 0.0)
    gateway.will(Answer(json={**STATUS, "controller": True}))
    with Target(profile="dev").client() as client, patient._told(client.profile):
        await until(lambda: gateway.asked, what="the status is asked for")
    (_, path, _, headers), *_ = gateway.asked
    assert path == "/api/v1/status"
    assert "authorization" not in headers


async def test_for_programs_nothing_is_said(gateway: Gateway) -> None:
    with Target().client(quiet=True) as quiet, Target().client() as telling:
        assert type(quiet) is Client
        assert isinstance(telling, Patient)

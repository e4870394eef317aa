"""Whether sandboxes are containers: what was asked for, or a refusal, never less in silence."""

import logging
from pathlib import Path
from typing import Any

import pytest

from sllm_invoker.containers import choice
from sllm_invoker.settings import InvokerSettings
from sllm_runtime.protocol.errors import InvalidRequest, Unavailable


def settings(tmp_path: Path, **given: Any) -> InvokerSettings:
    return InvokerSettings.load({}, node="n1", data_dir=tmp_path, loaderd_socket=tmp_path / "s", **given)


@pytest.fixture(autouse=True)
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


async def test_processes_are_what_nobody_asked_otherwise_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert await choice.engine_for(settings(tmp_path)) is None
    assert caplog.text == ""
    assert await choice.engine_for(settings(tmp_path, nats_url="tls://nats.example:4222")) is None
    assert "FUNCTIONS ARE NOT ISOLATED" in caplog.text, "a node of a cluster says so"


async def test_auto_says_loudly_that_nothing_is_isolated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert await choice.engine_for(settings(tmp_path, sandbox="auto")) is None
    assert "FUNCTIONS ARE NOT ISOLATED" in caplog.text
    assert "podman: not installed" in caplog.text
    told: list[str] = []
    assert await choice.engine_for(settings(tmp_path, sandbox="auto"), told.append) is None
    assert "FUNCTIONS ARE NOT ISOLATED" in told[0]


@pytest.mark.parametrize("wanted", ["podman", "docker"])
async def test_an_engine_that_was_named_and_is_not_there_is_an_error(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(Unavailable, match=f"{wanted}: not installed"):
        await choice.engine_for(settings(tmp_path, sandbox=wanted))


async def test_required_isolation_is_had_or_the_node_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await choice.engine_for(settings(tmp_path, sandbox="auto", require_isolation=True))
    with pytest.raises(InvalidRequest, match="SLLM_REQUIRE_ISOLATION"):
        await choice.engine_for(settings(tmp_path, sandbox="process", require_isolation=True))


@pytest.mark.parametrize(
    ("urls", "here"),
    [
        (None, True),
        ("nats://127.0.0.1:4222", True),
        ("localhost:4222", True),
        ("nats://[::1]:4222", True),
        ("tls://nats.example:4222", False),
        ("nats://10.0.0.5:4222", False),
        ("nats://127.0.0.1:4222, tls://10.0.0.5:4222", False),
    ],
)
async def test_auto_does_without_isolation_on_a_machine_for_development_alone(
    tmp_path: Path, urls: str | None, here: bool
) -> None:
    given = settings(tmp_path, sandbox="auto", nats_url=urls)
    assert choice.for_development(given) is here
    if here:
        assert await choice.engine_for(given) is None
    else:
        with pytest.raises(Unavailable, match=r"podman: not installed.*SLLM_SANDBOX=process says otherwise"):
            await choice.engine_for(given)

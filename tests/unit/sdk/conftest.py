"""A scripted gateway, and a home without profiles."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sdk.gateway import TOKEN, Gateway, running


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No profile, no settings of whoever runs the tests, and no proxy."""
    for name in ("SLLM_URL", "SLLM_TOKEN", "SLLM_PROFILE", "SLLM_NATS_URL", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def server() -> Iterator[Gateway]:
    """One server for a module's tests."""
    with running() as found:
        yield found


@pytest.fixture
def gateway(server: Gateway, home: Path, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """A gateway that the SDK finds by its environment, and that nobody has asked yet."""
    server.forget()
    monkeypatch.setenv("SLLM_URL", server.url)
    monkeypatch.setenv("SLLM_TOKEN", TOKEN)
    return server

"""A hub's token is replaced in its file while loads read by it."""

import contextlib
from pathlib import Path

import pytest
from huggingface_hub.utils._http import close_session

from sllm_runtime.protocol.errors import Forbidden
from tests.fixtures.loaderd import numbers_model, programs
from tests.fixtures.sources import TOKEN, hub
from tests.unit.loaderd.test_hub_moved import registered
from tests.unit.loaderd.test_origins import content, sources, store


def test_another_token_in_its_file_opens_the_hub_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers_model(tmp_path / "one")
    file = tmp_path / "token"
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(file))
    with hub(tmp_path / "one", private=True) as server, programs(), store(tmp_path / "data") as models:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        file.write_text(TOKEN)
        digest = registered(models, "hf://org/tiny")
        with contextlib.closing(models.open(digest)) as model:
            with sources(model) as found:
                before = content(found[0], model)
            monkeypatch.setattr("tests.fixtures.sources.TOKEN", "hf_second")
            with sources(model) as found, pytest.raises(Forbidden):
                content(found[0], model)
            file.write_text("hf_second")
            with sources(model) as found:
                assert content(found[0], model) == before
    close_session()

"""A hub's branch moves and is registered again while a load reads what it was: that is at its commit still."""

import contextlib
from pathlib import Path

import pytest
from huggingface_hub.utils._http import close_session

from sllm_loaderd.convert.child import bring
from sllm_loaderd.origins import SourceRecord
from sllm_loaderd.sources.hub import HubSource
from sllm_loaderd.store import ModelStore
from tests.fixtures.loaderd import numbers_model, programs
from tests.fixtures.sources import COMMIT, hub
from tests.unit.loaderd.test_origins import content, sources, store


def registered(models: ModelStore, uri: str) -> str:
    """As ``Registration._take``, of what stays where it is."""
    with models.staging() as staging:
        outcome = bring(uri, staging, models.cache, "", direct=True)
        models.adopt(staging, outcome.digest)
        models.remember(SourceRecord(uri, outcome.fingerprint, outcome.digest, outcome.entries))
    return outcome.digest


@pytest.mark.parametrize("pinned", [False, True])
def test_what_reads_a_commit_reads_on_when_its_branch_is_registered_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    numbers_model(tmp_path / "one")
    numbers_model(tmp_path / "two", rows=128, seed=1)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with hub(tmp_path / "one") as server, programs(), store(tmp_path / "data") as models:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        digest = registered(models, "hf://org/tiny")
        if pinned:
            assert registered(models, f"hf://org/tiny@{COMMIT}") == digest
        with contextlib.closing(models.open(digest)) as model, sources(model) as found:
            before = content(found[0], model)
            server.moved = tmp_path / "two"
            assert registered(models, "hf://org/tiny") != digest
            assert content(found[0], model) == before
            (was,) = models.origins._readers
            assert isinstance(was, HubSource)
        assert was._remote is None, "nobody reads by it any more"
    close_session()

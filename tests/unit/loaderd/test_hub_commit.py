"""A hub's files are read at the commit that was registered, and its connections end when they are of no use."""

from pathlib import Path

import pytest

from sllm_loaderd import origins
from sllm_loaderd.origins import SourceRecord
from sllm_loaderd.sources import Entry
from sllm_loaderd.sources import open_source as opened
from sllm_loaderd.store import ModelStore

DIGEST = "sha256:" + "b" * 64


@pytest.mark.parametrize("uri", ["hf://org/name/", "hf://org/name"])
@pytest.mark.parametrize("gone", ["deleted", "registered again"])
def test_a_hub_is_read_where_it_was_and_left_when_it_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, gone: str
) -> None:
    closed = list[str]()

    class Fake:
        path = "https hub"

        def __init__(self, uri: str) -> None:
            opened(uri)  # it is a right one
            self.uri = uri

        def close(self) -> None:
            closed.append(self.uri)

    monkeypatch.setattr(origins, "open_source", lambda uri, _settings: Fake(uri))
    models = ModelStore(tmp_path, ssd_bytes=0)
    try:
        (models.models / ("b" * 64)).mkdir()
        models.remember(SourceRecord(uri, "commit:" + "a" * 40, DIGEST, (Entry("model.safetensors", 5),)))
        assert len(models.stores(uri)) == 1
        if gone == "deleted":
            models.delete(DIGEST)
        else:
            models.remember(SourceRecord(uri, "commit:" + "c" * 40, DIGEST, (Entry("model.safetensors", 5),)))
        assert closed == ["hf://org/name@" + "a" * 40]
    finally:
        models.close()

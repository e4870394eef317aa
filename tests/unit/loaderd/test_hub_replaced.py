"""A hub's model is converted behind its loads: those that read it still read on."""

from pathlib import Path

import pytest

from sllm_loaderd import origins
from sllm_loaderd.origins import SourceRecord
from sllm_loaderd.sources import Entry
from sllm_loaderd.store import ModelStore

FORMER, CONVERTED = "sha256:" + "b" * 64, "sha256:" + "c" * 64


def test_what_is_converted_behind_a_load_does_not_end_its_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[str]()

    class Fake:
        path = "https hub"

        def __init__(self, uri: str) -> None:
            self.uri = uri

        def close(self) -> None:
            closed.append(self.uri)

    monkeypatch.setattr(origins, "open_source", lambda uri, _settings: Fake(uri))
    models = ModelStore(tmp_path, ssd_bytes=0)
    uri, commit, entry = "hf://org/name", "commit:" + "a" * 40, Entry("model.safetensors", 5)
    try:
        for digest in (FORMER, CONVERTED):
            (models.models / digest.partition(":")[2]).mkdir()
        record = SourceRecord(uri, commit, FORMER, (entry,))
        models.remember(record)
        models.origins._lent(origins.fixed(record), entry)  # a load reads by it
        models.remember(SourceRecord(uri, commit, CONVERTED))  # as ``Registration._take`` does
        assert not closed
    finally:
        models.close()

"""Which files a directory behind a web server is read by."""

import json
from pathlib import Path

import pytest

from sllm_loaderd.convert.child import bring
from tests.fixtures.loaderd import numbers_model
from tests.fixtures.range_server import range_server
from tests.unit.loaderd.test_origins import store


@pytest.mark.parametrize("direct", [False, True])
def test_one_file_goes_before_the_index_of_former_shards_by_http_too(tmp_path: Path, direct: bool) -> None:
    directory = tmp_path / "served" / "m"
    numbers_model(directory)
    names = {"embed.weight": "model-00001-of-00002.safetensors", "head.weight": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with store(tmp_path / "store") as models, range_server(tmp_path / "served") as server:
        with models.staging() as staging:
            local = bring(str(directory), staging, models.cache, "", direct=direct)
        with models.staging() as staging:
            there = bring(f"{server.url}/m", staging, models.cache, "", direct=direct)
    assert direct or there.digest == local.digest
    assert not direct or [entry.name for entry in there.entries] == ["model.safetensors"]

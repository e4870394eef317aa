"""Model sources against real servers: a hub on loopback, an object store that checks signatures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sllm_loaderd.convert import child
from sllm_loaderd.convert.child import bring
from sllm_loaderd.files import open_source_file
from sllm_loaderd.sources import open_source
from sllm_loaderd.sources.fetch import resolve
from sllm_runtime.protocol.errors import Conflict, Forbidden, InvalidCheckpoint, ModelNotFound, SllmError, Unavailable
from tests.fixtures.loaderd import loaderd, numbers_model
from tests.fixtures.sources import COMMIT, TOKEN, hub, object_store, s3_settings
from tests.fixtures.waiting import GIVE_UP_S

WAIT = GIVE_UP_S


def fetch(uri: str, cache: Path, **environment: str) -> dict[str, object]:
    """`resolve` in a process of its own, as loaderd does it: the hub's library reads its environment once."""
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from sllm_loaderd.sources import open_source\n"
        "from sllm_loaderd.sources.fetch import resolve\n"
        "from sllm_runtime.protocol.errors import SllmError\n"
        "seen = []\n"
        "try:\n"
        "    source = open_source(sys.argv[1])\n"
        "    found = {'fingerprint': source.fingerprint()}\n"
        "    found['path'] = str(resolve(source, Path(sys.argv[2]), lambda done, total: seen.append((done, total))))\n"
        "    found['progress'] = seen\n"
        "except SllmError as error:\n"
        "    found = {'code': error.code, 'message': error.message}\n"
        "print(json.dumps(found))\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "AWS_"))}
    home = cache / "home"
    home.mkdir(parents=True, exist_ok=True)
    settings = {**clean, "HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, uri, str(cache)], env=settings, capture_output=True, text=True, timeout=WAIT * 2,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    numbers_model(directory)
    (directory / "config.json").write_text('{"architectures": ["Numbers"]}')
    (directory / "modeling.py").write_text("raise SystemExit('code of a stranger')")
    (directory / "pytorch_model.bin").write_bytes(b"never fetched")
    return directory


def test_a_model_of_a_hub_is_fetched_once_without_its_code(model: Path, tmp_path: Path) -> None:
    with hub(model) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        found = fetch("hf://org/tiny", tmp_path / "cache", HF_ENDPOINT=endpoint)
        assert found["fingerprint"] == f"commit:{COMMIT}"
        path = Path(str(found["path"]))
        assert {file.name for file in path.iterdir()} == {"config.json", "model.safetensors"}
        assert (path / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
        progress = found["progress"]
        assert isinstance(progress, list)
        assert progress[-1][0] == progress[-1][1]
        server.gets.clear()
        again = fetch(f"hf://org/tiny@{COMMIT}", tmp_path / "cache", HF_ENDPOINT=endpoint)
        assert again["path"] == str(path)
        assert not [get for get in server.gets if "/resolve/" in get]
    offline = fetch("hf://org/tiny@main", tmp_path / "other", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert offline["code"] == "model_not_found"
    gone = fetch("hf://org/tiny", tmp_path / "other", HF_ENDPOINT=endpoint)
    assert gone["code"] == "unavailable"


def test_offline_mode_uses_what_was_fetched(model: Path, tmp_path: Path) -> None:
    with hub(model) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        found = fetch(f"hf://org/tiny@{COMMIT}", tmp_path / "cache", HF_ENDPOINT=endpoint)
    offline = fetch(f"hf://org/tiny@{COMMIT}", tmp_path / "cache", HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert offline["path"] == found["path"]


def test_a_private_model_wants_its_token(model: Path, tmp_path: Path) -> None:
    with hub(model, private=True) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        refused = fetch("hf://org/tiny", tmp_path / "cache", HF_ENDPOINT=endpoint)
        assert refused["code"] == "forbidden"
        assert "HF_TOKEN" in str(refused["message"])
        found = fetch("hf://org/tiny", tmp_path / "cache", HF_ENDPOINT=endpoint, HF_TOKEN=TOKEN)
        assert "path" in found


def test_a_model_or_revision_that_a_hub_has_not(model: Path, tmp_path: Path) -> None:
    with hub(model) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        for uri in ("hf://org/none", "hf://org/tiny@none"):
            assert fetch(uri, tmp_path / "cache", HF_ENDPOINT=endpoint)["code"] == "model_not_found"
        (model / "model.safetensors").unlink()
        refused = fetch("hf://org/tiny", tmp_path / "cache", HF_ENDPOINT=endpoint)
        assert refused["code"] == "unsupported_model"
        assert "no safetensors" in str(refused["message"])


# --- object store ---------------------------------------------------------------------------------
def test_a_prefix_of_an_object_store(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "store" / "bucket" / "models" / "tiny")
    with object_store(tmp_path / "store") as endpoint:
        found = fetch("s3://bucket/models/tiny", tmp_path / "cache", **s3_settings(endpoint))
        path = Path(str(found["path"]))
        assert {file.name for file in path.iterdir()} == {"config.json", "model.safetensors"}
        assert (path / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
        again = fetch("s3://bucket/models/tiny/", tmp_path / "cache", **s3_settings(endpoint))
        assert again["path"] == str(path)
        numbers_model(tmp_path / "store" / "bucket" / "models" / "tiny", seed=9)
        changed = fetch("s3://bucket/models/tiny", tmp_path / "cache", **s3_settings(endpoint))
        assert changed["fingerprint"] != found["fingerprint"]
        assert changed["path"] != found["path"]
        for uri in ("s3://bucket/none", "s3://none/models"):
            assert fetch(uri, tmp_path / "cache", **s3_settings(endpoint))["code"] == "model_not_found"
        wrong = s3_settings(endpoint, AWS_SECRET_ACCESS_KEY="WRONG")
        assert fetch("s3://bucket/models/tiny", tmp_path / "cache", **wrong)["code"] == "forbidden"
    dead = fetch("s3://bucket/models/tiny", tmp_path / "cache", **s3_settings(endpoint, AWS_MAX_ATTEMPTS="1"))
    assert dead["code"] == "unavailable"


def test_one_of_several_gguf_models_of_an_object_store(tmp_path: Path) -> None:
    """They are refused before they are fetched, and what the refusal asks for is taken."""
    directory = tmp_path / "store" / "bucket" / "gguf"
    directory.mkdir(parents=True)
    names = ("m-Q4.gguf", "m-Q8-00001-of-00002.gguf", "m-Q8-00002-of-00002.gguf")
    for name in names:
        (directory / name).write_bytes(name.encode())
    with object_store(tmp_path / "store") as endpoint:
        all_of_them = fetch("s3://bucket/gguf", tmp_path / "cache", **s3_settings(endpoint))
        assert "s3://bucket/gguf/ has several models (m-Q4.gguf, m-Q8" in str(all_of_them.get("message"))
        assert not list((tmp_path / "cache").glob("fetched/*"))
        for wanted in (names[:1], names[1:]):
            found = fetch(f"s3://bucket/gguf/{wanted[0]}", tmp_path / "cache", **s3_settings(endpoint))
            assert sorted(file.name for file in Path(str(found.get("path"))).iterdir()) == sorted(wanted)


async def test_loaderd_registers_from_an_object_store(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model, tmp_path / "store" / "bucket" / "tiny")
    with object_store(tmp_path / "store") as endpoint:
        for name, value in s3_settings(endpoint).items():
            monkeypatch.setenv(name, value)
        async with loaderd(tmp_path, chunk_bytes=16 * 2**20, pool_bytes=2**26) as daemon:
            stages: list[str] = []
            info = await daemon.control.register("s3://bucket/tiny", report=lambda stage, *_: stages.append(stage))
            again = await daemon.control.register("s3://bucket/tiny")
            assert again.model == info.model
            assert again.sources == ("s3://bucket/tiny",)
            assert stages[0] == "fetch"
            assert stages[-1] == "convert"
            assert not list((daemon.data / "cache" / "fetched").iterdir())  # the checkpoint has it all


# --- the rest --------------------------------------------------------------------------------------
def test_a_directory_is_taken_where_it_stands_and_its_fingerprint_changes_with_it(model: Path, tmp_path: Path) -> None:
    assert resolve(open_source(str(model)), tmp_path) == model
    assert resolve(open_source(f"file://{model}"), tmp_path) == model
    source = open_source(str(model))
    before = source.fingerprint()
    assert before == source.fingerprint()
    (model / "config.json").write_text("{ }")
    assert source.fingerprint() != before
    with pytest.raises(ModelNotFound, match="is not there on this node"):
        open_source(str(tmp_path / "none")).fingerprint()
    with pytest.raises(ModelNotFound, match="is not there on this node"):  # a name that no file can have
        open_source(str(tmp_path / ("n" * 300))).fingerprint()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", ["vocab.txt", "model.safetensors"])
def test_a_link_brings_nothing_from_outside_a_model(model: Path, tmp_path: Path, name: str, direct: bool) -> None:
    """Who writes it need not see what it leads to: loaderd does."""
    hidden = tmp_path / "hidden"
    hidden.write_bytes((model / name).read_bytes() if (model / name).exists() else b"a secret")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(hidden)
    with pytest.raises(InvalidCheckpoint, match=f"{name} is a link to {hidden}, outside the model's directory"):
        bring(str(model), tmp_path / "staging", tmp_path / "cache", "", direct=direct)
    assert not (tmp_path / "staging" / name).exists()


@pytest.mark.parametrize("direct", [True, False])
def test_links_within_a_model_and_those_of_a_hubs_cache_are_followed(model: Path, tmp_path: Path, direct: bool) -> None:
    digest = bring(str(model), tmp_path / "plain", tmp_path / "cache", "", direct=direct).digest
    (model / "config.json").rename(model / "other")
    (model / "config.json").symlink_to("other")
    assert bring(str(model), tmp_path / "linked", tmp_path / "cache", "", direct=direct).digest == digest
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / COMMIT, tmp_path / "models--x" / "blobs"
    for directory in (snapshot, blobs):
        directory.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, blobs / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    (tmp_path / "link").symlink_to(snapshot)
    assert bring(str(tmp_path / "link"), tmp_path / "cached", tmp_path / "cache", "", direct=direct).digest == digest


HEX = "0123456789" * 4
HUB_LINKS = {
    "a folder of a snapshot": ("models--x/snapshots/1/Q4/a.gguf", f"models--x/blobs/{HEX}"),
    "a snapshot that was moved": ("moved/snapshots/1/Q4/a.gguf", "moved/blobs/etag"),
    "a directory of an older tool": ("here/a.gguf", f"cache/models--x/blobs/{HEX}"),
}
OTHER_LINKS = {
    "a cache of something else": ("here/a.gguf", f"cache/blobs/{HEX}"),
    "what no hub names so": ("here/a.gguf", "cache/models--x/blobs/secret"),
    "what lies below blobs": ("x/snapshots/1/a.gguf", f"x/blobs/sha256/{HEX}"),
}


def linked(directory: Path, link: str, target: str) -> Path:
    """A file at ``target``, to which ``link`` leads."""
    for made in (directory / link, directory / target):
        made.parent.mkdir(parents=True, exist_ok=True)
    (directory / target).write_bytes(b"bytes")
    (directory / link).symlink_to(directory / target)
    return directory / link


@pytest.mark.parametrize("layout", HUB_LINKS)
def test_links_to_files_of_a_hubs_cache_are_followed_wherever_they_are(tmp_path: Path, layout: str) -> None:
    os.close(open_source_file(linked(tmp_path, *HUB_LINKS[layout])))


@pytest.mark.parametrize("layout", OTHER_LINKS)
def test_what_only_looks_like_a_hubs_cache_is_outside(tmp_path: Path, layout: str) -> None:
    with pytest.raises(InvalidCheckpoint, match="outside the model's directory"):
        open_source_file(linked(tmp_path, *OTHER_LINKS[layout]))


def test_a_link_in_the_place_of_blobs_leads_nowhere(tmp_path: Path) -> None:
    """Whoever makes a snapshot makes that, too."""
    link = linked(tmp_path, "x/snapshots/1/a.gguf", f"hidden/{HEX}")
    (tmp_path / "x" / "blobs").symlink_to(tmp_path / "hidden")
    link.unlink()
    link.symlink_to(Path("../../blobs") / HEX)
    with pytest.raises(InvalidCheckpoint, match="outside the model's directory"):
        open_source_file(link)


@pytest.mark.parametrize("uri", ["ftp://x", "hf://", "hf://a/b/c", "s3://", "gs://bucket/x"])
def test_what_is_no_source_is_refused_with_what_would_be_one(uri: str) -> None:
    with pytest.raises(InvalidCheckpoint, match="give"):
        open_source(uri)
    assert issubclass(Forbidden, SllmError)
    assert issubclass(Unavailable, SllmError)


@pytest.mark.parametrize("when", ["while it waits for its turn", "while it is read"])
def test_a_directory_that_changes_while_it_is_converted_is_refused(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a mixture of two models is what it was registered as, or the second one under the first one's name."""
    model = tmp_path / "model"
    for name, fill in (("first", 1.0), ("second", 2.0)):
        save_file({f"layers.{n}.weight": np.full((1 << 20,), fill, np.float32) for n in range(8)}, tmp_path / name)
    model.mkdir()
    shutil.copyfile(tmp_path / "first", model / "model.safetensors")
    waiting = when == "while it waits for its turn"
    saved: list[bool] = []

    def save_again() -> None:
        if not saved:
            saved.append(True)
            (model / "model.safetensors").write_bytes((tmp_path / "second").read_bytes())  # in place, as torch saves

    if not waiting:
        monkeypatch.setattr(child, "_reporter", lambda stage: lambda done, total: save_again())
    with pytest.raises(Conflict, match="has changed"):
        bring(str(model), tmp_path / "staging", tmp_path / "cache", "", turn=save_again if waiting else lambda: None)
    assert saved

"""Checkpoints that stay where they are: index and small files are taken, partitions are read from there."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import boto3
import pytest
from botocore.credentials import Credentials, RefreshableCredentials
from botocore.exceptions import ClientError

from sllm_loaderd.convert.child import bring
from sllm_loaderd.convert.child_messages import ChildOutcome
from sllm_loaderd.origins import SourceRecord
from sllm_loaderd.reader import ChunkSource
from sllm_loaderd.sources import s3
from sllm_loaderd.sources.resolving import Resolving
from sllm_loaderd.store import ModelStore, StoredModel
from sllm_runtime.protocol.errors import (
    Conflict,
    CorruptCheckpoint,
    DigestMismatch,
    Forbidden,
    InvalidCheckpoint,
    ModelNotFound,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.loader import DISK
from tests.fixtures.loaderd import SMALL_CHUNK, numbers_model, small_checkpoint
from tests.fixtures.range_server import RangeServer, range_server
from tests.fixtures.sources import KEYS, KeyProgram, object_store, s3_settings
from tests.fixtures.waiting import until


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, str]:
    """A converted checkpoint in a directory that a server may serve."""
    directory, digest = small_checkpoint(tmp_path)
    shutil.copytree(directory, tmp_path / "served" / "bucket" / "tiny")
    return tmp_path / "served" / "bucket" / "tiny", digest


@pytest.fixture
def server(published: tuple[Path, str]) -> Iterator[RangeServer]:
    with range_server(published[0].parent) as running:
        yield running


@contextlib.contextmanager
def store(directory: Path) -> Iterator[ModelStore]:
    opened = ModelStore(directory, ssd_bytes=2**24)
    try:
        yield opened
    finally:
        opened.close()


def register(models: ModelStore, uri: str, known: str = "") -> ChildOutcome:
    with models.staging() as staging:
        outcome = bring(uri, staging, models.cache, known)
        if outcome.digest:
            models.adopt(staging, outcome.digest)
            models.remember(SourceRecord(uri, outcome.fingerprint, outcome.digest, outcome.entries))
    return outcome


@contextlib.contextmanager
def sources(model: StoredModel) -> Iterator[list[ChunkSource]]:
    opened = model.open_sources(0)
    try:
        yield opened
    finally:
        for source in opened:
            source.close()


def content(source: ChunkSource, model: StoredModel) -> bytes:
    buffer = bytearray(model.index.nbytes)
    source.read(memoryview(buffer), 0)
    return bytes(buffer)


def test_keys_of_an_object_store_that_are_replaced_in_their_file_open_it_at_once(
    published: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an operator, or what renews temporary keys, does it while loaderd runs."""
    directory, digest = published
    keys = tmp_path / "credentials"

    def have(secret: str) -> None:
        keys.write_text(f"[default]\naws_access_key_id = KEY\naws_secret_access_key = {secret}\n")

    with object_store(tmp_path / "served") as endpoint:
        for name, value in s3_settings(endpoint).items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
        have("SECRET")
        with store(tmp_path / "data") as models:
            register(models, "s3://bucket/tiny")
            have("OUTWORN")
            model = models.open(digest)
            with contextlib.closing(model):
                with sources(model) as (remote,), pytest.raises(Forbidden):
                    content(remote, model)
                have("SECRET")
                with sources(model) as (remote,):
                    assert content(remote, model) == (directory / "partition_0.bin").read_bytes()


@pytest.mark.parametrize("when", ["at first", "as they expire"])
async def test_keys_that_do_not_come_hold_no_reader_up(
    published: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """botocore waits for the program that is to print them for as long as that hangs; so did every reader of the store,
    and nobody came to its next source."""
    directory, digest = published
    program, made = KeyProgram(tmp_path / "keys"), list[Resolving[Any]]()

    def resolving(find: Callable[[], Any], what: str, within_s: float) -> Resolving[Any]:
        made.append(Resolving(find, what, within_s))
        return made[-1]

    monkeypatch.setattr(s3, "Resolving", resolving)
    with object_store(tmp_path / "served") as endpoint, store(tmp_path / "data") as models:
        for name in KEYS:
            monkeypatch.delenv(name, raising=False)
        for name, value in program.settings(endpoint).items():
            monkeypatch.setenv(name, value)
        register(models, "s3://bucket/tiny")
        with contextlib.closing(models.open(digest)) as model, sources(model) as (remote,):
            whole = (directory / "partition_0.bin").read_bytes()
            if when == "as they expire":
                assert content(remote, model) == whole
            program.hang()
            for each in made:
                each._within_s = 0.2
            begun = program.begun
            try:
                if when == "as they expire":
                    assert content(remote, model) == whole, "they are good for some minutes yet"
                    monkeypatch.setattr(s3, "_GOOD_S", 3600)
                for _ in range(3):
                    with pytest.raises(Unavailable, match=r"credentials did not come within 0\.2 s"):
                        content(remote, model)
                assert program.begun - begun <= 1, "beside one that hangs no other is begun"
            finally:
                program.let_go()

            def comes() -> bool:
                with contextlib.suppress(Unavailable):
                    return content(remote, model) == whole
                return False

            await until(comes, what="it goes on by itself")


@pytest.mark.parametrize(
    ("does", "error", "match"),
    [
        ("exit 1", Unavailable, "check endpoint and credentials"),
        ("echo null", Forbidden, "says nonsense"),
        (
            """echo '{"Version": 1, "AccessKeyId": "K", "SecretAccessKey": "S", "Expiration": 5}'""",
            Forbidden,
            "nonsense",
        ),
    ],
)
async def test_a_program_that_gives_no_keys_is_told_as_that(
    published: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    does: str,
    error: type[SllmError],
    match: str,
) -> None:
    """As those that there were expire; it was a bug of loaderd's that could not be tried again."""
    program = KeyProgram(tmp_path / "keys")
    with object_store(tmp_path / "served") as endpoint, store(tmp_path / "data") as models:
        for name in KEYS:
            monkeypatch.delenv(name, raising=False)
        for name, value in program.settings(endpoint).items():
            monkeypatch.setenv(name, value)
        register(models, "s3://bucket/tiny")
        with contextlib.closing(models.open(published[1])) as model, sources(model) as (remote,):
            whole = content(remote, model)
            program.breaks(does)
            begun = program.begun
            for _ in range(5):
                assert content(remote, model) == whole, "those that there are are good for some minutes yet"
            assert program.begun - begun <= 2, "it is not asked at each request"
            monkeypatch.setattr(s3, "_GOOD_S", 3600)
            with pytest.raises(error, match=match):
                content(remote, model)


@pytest.mark.parametrize("how", ["cannot be had", "are others each time"])
def test_keys_of_a_role_that_are_refused_are_told_as_that(
    published: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """STS refuses who may have the role no more, by an error that is none of botocore's core; and who may gets other
    keys of it each time, so that they say nothing."""
    have, asked = boto3.Session.get_credentials, list[int]()

    def get(self: Any) -> Any:
        asked.append(1)
        if len(asked) > 1 and how == "cannot be had":
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "AssumeRole")
        return have(self) if len(asked) == 1 else Credentials("KEY", "OUTWORN", f"token {len(asked)}")

    digest = published[1]
    with object_store(tmp_path / "served") as endpoint, store(tmp_path / "data") as models:
        for name, value in s3_settings(endpoint).items():
            monkeypatch.setenv(name, value)
        register(models, "s3://bucket/tiny")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "OUTWORN")
        monkeypatch.setattr(boto3.Session, "get_credentials", get)
        model = models.open(digest)
        with contextlib.closing(model), sources(model) as (remote,), pytest.raises(Forbidden, match="credentials"):
            content(remote, model)
    assert len(asked) == 2


@pytest.mark.parametrize("then", ["it stays so", "other keys are in their file"])
def test_a_role_that_is_refused_when_its_keys_lapse_is_told_as_that(
    published: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """An hour after it was opened: botocore asks for others as a request is signed; what it meets is no bug of ours."""
    have, asked = boto3.Session.get_credentials, list[int]()

    def refused() -> NoReturn:
        said = {"Error": {"Code": "AccessDenied", "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
        raise ClientError(said, "AssumeRole")

    lapsed = RefreshableCredentials("KEY", "SECRET", "token", datetime(2020, 1, 1, tzinfo=UTC), refused, "assume-role")

    def get(self: Any) -> Any:
        asked.append(1)
        return lapsed if len(asked) == 1 or then == "it stays so" else have(self)

    directory, digest = published
    with object_store(tmp_path / "served") as endpoint, store(tmp_path / "data") as models:
        for name, value in s3_settings(endpoint).items():
            monkeypatch.setenv(name, value)
        register(models, "s3://bucket/tiny")
        monkeypatch.setattr(boto3.Session, "get_credentials", get)
        model = models.open(digest)
        with contextlib.closing(model), sources(model) as (remote,):
            if then == "it stays so":
                with pytest.raises(Forbidden, match=r"s3://bucket/tiny/ is refused .* check the credentials"):
                    content(remote, model)
            else:
                assert content(remote, model) == (directory / "partition_0.bin").read_bytes()
    assert len(asked) == 2


def test_a_checkpoint_at_an_object_store_is_read_from_there_and_then_from_the_ssd_tier(
    published: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, digest = published
    whole = (directory / "partition_0.bin").read_bytes()
    with object_store(tmp_path / "served") as endpoint:
        for name, value in s3_settings(endpoint).items():
            monkeypatch.setenv(name, value)
        with store(tmp_path / "data") as models:
            outcome = register(models, "s3://bucket/tiny")
            assert outcome.digest == digest
            assert {file.name for file in models.directory(digest).iterdir()} == {"index.json"}
            model = models.open(digest)
            with contextlib.closing(model), sources(model) as (remote,):
                assert remote.path == "s3 bucket"
                assert content(remote, model) == whole
            copy = models.ssd.begin(model, 0)
            assert copy is not None
            for number, start in enumerate(range(0, len(whole), SMALL_CHUNK)):
                copy.write(number, memoryview(whole)[start : start + SMALL_CHUNK])
            copy.finish()
            assert register(models, "s3://bucket/tiny", outcome.fingerprint).digest == ""
    with store(tmp_path / "data") as models:  # the object store is gone, the next loader has the copy
        model = models.open(digest)
        with contextlib.closing(model), sources(model) as (near, far):
            assert (near.path, far.path) == ("disk", "s3 bucket")
            assert content(near, model) == whole
        models.delete(digest)
        assert not models.ssd.copies()
        assert models.recall("s3://bucket/tiny") is None


def test_peers_come_before_object_stores_and_a_whole_local_copy_before_all(
    published: tuple[Path, str], server: RangeServer, tmp_path: Path
) -> None:
    directory, digest = published
    with store(tmp_path / "data") as models:
        outcome = register(models, f"{server.url}/tiny")
        peer = SourceRecord(f"peer://127.0.0.1:9/{digest}", "x", digest, outcome.entries)
        models.remember(peer)
        model = models.open(digest)
        with contextlib.closing(model):
            with sources(model) as found:
                assert [source.path for source in found] == ["peer 127.0.0.1:9", f"http 127.0.0.1:{server.server_port}"]
            assert register(models, str(directory)).digest == digest  # the same model, brought to this node whole
            with sources(model) as found:
                assert [source.path for source in found] == ["disk"]
                assert content(found[0], model) == (directory / "partition_0.bin").read_bytes()


def test_a_partition_that_changed_after_its_registration_is_refused(
    published: tuple[Path, str], server: RangeServer, tmp_path: Path
) -> None:
    directory, digest = published
    with store(tmp_path / "data") as models:
        before = register(models, f"{server.url}/tiny").fingerprint
        data = bytearray((directory / "partition_0.bin").read_bytes())
        data[0] ^= 1
        (directory / "partition_0.bin").write_bytes(data)
        model = models.open(digest)
        with (
            contextlib.closing(model),
            sources(model) as (remote,),
            pytest.raises(Conflict, match=r"partition_0\.bin .*has changed"),
        ):
            content(remote, model)
        assert register(models, f"{server.url}/tiny", before).digest == digest  # the index is what names the model


@pytest.mark.parametrize(
    ("harm", "error", "text"),
    [
        ("index", InvalidCheckpoint, "not a checkpoint index"),
        ("partition", CorruptCheckpoint, r"partition_0\.bin has 5 bytes"),
        ("missing", ModelNotFound, "not there"),
        ("small", CorruptCheckpoint, r"config\.json is not the file its index names"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, harm: str, error: type[Exception], text: str) -> None:
    from sllm_loaderd.convert import convert_directory
    from tests.fixtures.loaderd import numbers_model

    numbers_model(tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text('{"a": 1}')
    target = tmp_path / "served" / "tiny"
    convert_directory(tmp_path / "source", target)
    if harm == "missing":
        (target / "partition_0.bin").unlink()
    else:
        name, data = {
            "index": ("index.json", b"{}"),
            "partition": ("partition_0.bin", b"12345"),
            "small": ("config.json", b'{"a": 2}'),
        }[harm]
        (target / name).write_bytes(data)
    with range_server(tmp_path / "served") as server, store(tmp_path / "data") as models:
        with pytest.raises(error, match=text):
            register(models, f"{server.url}/tiny")
        assert not models.digests()


def test_a_deleted_model_leaves_nothing_and_takes_none_that_has_a_source_of_its_own(tmp_path: Path) -> None:
    """A conversion that stands for it goes with it, unless somebody registered that as well."""
    plain, converted = (small_checkpoint(tmp_path / str(seed), seed=seed)[0] for seed in range(2))
    with store(tmp_path / "data") as models:
        for own in (True, False):
            old, new = (register(models, str(directory)).digest for directory in (plain, converted))
            models.replace(old, new)
            models.digest_notes(old).write_text("[]")
            if not own:
                (record,) = models.sources(new)
                models._source_path(record.uri).unlink()
            models.delete(old)
            assert models.digests() == ([new] if own else [])
            assert not models.digest_notes(old).exists()
            assert not list((tmp_path / "data" / "replaced").iterdir())


def test_the_index_of_a_model_is_written_by_nobody_who_is_given_it(published: tuple[Path, str], tmp_path: Path) -> None:
    """All sandboxes have the same."""
    with store(tmp_path / "data") as models:
        digest = register(models, str(published[0])).digest
        with contextlib.closing(models.open(digest)) as model:
            with pytest.raises(PermissionError):
                os.pwrite(model.fd, b"theirs", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(model.fd, 0)
            with pytest.raises(PermissionError):
                mmap.mmap(model.fd, 1, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def test_bytes_that_came_wrong_from_elsewhere_cost_no_copy(
    published: tuple[Path, str], server: RangeServer, tmp_path: Path
) -> None:
    whole = (published[0] / "partition_0.bin").read_bytes()
    with store(tmp_path / "data") as models:
        digest = register(models, f"{server.url}/tiny").digest
        with contextlib.closing(models.open(digest)) as model:
            copy = models.ssd.begin(model, 0)
            assert copy is not None
            for number, start in enumerate(range(0, len(whole), SMALL_CHUNK)):
                copy.write(number, memoryview(whole)[start : start + SMALL_CHUNK])
            copy.finish()
            model.doubt(0, "http 127.0.0.1")
            assert models.ssd.holds(digest, 0)
            model.doubt(0, DISK)
            assert not models.ssd.holds(digest, 0)


def test_what_is_registered_again_or_stops_ends_its_reads(
    published: tuple[Path, str], server: RangeServer, tmp_path: Path
) -> None:
    """Connections to what a source was before would bring its old bytes; those of a node that stops would hold it."""
    uri = f"{server.url}/tiny"
    with store(tmp_path / "data") as models, contextlib.closing(models.open(register(models, uri).digest)) as model:
        with sources(model) as (remote,):
            content(remote, model)
            models.origins.forget(uri)
            with pytest.raises(Unavailable, match="closed"):
                content(remote, model)
        with sources(model) as (remote,):
            content(remote, model)
        models.origins.close()
        with pytest.raises(Unavailable, match="is stopping"):
            model.open_sources(0)


def test_a_model_without_any_source_left_says_so(
    published: tuple[Path, str], server: RangeServer, tmp_path: Path
) -> None:
    with store(tmp_path / "data") as models:
        register(models, f"{server.url}/tiny")
        (path,) = (tmp_path / "data" / "sources").iterdir()
        path.unlink()
        model = models.open(published[1])
        with contextlib.closing(model), pytest.raises(ModelNotFound, match="register the model again"):
            model.open_sources(0)


def test_a_source_that_is_another_model_than_its_address_says(
    published: tuple[Path, str], server: RangeServer, tmp_path: Path
) -> None:
    from sllm_loaderd.convert.remote import take_index
    from sllm_loaderd.sources.http import HttpSource

    source = HttpSource(f"{server.url}/tiny")
    with contextlib.closing(source), pytest.raises(DigestMismatch, match="not sha256:00"):
        take_index(source, source.entries(), tmp_path / "staging", "sha256:00")


def test_what_is_being_read_keeps_its_connections_however_many_other_sources_are_opened(
    published: tuple[Path, str], server: RangeServer, tmp_path: Path
) -> None:
    """A large model comes for minutes, in which adapters and small models are loaded from places of their own."""
    other = tmp_path / "served" / "bucket" / "other"
    shutil.copytree(small_checkpoint(tmp_path / "other", seed=1)[0], other)
    with store(tmp_path / "data") as models:
        large, outcome = register(models, f"{server.url}/tiny"), register(models, f"{server.url}/other")
        for number in range(64):
            models.remember(SourceRecord(f"{server.url}/other{number}", "x", outcome.digest, outcome.entries))
        with (
            contextlib.closing(models.open(large.digest)) as model,
            contextlib.closing(models.open(outcome.digest)) as small,
        ):
            with sources(model) as (remote,):
                content(remote, model)
                with sources(small):
                    pass
                content(remote, model)
            with sources(model):
                assert len(models.origins._sources) == 64, "of those that nobody reads by some went"


def test_what_cannot_be_opened_is_left_out_where_another_source_has_it(
    published: tuple[Path, str], server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy on a bad disk, a store whose credentials have gone: a load goes on by what is left."""
    whole = (published[0] / "partition_0.bin").read_bytes()
    with store(tmp_path / "data") as models:
        digest = register(models, f"{server.url}/tiny").digest
        monkeypatch.setattr(models.ssd, "open", raising(CorruptCheckpoint("the copy cannot be opened")))
        with contextlib.closing(models.open(digest)) as model:
            with sources(model) as (remote,):
                assert content(remote, model) == whole
            monkeypatch.setattr(models.origins, "_source", raising(Unavailable("no credentials")))
            with pytest.raises(CorruptCheckpoint, match="the copy cannot be opened"):
                model.open_sources(0)


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fails(*_: object, **__: object) -> NoReturn:
        raise error

    return fails


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("served", [False, True])
def test_an_index_of_another_kind_beside_a_models_weights_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bool, direct: bool
) -> None:
    """It is converted or loaded as if that file were not there, as by ``sllm model convert``."""
    from tests.fixtures.loaderd import numbers_model

    model = tmp_path / "served" / "bucket" / "model"
    numbers_model(model)
    (model / "index.json").write_text('{"pages": 3}')
    with contextlib.ExitStack() as stack:
        uri = str(model)
        if served:
            for name, value in s3_settings(stack.enter_context(object_store(tmp_path / "served"))).items():
                monkeypatch.setenv(name, value)
            uri = "s3://bucket/model"
        outcome = bring(uri, tmp_path / "staging", tmp_path / "cache", "", direct=direct)
    assert outcome.digest
    assert ("partition_0.bin" in {path.name for path in (tmp_path / "staging").iterdir()}) is not direct


def test_what_was_fetched_and_cannot_be_converted_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the room of a model, and nobody would ever look at it again."""
    from tests.fixtures.loaderd import numbers_model

    model = tmp_path / "served" / "bucket" / "model"
    numbers_model(model)
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1)
    with object_store(tmp_path / "served") as endpoint:
        for name, value in s3_settings(endpoint).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InvalidCheckpoint, match="too short"):
            bring("s3://bucket/model", tmp_path / "staging", tmp_path / "cache", "")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize("direct", [False, True])
def test_an_index_of_another_kind_beside_a_models_weights_is_none_over_http(tmp_path: Path, direct: bool) -> None:
    model = tmp_path / "served" / "model"
    numbers_model(model)
    (model / "index.json").write_text('{"pages": 3}')
    with range_server(tmp_path / "served") as server:
        outcome = bring(f"{server.url}/model", tmp_path / "staging", tmp_path / "cache", "", direct=direct)
    assert outcome.digest

"""Models of one node over a real loaderd: joined, polled, validated, removed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from sllm_invoker import models as invoker_models
from sllm_invoker.loader import Loader
from sllm_invoker.models import Models, Report
from sllm_invoker.storage import copied, remote
from sllm_loaderd.convert import convert_directory
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import CorruptCheckpoint, DeadlineExceeded, InvalidRequest, ModelNotFound, SllmError
from sllm_runtime.protocol.limits import CHUNK_BYTES
from sllm_runtime.protocol.loader import ModelInfo
from sllm_runtime.protocol.node import ModelCommand, PrepareModel, PullModel
from sllm_runtime.protocol.records import ModelRecord
from tests.fixtures.loaderd import LoaderProcess, loaderd, numbers_model
from tests.fixtures.range_server import range_server
from tests.fixtures.waiting import GIVE_UP_S, until


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[LoaderProcess]:
    async with loaderd(tmp_path, chunk_bytes=CHUNK_BYTES, pool_bytes=4 * CHUNK_BYTES, prefault_bytes=0) as process:
        yield process


@pytest.fixture
async def loader(storage: LoaderProcess) -> AsyncIterator[Loader]:
    made = Loader(storage.socket)
    tasks = Tasks("test")
    tasks.start(made.run(), "loader")
    yield made
    await made.close()
    await tasks.close()


@pytest.fixture
async def models(loader: Loader) -> AsyncIterator[Models]:
    made = Models(loader, lambda: 1.0)
    yield made
    await made.close()


async def test_a_model_is_prepared_once_for_all_who_ask(models: Models, loader: Loader, tmp_path: Path) -> None:
    numbers_model(tmp_path / "source")
    request = PrepareModel(term=1, uri=str(tmp_path / "source"), wait_s=30.0)
    quick = await models.prepare(PrepareModel(term=1, uri=request.uri, wait_s=0.0))
    assert quick.model is None
    assert quick.progress is not None
    one, two = await asyncio.gather(models.prepare(request), models.prepare(request))
    assert one.model is not None
    assert one.model == two.model
    assert one.model.uri == request.uri
    assert sum(one.model.partitions) == one.model.nbytes
    await until(lambda: loader.status and one.model and loader.status.models == (one.model.digest,), what="it is there")
    again = await models.prepare(request)
    assert again.model == one.model

    digest = one.model.digest
    assert (await models.command(ModelCommand(term=1, verb="validate", digest=digest))).note == "validated"
    assert (await models.command(ModelCommand(term=1, verb="delete", digest=digest))).note == "deleted"
    await until(lambda: loader.status and not loader.status.models, what="it is gone")


async def test_how_a_check_ended_is_not_kept_for_ever(
    models: Models, storage: LoaderProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that nobody asked for in time: what is there by then is read anew."""
    numbers_model(tmp_path / "source")
    reply = await models.prepare(PrepareModel(term=1, uri=str(tmp_path / "source"), wait_s=GIVE_UP_S))
    assert reply.model is not None
    check = ModelCommand(term=1, verb="validate", digest=reply.model.digest, wait_s=0.0)
    monkeypatch.setattr(invoker_models, "RESULT_S", 0.01)
    with pytest.raises(DeadlineExceeded):
        await models.command(check)
    await until(lambda: not models._commands, what="it is forgotten")
    (partition,) = storage.model_directory(reply.model.digest).glob("partition_*.bin")
    with partition.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\x00\xff")
    with pytest.raises(CorruptCheckpoint):
        await models.command(msgspec.structs.replace(check, wait_s=GIVE_UP_S))


async def test_a_model_that_nobody_waited_for_is_asked_for_anew(models: Models, loader: Loader, tmp_path: Path) -> None:
    """Its asker gave up, and its source was trained on meanwhile: what was there before is no answer."""
    numbers_model(tmp_path / "source")
    request = PrepareModel(term=1, uri=str(tmp_path / "source"), wait_s=0.0)
    assert (await models.prepare(request)).model is None
    await until(lambda: loader.status and loader.status.models, what="it is there")
    await until(lambda: not models._registrations, what="nothing of it is kept")
    assert loader.status is not None
    (before,) = loader.status.models
    numbers_model(tmp_path / "source", seed=1)
    reply = await models.prepare(msgspec.structs.replace(request, wait_s=GIVE_UP_S))
    assert reply.model is not None
    assert reply.model.digest != before


async def test_why_a_model_is_not_there_is_kept_for_a_while(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = PrepareModel(term=1, uri=str(tmp_path / "source"), wait_s=0.0)
    await models.prepare(request)
    (entry,) = models._registrations.values()
    monkeypatch.setattr(invoker_models, "RESULT_S", 0.01)
    await asyncio.wait({entry.task}, timeout=GIVE_UP_S)
    with pytest.raises(SllmError, match="source"):
        await models.prepare(request)
    await models.prepare(request)
    await until(lambda: not models._registrations, what="it is forgotten")


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[Path, ModelRecord]]:
    """A checkpoint that a server has, and its record."""
    numbers_model(tmp_path / "original")
    directory = tmp_path / "served" / "checkpoint"
    directory.parent.mkdir()
    digest = convert_directory(tmp_path / "original", directory)
    nbytes = (directory / "partition_0.bin").stat().st_size
    with range_server(directory.parent) as server:
        yield directory, ModelRecord(digest=digest, uri=f"{server.url}/checkpoint", nbytes=nbytes, partitions=(nbytes,))


async def test_a_model_is_pulled_to_the_disk_of_a_node_that_never_had_it(
    published: tuple[Path, ModelRecord], storage: LoaderProcess, loader: Loader, models: Models
) -> None:
    directory, model = published
    request = PullModel(term=1, model=model, wait_s=GIVE_UP_S)
    one, two = await asyncio.gather(models.pull(request), models.pull(request))
    assert one.model == two.model == model
    (copy,) = (storage.data / "ssd").glob("*.bin")
    assert copy.read_bytes() == (directory / "partition_0.bin").read_bytes()
    await until(
        lambda: loader.status and copied(loader.status) == {model.digest: model.nbytes}, what="the node says so"
    )
    assert loader.status
    assert remote(loader.status) == ()
    await loader.keep([model.digest])


async def test_what_fails_is_told_and_tried_again_when_asked_again(
    models: Models, storage: LoaderProcess, tmp_path: Path
) -> None:
    request = PrepareModel(term=1, uri=str(tmp_path / "source"), wait_s=30.0)
    with pytest.raises(SllmError, match="source"):
        await models.prepare(request)
    numbers_model(tmp_path / "source")
    reply = await models.prepare(request)
    assert reply.model is not None
    (partition,) = storage.model_directory(reply.model.digest).glob("partition_*.bin")
    with partition.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\x00\xff")
    with pytest.raises(CorruptCheckpoint):
        await models.command(ModelCommand(term=1, verb="validate", digest=reply.model.digest))
    with pytest.raises(InvalidRequest, match="'polish'"):
        await models.command(ModelCommand(term=1, verb="polish", digest=reply.model.digest))


class Deleted:
    """A store from which a model is deleted while it comes, and that has it the next time."""

    def __init__(self) -> None:
        self.asked = 0
        self.gone = asyncio.Event()

    async def register(self, uri: str, digest: str, report: Report) -> ModelInfo:
        raise NotImplementedError

    async def validate(self, digest: str) -> None: ...

    async def pull(self, model: ModelRecord, report: Report) -> None:
        self.asked += 1
        if self.asked == 1:
            await self.gone.wait()
            raise ModelNotFound("it was deleted while it came")

    async def delete(self, digest: str) -> None:
        self.gone.set()


@pytest.mark.parametrize("ended", [True, False])
async def test_who_asks_after_a_model_was_deleted_is_not_told_of_that(ended: bool) -> None:
    """``ended``: its coming has, when the delete is answered."""
    store = Deleted()
    models = Models(store, lambda: 1.0)
    model = ModelRecord(digest="sha256:1", uri="/m", nbytes=1, partitions=(1,))
    pull = PullModel(term=1, model=model, wait_s=0.0)
    assert (await models.pull(pull)).model is None
    if ended:
        store.gone.set()
        (entry,) = models._registrations.values()
        await asyncio.wait({entry.task})
    await models.command(ModelCommand(term=1, verb="delete", digest=model.digest))
    assert (await models.pull(msgspec.structs.replace(pull, wait_s=GIVE_UP_S))).model == model
    assert store.asked == 2
    await models.close()

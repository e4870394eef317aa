"""The base image is made once for each state of the installation, by one process of this machine at a time."""

import asyncio
import os
import sys
import tarfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from sllm_invoker.images import base, places
from sllm_invoker.images.base import Base
from sllm_runtime.protocol.errors import Unavailable
from tests.fixtures.waiting import GIVE_UP_S, until

PRODUCER = """
import sys, io, json, tarfile
if sys.argv[1] == "digests":
    print(json.dumps({"system": "a" * 64, "base": "b" * 64, "python": "3.11", "library_path": True}))
else:
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
        tar.addfile(tarfile.TarInfo(sys.argv[1]))
"""


class Store:
    """An engine's image store as a record of what it was asked; the engine itself is in the tests that need one."""

    def __init__(self) -> None:
        self.images: dict[str, object] = {}
        self.built = asyncio.Event()
        """Cleared by who wants builds to take until it is set."""
        self.built.set()

    async def has_image(self, reference: str) -> bool:
        return reference in self.images

    async def identity(self, reference: str) -> str:
        return reference if reference in self.images else ""

    async def import_image(self, reference: str, archive: Path, changes: Sequence[str]) -> None:
        assert reference not in self.images
        self.images[reference] = (names_in(archive), tuple(changes))

    async def build_image(self, reference: str, context: Path) -> None:
        assert reference not in self.images
        await self.built.wait()
        self.images[reference] = described(context)

    async def prune(self) -> None:
        raise Unavailable("an image is in use")


def names_in(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return tar.getnames()


def described(context: Path) -> tuple[str, list[str]]:
    assert {path.name for path in context.iterdir()} == {places.CONTAINERFILE, base.LAYER}
    return (context / places.CONTAINERFILE).read_text(), names_in(context / base.LAYER)


@pytest.fixture
def producer(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "producer.py"
    path.write_text(PRODUCER)
    return (sys.executable, str(path))


def test_a_containerfile_adds_one_layer_and_keeps_the_configuration() -> None:
    assert places.over("localhost/sllm-system:aa", "layer.tar", "base") == (
        "FROM localhost/sllm-system:aa\nADD layer.tar /\nLABEL sllm.image=base\n"
    )


def test_a_container_of_the_base_is_nobody() -> None:
    assert places.configuration("system", library_path=False) == (
        "ENV PATH=/opt/sllm/bin:/usr/bin:/bin", "ENV HOME=/tmp", "ENV LANG=C.UTF-8",
        "USER 65534:65534", "WORKDIR /tmp", "LABEL sllm.image=system",
    )  # fmt: skip
    assert "ENV LD_LIBRARY_PATH=/opt/python/lib" in places.configuration("system", library_path=True)


async def test_it_is_made_of_two_layers_once_however_many_ask(tmp_path: Path, producer: tuple[str, ...]) -> None:
    store, scratch = Store(), tmp_path / "images"
    told: list[str] = []
    nodes = [Base(store, scratch, {}, producer) for _ in range(3)]

    def tell(step: str) -> None:
        told.append(step)
        if len(told) == 4:
            store.built.set()  # now that the others wait

    store.built.clear()
    async with asyncio.timeout(GIVE_UP_S):
        names = await asyncio.gather(*(node.ensure(tell) for node in nodes))
    reference, system = f"localhost/sllm-base:{'b' * 32}", f"localhost/sllm-system:{'a' * 32}"
    assert set(names) == {reference}
    assert set(store.images) == {reference, system}
    assert store.images[system] == (["system"], places.configuration("system", library_path=True))
    assert store.images[reference] == (places.over(system, base.LAYER, "base"), ["ours"])
    assert [step for step in told if "waited for" not in step] == ["base: interpreter and packages", "base: worker"]
    assert len(told) == 4, told  # who waits for another's work is told so
    assert [path.name for path in scratch.iterdir()] == ["lock"]


async def test_only_ours_is_made_anew_when_only_ours_has_changed(tmp_path: Path, producer: tuple[str, ...]) -> None:
    store = Store()
    told: list[str] = []
    store.images[f"localhost/sllm-system:{'a' * 32}"] = "there"
    await Base(store, tmp_path / "images", {}, producer).ensure(told.append)
    assert told == ["base: worker"]


async def test_what_cannot_be_listed_is_told_with_its_last_words(tmp_path: Path) -> None:
    broken = (sys.executable, "-c", "import sys; sys.exit('no distribution named sllm')")
    with pytest.raises(Unavailable, match="no distribution named sllm"):
        await Base(Store(), tmp_path, {}, broken).ensure()


async def test_a_program_that_does_not_end_is_ended() -> None:
    with pytest.raises(Unavailable, match="took more than"):
        await base.output((sys.executable, "-c", "import time; time.sleep(3600)"), {}, 0.2)


@pytest.fixture
async def mute() -> AsyncIterator[str]:
    """The address of an index that says nothing."""
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
        yield "http://{}:{}/simple".format(*server.sockets[0].getsockname())


async def test_a_program_that_is_ended_leaves_no_files(tmp_path: Path, mute: str) -> None:
    """pip has put gigabytes there when a deployment is given up, or its time is over."""
    env = {**os.environ, "TMPDIR": str(tmp_path), "PIP_INDEX_URL": mute}
    asking = asyncio.create_task(base.output((*base.PRODUCER, "requirements", "flask-that-nobody-has"), env, 1000.0))
    await until(lambda: any(tmp_path.rglob("constraints.txt")), what="pip is asked")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert os.listdir(tmp_path) == []

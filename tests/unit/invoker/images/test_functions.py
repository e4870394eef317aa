"""A function's image: which one, made once, and what is said where it cannot be."""

import asyncio
import sys
from pathlib import Path

import pytest

from sllm_invoker.images import base, places
from sllm_invoker.images.base import Base
from sllm_invoker.images.functions import FunctionImages
from sllm_runtime.protocol.errors import ImageFailed
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.invoker.images.test_base import PRODUCER, Store

MADE = f"localhost/sllm-base:{'b' * 32}"


@pytest.fixture
def store() -> Store:
    found = Store()
    found.images[MADE] = "there"
    return found


@pytest.fixture
def images(store: Store, tmp_path: Path) -> FunctionImages:
    program = tmp_path / "producer.py"
    program.write_text(PRODUCER)
    producer = (sys.executable, str(program))
    return FunctionImages(store, Base(store, tmp_path / "images", {}, producer), tmp_path / "images", {}, producer)


async def test_one_that_asks_for_nothing_has_the_base(images: FunctionImages) -> None:
    assert await images.ensure(None, ()) == MADE


async def test_requirements_are_one_layer_over_it_made_once_in_whatever_order(
    images: FunctionImages, store: Store
) -> None:
    told: list[str] = []
    asked = (["flask>=3", "Jinja2"], ["jinja2", "flask>=3"], ["flask>=3", "jinja2"])

    def tell(step: str) -> None:
        told.append(step)
        if len(told) == len(asked):
            store.built.set()  # now that the others wait

    store.built.clear()
    async with asyncio.timeout(GIVE_UP_S):
        (reference,) = set(await asyncio.gather(*(images.ensure(None, each, tell) for each in asked)))
    assert reference.startswith(f"{places.REPOSITORY}-function:")
    assert store.images[reference] == (places.over(MADE, base.LAYER, "function"), ["requirements"])
    assert told.count("requirements: flask>=3, jinja2") == 1
    assert [step for step in told if "waited for" in step] == told[1:] != []  # who waits for that is told so
    assert await images.ensure(None, ["flask>=4"]) != reference


async def test_an_image_that_is_named_is_on_the_node_or_refused(images: FunctionImages, store: Store) -> None:
    store.images["example/mine:1"] = "there"
    assert await images.ensure("example/mine:1", ()) == "example/mine:1"
    for name in ("example/other:1", "--all"):
        with pytest.raises(ImageFailed, match="is not on this node"):
            await images.ensure(name, ())
    with pytest.raises(ImageFailed, match="do not go together"):
        await images.ensure("example/mine:1", ["flask"])


async def test_a_name_that_is_not_here_is_not_by_chance_how_another_images_id_begins(
    images: FunctionImages, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """podman finds an image by two digits of its id."""
    digits = "ada58222ebbec39b5b7eae66360af76953279dc57066a69a91ff542531997b73"
    store.images["cafe"] = "there"

    async def by_any_digits(name: str) -> str:
        return digits if digits.startswith(name) else await Store.identity(store, name)

    monkeypatch.setattr(store, "identity", by_any_digits)
    assert await images.ensure(digits[:12], ()) == digits
    assert await images.ensure("cafe", ()) == "cafe"
    with pytest.raises(ImageFailed, match="is not on this node"):
        await images.ensure("ada", ())


async def test_what_our_program_refuses_is_told_as_it_is(store: Store, tmp_path: Path) -> None:
    made = Base(store, tmp_path / "images", {}, (sys.executable, "-c", PRODUCER))
    images = FunctionImages(store, made, tmp_path / "images", {})
    with pytest.raises(ImageFailed, match="is an address") as told:
        await base.output((*base.PRODUCER, "requirements", "evil @ file:///etc"), {}, 120.0)
    assert told.value.field == "requirements"
    assert await images.ensure(None, ()) == MADE

"""What a start has to do with images: asked for where there are some, and by a Python that can read the function."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from sllm_invoker.preparation import check_python, image_of
from sllm_runtime.protocol.errors import ImageFailed, PythonMismatch
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.timeline import SANDBOX
from tests.fixtures.invoker import order


class Given:
    """Images that are there, or not to be had."""

    async def ensure(self, image: str | None, requirements: Sequence[str], report: Callable[[str], None]) -> str:
        if "evil" in requirements:
            raise ImageFailed("pip could not install evil")
        report("requirements: " + " ".join(requirements))
        return image or "made"


async def test_an_image_is_made_for_who_asks_for_one_and_says_how_far_it_is() -> None:
    told: list[Progress] = []
    assert await image_of(order(), Given(), told.append) == ""
    assert await image_of(order(image="mine:1"), Given(), lambda _: None) == "mine:1"
    assert await image_of(order(requirements=["flask"]), Given(), told.append) == "made"
    assert told == [Progress(stage=SANDBOX, message="requirements: flask")]
    for failing, images in ((order(requirements=["evil"]), Given()), (order(image="mine:1"), None)):
        with pytest.raises(ImageFailed) as error:
            await image_of(failing, images, told.append)
        assert error.value.stage == SANDBOX


def test_an_image_whose_python_cannot_read_the_function_is_refused() -> None:
    plain = order(image="mine:1")
    handler = plain.manifest.handler.model_copy(update={"python": "3.11"})
    pickled = msgspec.structs.replace(plain, manifest=plain.manifest.model_copy(update={"handler": handler}))
    check_python(pickled, "3.11.7")
    check_python(plain, "3.9.1")
    with pytest.raises(
        PythonMismatch, match=r"pickled by Python 3\.11, image mine:1 runs 3\.12: take one with Python 3\.11"
    ):
        check_python(pickled, "3.12.1")

"""The commands by which an image comes to be in an engine's store: golden, for both engines."""

from pathlib import Path

import pytest

from sllm_invoker.images.store import Store
from sllm_runtime.protocol.errors import Unavailable


class Recorded:
    """A command line that writes down what it is given, and says ``answer``."""

    def __init__(self, kind: str, answer: str = "") -> None:
        self.kind, self.answer = kind, answer
        self.words: list[tuple[str, ...]] = []

    async def command(self, *words: str, data: bytes | None = None, within_s: float = 60.0) -> str:
        self.words.append(words)
        return self.answer


async def test_an_image_is_there_when_the_engine_names_it() -> None:
    assert await Store(Recorded("podman", "cf36bd176997\n")).has_image("localhost/sllm-base:aa")
    nothing = Recorded("docker", "")
    assert not await Store(nothing).has_image("localhost/sllm-base:aa")
    assert nothing.words == [("images", "--quiet", "localhost/sllm-base:aa")]


async def test_an_image_may_be_named_by_its_digest() -> None:
    """Which podman lists nothing by."""
    here, other = "registry.example/mine@sha256:aa", "registry.example/mine@sha256:ab"
    podman = Recorded("podman", "[registry.example/mine@sha256:ff registry.example/mine@sha256:aa]\n[]\n")
    assert await Store(podman).has_image(here)
    assert not await Store(podman).has_image(other)
    assert podman.words == [("images", "--format", "{{.RepoDigests}}", "registry.example/mine")] * 2
    docker = Recorded("docker", "cf36bd176997\n")
    assert await Store(docker).has_image(here)
    assert docker.words == [("images", "--quiet", here)]


class Refusing(Recorded):
    async def command(self, *words: str, data: bytes | None = None, within_s: float = 60.0) -> str:
        raise Unavailable(self.answer)


@pytest.mark.parametrize(
    "said",
    ["Error: inspecting object: mine: image not known", "Error: No such image: mine:latest"],
)
async def test_what_the_engine_does_not_know_has_no_identity(said: str) -> None:
    assert await Store(Refusing("podman", said)).identity("mine") == ""
    with pytest.raises(Unavailable, match="locked"):
        await Store(Refusing("podman", "its store is locked")).identity("mine")


async def test_what_is_removed_is_ours_old_and_unused() -> None:
    engine = Recorded("podman")
    await Store(engine).prune()
    filters = ("--filter", "label=sllm.image", "--filter", "until=168h", "--filter", "reference=localhost/sllm-*")
    assert engine.words == [("image", "prune", "--all", "--force", *filters)]


@pytest.mark.parametrize("kind", ["podman", "docker"])
async def test_an_import_carries_the_configuration(kind: str) -> None:
    engine = Recorded(kind)
    await Store(engine).import_image("localhost/a:b", Path("/tmp/a.tar"), ("USER 65534", "WORKDIR /tmp"))
    expected = ("import", "--change", "USER 65534", "--change", "WORKDIR /tmp", "/tmp/a.tar", "localhost/a:b")
    assert engine.words == [expected]


@pytest.mark.parametrize(("kind", "local"), [("podman", ("--pull=never",)), ("docker", ())])
async def test_a_build_has_no_network_and_no_registry(kind: str, local: tuple[str, ...]) -> None:
    engine = Recorded(kind)
    await Store(engine).build_image("localhost/a:b", Path("/tmp/c"))
    assert engine.words == [
        ("build", "--quiet", *local, "--network", "none", "--tag", "localhost/a:b", "--file", "/tmp/c/Containerfile",
         "/tmp/c")
    ]  # fmt: skip

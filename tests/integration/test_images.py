"""A function with requirements, from its deployment to its call, in containers of a layer that pip made."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from sllm_invoker.containers import probe
from sllm_invoker.containers.engine import Engine
from sllm_invoker.images.functions import FunctionImages
from sllm_invoker.images.store import Store
from sllm_runtime.protocol.errors import ImageFailed
from tests.fixtures.cluster import Cluster
from tests.fixtures.command import here
from tests.fixtures.containers import call, ids, images
from tests.fixtures.deployed import client_of, deploy, wait, worker_of
from tests.fixtures.waiting import GIVE_UP_S
from tests.fixtures.wheels import only, wheel

pytestmark = [pytest.mark.container, pytest.mark.slow, pytest.mark.timeout(1500)]
# Where no node of this machine has made it yet, the base image is made first.

GREETS = """
from sllm import model_function

@model_function(memory="128MiB", cpu=0.1)
def greets() -> str:
    import greeting
    return f"{greeting.version} {greeting.__file__}"
"""


READS = """
import os
import sllm

@sllm.model_function(memory="128MiB", cpu=0.1, secrets=["token"])
def reads() -> list[str]:
    place = os.environ["SLLM_SECRETS_DIR"]
    return [sllm.secret("token"), place, oct(os.stat(place + "/token").st_mode & 0o777)]
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    wheel(directory, "greeting", "1.0", "msgspec>=0.1")
    return directory


@pytest.fixture(scope="module")
def cluster(engine: Engine, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    asked = {"SLLM_SANDBOX": engine.kind, "SLLM_REQUIRE_ISOLATION": "true", "SLLM_POOL_SIZE": "1", **only(wheels)}
    asked["HTTPS_PROXY"] = "http://somebody:hunter2@proxy.invalid"  # whoever runs the node may need one
    with Cluster(tmp_path_factory.mktemp("platform"), env=asked) as running:
        yield running


@pytest.fixture(scope="module")
def greets(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("function") / "function.py"
    file.write_text(GREETS)
    return os.fspath(file)


def test_requirements_are_there_when_the_function_is_called(cluster: Cluster, greets: str) -> None:
    deploy(cluster, greets, name="greets", requirements=["Greeting >= 1"], startup_timeout=300)
    with client_of(cluster) as client:
        said = client.call("greets", {})
    assert said == "1.0 /opt/sllm/lib/python{}.{}/site-packages/greeting.py".format(*sys.version_info)


def test_the_next_start_of_an_image_takes_the_container_that_waits(
    cluster: Cluster, engine: Engine, greets: str
) -> None:
    """Also when it is another function's: nothing of a function is in it."""

    def waiting() -> set[str]:
        return {name for name, image in images(cluster, engine).items() if image == own and name != at_work}

    asked = {"requirements": ["greeting"], "startup_timeout": 300, "keep_alive": 3600}
    deploy(cluster, greets, name="one", **asked)
    at_work = container_of(cluster, engine, "one")
    own = images(cluster, engine)[at_work]
    wait(waiting, "another one is there beside it")
    there = waiting()
    deploy(cluster, greets, name="two", **asked)
    assert {container_of(cluster, engine, "two")} == there
    assert call(cluster, "two") == call(cluster, "one")


def container_of(cluster: Cluster, engine: Engine, function: str) -> str:
    """The name of the container that the function's only instance runs in."""
    group = Path(f"/proc/{worker_of(cluster, function)}/cgroup").read_text()
    (name,) = [name for name, number in ids(cluster, engine).items() if number in group]
    return name


def test_secrets_lie_in_the_containers_own_memory(cluster: Cluster, engine: Engine, tmp_path: Path) -> None:
    value = tmp_path / "value"
    value.write_text("hunter2-of-this-test")
    here(cluster.env, "secret", "set", "token", "--file", str(value))
    file = tmp_path / "reads" / "function.py"
    file.parent.mkdir()
    file.write_text(READS)
    deploy(cluster, os.fspath(file), name="reads", startup_timeout=300)
    with client_of(cluster) as client:
        assert client.call("reads", {}) == ["hunter2-of-this-test", "/tmp/instance/secrets", "0o400"]
    assert not any(b"hunter2" in path.read_bytes() for path in (cluster.data / "nodes").rglob("*") if path.is_file())
    name, worker = container_of(cluster, engine, "reads"), Path(f"/proc/{worker_of(cluster, 'reads')}")
    told = [(worker / file).read_bytes() for file in ("environ", "cmdline")]
    for words in (("inspect", name), ("logs", name)):
        done = subprocess.run([*engine.words, *words], capture_output=True, check=True, timeout=GIVE_UP_S)
        told.append(done.stdout + done.stderr)
    assert all(each.count(b"hunter2") == 0 for each in told)
    assert not any(word in told[0] + told[2] for word in (b"SLLM_TOKEN", b"PIP_", b"_proxy", b"_PROXY"))


def test_what_pip_cannot_have_fails_the_deployment_with_its_words(cluster: Cluster, greets: str) -> None:
    with pytest.raises(ImageFailed, match=r"pip could not install politeness[\s\S]*No matching distribution"):
        deploy(cluster, greets, name="polite", requirements=["politeness"])
    with pytest.raises(ImageFailed, match="is not on this node"):
        deploy(cluster, greets, name="elsewhere", image="example.invalid/nobody:1")


async def test_an_image_is_there_when_the_engine_would_run_it(engine: Engine) -> None:
    store, (name, _, tag) = Store(engine), probe.TRIAL.rpartition(":")
    there = await store.identity(f"{name}:{tag}")
    assert await store.identity(there) == there != ""
    assert await store.identity(name) == "", "that is its tag `latest`, which nobody gave"
    assert await store.identity("localhost/sllm-*") == ""
    images = FunctionImages(store, cast(Any, None), Path("/nowhere"), {})
    for words in (there, f"sha256:{there.removeprefix('sha256:')}", there.removeprefix("sha256:")[:12]):
        assert await images.ensure(words, ()) == there
    for words in ("Mine:1", name, "localhost/sllm-*"):
        with pytest.raises(ImageFailed, match="is not on this node"):
            await images.ensure(words, ())


async def test_what_somebody_has_built_over_our_image_is_not_removed_as_ours(engine: Engine, tmp_path: Path) -> None:
    """It has our label, and most likely no container just now."""
    test = f"sllm.test={uuid.uuid4().hex}"
    base, own = (f"localhost/{name}:{uuid.uuid4().hex}" for name in ("sllm-base", "somebodys"))
    old = ("--pull=never", "--timestamp=0") if engine.kind == "podman" else ()
    if not old:
        pytest.skip("docker builds no image that is old")

    class Ours:
        """Of all images those of this test alone."""

        kind = engine.kind

        async def command(self, *words: str, data: bytes | None = None, within_s: float = 60.0) -> str:
            return await engine.command(*words, "--filter", f"label={test}", within_s=within_s)

    for name, text in ((base, f"FROM {probe.TRIAL}\nLABEL sllm.image=base {test}\n"), (own, f"FROM {base}\nENV A=b\n")):
        (tmp_path / "Containerfile").write_text(text)
        await engine.command("build", *old, "--tag", name, str(tmp_path))
    store = Store(engine)
    try:
        await Store(Ours()).prune()
        assert await store.has_image(own)
        await engine.command("image", "rm", own)
        await Store(Ours()).prune()
        assert not await store.has_image(base)
    finally:
        for name in (own, base):
            if await store.has_image(name):
                await engine.command("image", "rm", name)

"""What several modules of integration tests deploy, and what they run it in."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from sllm_invoker.containers import probe
from sllm_invoker.containers.engine import Engine
from sllm_invoker.images.base import Base
from sllm_invoker.images.store import Store
from tests.fixtures.command import sllm

CODER = Path(__file__).parents[2] / "functions" / "coder"


@pytest.fixture(scope="session")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``functions/coder`` with its model converted once, for tests that are about something else; those of conversion
    deploy ``functions/coder`` as it is."""
    place = tmp_path_factory.mktemp("functions") / "coder"
    shutil.copytree(CODER, place, ignore=shutil.ignore_patterns("model"))
    # In a process of its own: what torch leaves in TMPDIR is not the tests'.
    sllm({**os.environ, "TMPDIR": str(place.parent)}, "model", "convert", str(CODER / "model"), str(place / "model"))
    return place


@pytest.fixture(scope="session")
def engine() -> Engine:
    """A container engine that works here, SLLM_TEST_ENGINE's where that is set: for tests that are marked so."""
    named: dict[str, probe.Wanted] = {"podman": "podman", "docker": "docker"}
    return asyncio.run(probe.find(named.get(os.environ.get("SLLM_TEST_ENGINE", ""), "auto")))


@pytest.fixture(scope="session")
def image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The base image. Where no node of this machine has made it yet it is made first."""
    return asyncio.run(Base(Store(engine), tmp_path_factory.mktemp("image"), dict(os.environ)).ensure())

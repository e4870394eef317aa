"""What several modules of integration tests deploy."""

import os
import shutil
from pathlib import Path

import pytest

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

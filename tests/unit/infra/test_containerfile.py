"""The base image's Containerfile: what no build on this machine could show, since nothing is fetched by a test."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LINES = (ROOT / "infra" / "image" / "Containerfile").read_text().replace("\\\n", " ").splitlines()


def words(instruction: str) -> list[list[str]]:
    return [line.split()[1:] for line in LINES if line.startswith(f"{instruction} ")]


def test_what_it_is_made_over_is_named_by_its_digest() -> None:
    (base,) = [each[0] for each in words("ARG") if each[0].startswith("BASE=")]
    pinned = re.fullmatch(r"BASE=docker\.io/library/python:(\d+\.\d+)-slim-\w+@sha256:[0-9a-f]{64}", base)
    assert pinned, base
    assert [each[0] for each in words("FROM")] == ["${BASE}", "${BASE}"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {pinned[1]}" in project["classifiers"]


def test_its_functions_are_nobody_and_find_its_python_first() -> None:
    assert words("USER") == [["65534:65534"]]
    assert words("ENV")[-1][0].startswith("PATH=/opt/sllm/bin:")


@pytest.mark.slow
def test_what_is_copied_is_all_that_the_wheel_needs(tmp_path: Path) -> None:
    context = tmp_path / "src"
    context.mkdir()
    for *sources, target in (each for each in words("COPY") if not each[0].startswith("--from")):
        for source in sources:
            subprocess.run(["cp", "-r", ROOT / source, context / target], check=True)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=context, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sllm_runtime/worker/container.py" in names
    assert any(name.startswith("sllm/templates/") for name in names)

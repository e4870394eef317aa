"""What `pip install sllm` brings: every room's code, and of the libraries only what a client needs."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.build.stage import ROOT

BUILD_SECONDS = 60
HEAVY = {"torch", "transformers", "nats", "numpy", "starlette", "uvicorn", "psutil", "boto3"}

# Imports every module of the SDK from the wheel, with everything but the client's own libraries out of reach.
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
heavy = set(sys.argv[2].split(","))
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            raise ImportError(f"{name} is no library of the client")
sys.meta_path.insert(0, Refuse())
import sllm
assert sllm.__file__.startswith(sys.argv[1]), sllm.__file__
names = [m.name for m in pkgutil.walk_packages(sllm.__path__, "sllm.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, built as `make dist` does."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """The wheel."""
    return next(dist.glob("*.whl"))


def client_closure() -> set[str]:
    """Every distribution that `pip install sllm` pulls in, by canonical name."""
    seen: set[str] = set()
    waiting = ["sllm"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in requires(name) or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(need.name))
    return seen


def test_wheel_holds_every_room_with_its_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("sllm_runtime", "sllm_gateway", "sllm_invoker", "sllm_loaderd", "sllm"):
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= names


def test_wheel_holds_no_tests_and_no_caches(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if "__pycache__" in name or name.startswith(("tests/", "benchmarks/"))] == []


def test_wheel_holds_the_templates(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    ours = [path.relative_to(ROOT) for path in (ROOT / "templates").rglob("*.py") if "__pycache__" not in path.parts]
    assert ours
    assert {f"sllm/{path}" for path in ours} <= set(names)


def test_source_archive_holds_what_setup_needs(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.sh", "Makefile", "constraints.txt", "tools/install_torch.py", ".ci/run"} <= names
    assert {name for name in names if name.startswith((".venv", ".git/"))} == set()


def test_client_pulls_in_nothing_heavy() -> None:
    assert client_closure() & {"torch", "transformers", "nats-py", "numpy", "starlette", "uvicorn", "boto3"} == set()


def test_every_module_of_the_sdk_imports_without_the_servers_libraries(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    command = [sys.executable, "-c", IMPORT_ALL, str(tmp_path), ",".join(HEAVY)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_is_built_runs_a_platform_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows this one's libraries and programs: their ``.pth`` files, and so the
    repository, are not followed there."""
    place = tmp_path / "env"
    venv.create(place)
    python = str(place / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, timeout=BUILD_SECONDS, capture_output=True)
    (libraries,) = place.glob("lib/python*/site-packages")
    (libraries / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLLM_", "PYTHON"))}
    env = {**kept, "SLLM_HOME": str(tmp_path / "home"), "SLLM_PRELOAD": "engine", "TMPDIR": str(tmp_path)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])

    def sllm(*words: str) -> str:
        command = [str(place / "bin/sllm"), *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    origin = [python, "-c", "import sllm_runtime.control as one, sllm as two; print(one.__file__, two.__file__)"]
    where = subprocess.run(origin, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert all(file.startswith(str(libraries)) for file in where.stdout.split()), where.stdout
    sllm("fn", "init", "hello")
    sllm("up", "--detach", "--port", "0")
    try:
        sllm("fn", "deploy", "hello/function.py")
        assert "world" in sllm("fn", "invoke", "hello", "name=world")
    finally:
        sllm("down")


def test_constraints_pin_every_library_that_is_named_in_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    named = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in ("server", "worker", "dev"):
        named += extras[extra]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(line.partition("==")[0]): line for line in lines if "==" in line}
    wanted = {canonicalize_name(Requirement(line).name): Requirement(line) for line in named}
    assert wanted.keys() - pins.keys() == set()
    for name, requirement in wanted.items():
        assert requirement.specifier.contains(pins[name].partition("==")[2]), pins[name]
    assert [line for line in named if "==" in line.partition(";")[0]] == [], "exact pins stand in constraints.txt only"

"""The archives that machines of the cloud install from: every wheel they need, and the same each time."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.fixtures.wheels import only, wheel
from tests.unit.build.stage import ROOT
from tools import artifact
from tools.artifact import Wheel, needed

SECONDS = 120


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels in the shape of ours: torch, what only it needs, and what it shares with others."""
    folder = tmp_path_factory.mktemp("index")
    extras = ("server", "worker", "cuda")
    needs = ("web ; extra == 'server'", "torch ; extra == 'worker'", "shared ; extra == 'worker'")
    cuda = ("driver[all] ; extra == 'cuda'",)
    wheel(folder, "sllm", "1.0", "base", *needs, *cuda, extras=extras)
    wheel(folder, "torch", "2.11", "cudalibs", "shared")
    wheel(folder, "driver", "1.0", "more ; extra == 'all'", "elsewhere ; sys_platform == 'win32'", extras=("all",))
    for name in ("base", "web", "shared", "cudalibs", "more", "pip"):
        wheel(folder, name, "1.0")
    wheel(folder, "web", "2.0")
    return folder


def pack(index: Path, archive: Path, kind: str, *words: str) -> subprocess.CompletedProcess[str]:
    constraints = archive.with_name("constraints.txt")
    constraints.write_text("web==1.0\n")
    own = ["--wheel", str(index / "sllm-1.0-py3-none-any.whl"), "--constraints", str(constraints)]
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/artifact.py"), kind, str(archive), *own, *words],
        env={"PATH": "/usr/bin:/bin", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **only(index)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as tar:
        return {name.rsplit("-py3", 1)[0] for name in tar.getnames()}


SERVER = {"sllm-1.0", "base-1.0", "web-1.0", "pip-1.0"}
NODE = SERVER | {"shared-1.0", "driver-1.0", "more-1.0"}


def test_what_only_torch_needs_stays_out_with_it() -> None:
    def one(name: str, *requires: str) -> Wheel:
        return Wheel(name, "1.0", "", requires)

    wheels = {
        each.name: each
        for each in (
            one("sllm", "torch; extra == 'worker'", "nats[keys]", "other; python_version < '3'"),
            one("torch", "cudalibs", "shared"),
            one("nats", "nkeys; extra == 'keys'", "aio; extra == 'aio'", "shared"),
            *map(one, ("cudalibs", "shared", "nkeys", "aio", "other")),
        )
    }
    here = {"python_version": "3.12"}
    assert needed(wheels, ["sllm"], here) == {"sllm", "nats", "nkeys", "shared"}
    every = {"sllm", "torch", "cudalibs", "nats", "nkeys", "shared"}
    assert needed(wheels, ["sllm[worker]"], here) == every
    assert needed(wheels, ["sllm[worker]"], here, without="torch") == every - {"torch", "cudalibs"}


def test_the_same_wheels_make_the_same_archive(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    for order in (("one", "b"), ("one", "a"), ("two", "a"), ("two", "b")):
        (tmp_path.joinpath(*order)).write_text(order[1])
    artifact.pack(tmp_path / "one", tmp_path / "one.tar.gz")
    artifact.pack(tmp_path / "two", tmp_path / "two.tar.gz")
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words", "wheels"),
    [
        ("server", (), SERVER),
        ("node", (), NODE | {"torch-2.11", "cudalibs-1.0"}),
        ("node", ("--torch", "image"), NODE),
    ],
)
def test_it_holds_what_that_kind_of_machine_needs(
    index: Path, tmp_path: Path, kind: str, words: tuple[str, ...], wheels: set[str]
) -> None:
    archive = tmp_path / "one.tar.gz"
    done = pack(index, archive, kind, *words)
    assert done.returncode == 0, done.stderr
    assert names(archive) == wheels
    assert archive.name in done.stdout


@pytest.mark.slow
def test_a_wheel_that_is_not_to_be_had_is_named_and_nothing_is_packed(tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.mkdir()
    wheel(index, "pip", "1.0")
    wheel(index, "sllm", "1.0", "absent", extras=("server", "worker", "cuda"))
    done = pack(index, tmp_path / "one.tar.gz", "server")
    assert done.returncode != 0
    assert "absent" in done.stderr
    assert not (tmp_path / "one.tar.gz").exists()

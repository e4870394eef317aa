"""setup.sh, run for real: what a newcomer meets on machines that lack something."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.build.stage import ROOT, TORCH, Project, bare_path, pinned, serve, write_build_wheels, write_wheel

VERSION = pinned("torch")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PATH with Python, and with a shim before it for a version that is not there."""
    folder = bare_path(tmp_path_factory.mktemp("path") / "bin")
    shim = folder / "python3.13"
    shim.write_text("#!/bin/sh\necho 'python3.13: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, path: Path) -> Project:
    """A project whose set-up has got as far as torch, and failed there for want of a wheel."""
    project = Project.create(tmp_path_factory.mktemp("fresh") / "sllm", path)
    wheels = tmp_path_factory.mktemp("wheels")
    write_build_wheels(wheels)
    done = project.setup(WHEELHOUSE=str(wheels))
    assert done.returncode != 0, done.stdout
    assert "no torch from WHEELHOUSE" in done.stdout
    return project


@pytest.fixture
def project(fresh: Project) -> Iterator[Project]:
    """`fresh` for one test to go on with; as it was afterwards. In its own place, since an environment knows its own:
    in another one set-up would begin by making sure of it."""
    kept = fresh.folder.with_name("kept")
    shutil.copytree(fresh.folder, kept, symlinks=True)
    yield fresh
    shutil.rmtree(fresh.folder)
    kept.rename(fresh.folder)


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    """Every wheel that the small project needs, torch for the CPU among them."""
    write_build_wheels(tmp_path / "wheels")
    write_wheel(tmp_path / "wheels", "torch", f"{VERSION}+cpu", code=TORCH)
    return tmp_path / "wheels"


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A package index on the loopback that has torch for CUDA only: its folder and address."""
    folder = tmp_path / "index"
    write_wheel(folder / "hatchling", "hatchling", pinned("hatchling"))
    write_wheel(folder / "editables", "editables", pinned("editables"))
    write_wheel(folder / "nvidia-cublas", "nvidia-cublas", "13.0", padding=2_000_000)
    write_wheel(folder / "torch", "torch", VERSION, requires=("nvidia-cublas",), code=TORCH, padding=1_000_000)
    with serve(folder) as address:
        yield folder, address


def test_missing_packages_are_named_at_once_with_the_apt_line(tmp_path: Path) -> None:
    folder = bare_path(tmp_path / "bin", python=False)
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking/ensurepip.py").write_text("raise ImportError('as on Debian without python3-venv')\n")
    python = folder / "python3"
    real = Path(sys.executable).resolve()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/lacking exec {real} "$@"\n')
    python.chmod(0o755)
    project = Project.create(tmp_path / "sllm", folder)
    done = project.setup()
    assert done.returncode == 1
    assert "apt-get install -y make python3-venv\n" in done.stdout
    assert "free: disk" in done.stdout
    assert not (project.folder / ".venv").exists()


def test_no_python_at_all_is_named_with_the_apt_line(tmp_path: Path) -> None:
    project = Project.create(tmp_path / "sllm", bare_path(tmp_path / "bin", python=False))
    done = project.setup()
    assert done.returncode == 1
    assert "apt-get install -y make python3 python3-venv\n" in done.stdout


def path_with_a_full_disk(folder: Path) -> Path:
    """A bare PATH whose ``df`` says that 7 MB are free."""
    bare_path(folder)
    (folder / "df").unlink()
    (folder / "df").write_text("#!/bin/sh\necho head\necho disk 100 93 7 93% /\n")
    (folder / "df").chmod(0o755)
    return folder


def test_too_little_disk_stops_it_before_anything_is_fetched(tmp_path: Path) -> None:
    folder = path_with_a_full_disk(tmp_path / "bin")
    done = Project.create(tmp_path / "sllm", folder).setup()
    assert done.returncode == 1
    assert "too little disk" in done.stdout
    assert "7 MB free" in done.stdout


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="from 3.13 on Python reads such a path in every locale")
def test_a_folder_that_python_cannot_read_in_this_locale_is_named_before_anything_is_fetched(tmp_path: Path) -> None:
    project = Project.create(tmp_path / "прое кт", path_with_a_full_disk(tmp_path / "bin"))
    done = project.setup(LC_ALL="C")
    assert done.returncode == 1, done.stdout
    assert "прое кт has letters that Python cannot read in this locale: export LC_ALL=C.UTF-8" in done.stdout
    assert not (project.folder / ".venv").exists()
    assert "too little disk" in project.setup(LC_ALL="C.UTF-8").stdout, "it goes on to what is looked at next"


def test_goes_on_offline_where_it_was_and_then_has_nothing_to_do(project: Project, wheelhouse: Path) -> None:
    witness = project.folder / ".venv/witness"
    witness.touch()
    done = project.setup(WHEELHOUSE=str(wheelhouse))
    assert done.returncode == 0, done.stdout
    assert f"torch {VERSION}+cpu from WHEELHOUSE" in done.stdout
    assert witness.exists(), "the environment was made anew"
    again = project.setup()
    assert (again.returncode, again.stdout) == (0, "setup: nothing to do\n")


def test_goes_on_after_a_kill(project: Project, wheelhouse: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hold")
    running = project.start(WHEELHOUSE=str(wheelhouse), HOLD=str(tmp_path / "hold"))
    reached = threading.Thread(target=(tmp_path / "hold").read_bytes, daemon=True)
    reached.start()
    reached.join(timeout=60)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait(timeout=60)
    assert not reached.is_alive(), "the build of the packages was never reached"
    (next(project.folder.glob(".venv/lib/python*/site-packages/editables-*.dist-info")) / "RECORD").unlink()
    done = project.setup(WHEELHOUSE=str(wheelhouse))
    assert done.returncode == 0, done.stdout
    assert "torch" not in done.stdout.partition("packages: ")[0].partition("needed)")[2], "torch was done already"
    assert list(project.folder.glob(".venv/lib/python*/site-packages/editables-*.dist-info/RECORD"))


def test_an_installed_torch_is_kept(project: Project, wheelhouse: Path, tmp_path: Path) -> None:
    older = write_wheel(tmp_path, "torch", "2.12.0", code=TORCH)
    subprocess.run([project.python, "-m", "pip", "install", "-q", "--no-index", older], check=True, timeout=120)
    done = project.setup(WHEELHOUSE=str(wheelhouse))
    assert done.returncode == 0, done.stdout
    assert "torch 2.12.0, already installed" in done.stdout
    assert project.torch() == "2.12.0"


def test_a_cpu_wheel_that_pip_finds_is_taken(project: Project, index: tuple[Path, str], wheelhouse: Path) -> None:
    done = project.setup(PIP_INDEX_URL=index[1], PIP_FIND_LINKS=str(wheelhouse), TORCH_INDEX=index[1])
    assert done.returncode == 0, done.stdout
    assert f"torch {VERSION}+cpu from pip's own index and links" in done.stdout
    assert project.torch() == f"{VERSION}+cpu"


def test_cuda_libraries_are_refused_with_their_size(project: Project, index: tuple[Path, str]) -> None:
    done = project.setup(PIP_INDEX_URL=index[1], TORCH_INDEX=f"{index[1]}/nothing-here")
    assert done.returncode != 0
    assert f"gives torch {VERSION} for CUDA: 3 MB. Not fetched." in done.stdout
    assert "TORCH=cuda" in done.stdout
    assert project.torch() == ""


def test_torch_index_is_asked_where_pip_finds_only_cuda(project: Project, index: tuple[Path, str]) -> None:
    write_wheel(index[0] / "cpu/torch", "torch", f"{VERSION}+cpu", code=TORCH)
    done = project.setup(PIP_INDEX_URL=index[1], TORCH_INDEX=f"{index[1]}/cpu")
    assert done.returncode == 0, done.stdout
    assert f"torch {VERSION}+cpu from TORCH_INDEX {index[1]}/cpu" in done.stdout
    assert project.torch() == f"{VERSION}+cpu"


def test_cuda_is_fetched_when_asked_for(project: Project, index: tuple[Path, str], wheelhouse: Path) -> None:
    done = project.setup(PIP_INDEX_URL=index[1], PIP_FIND_LINKS=str(wheelhouse), TORCH="cuda")
    assert done.returncode == 0, done.stdout
    assert project.torch() == VERSION


def test_unknown_kind_of_torch_is_refused(project: Project, wheelhouse: Path) -> None:
    done = project.setup(WHEELHOUSE=str(wheelhouse), TORCH="rocm")
    assert done.returncode != 0
    assert "TORCH=rocm is not known" in done.stdout


def test_shell_scripts_pass_shellcheck() -> None:
    checker = Path(sys.executable).parent / "shellcheck"
    scripts = [ROOT / "setup.sh", ROOT / ".ci/run", ROOT / "tools/test_containers.sh"]
    done = subprocess.run([checker, *scripts], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout

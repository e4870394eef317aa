"""A small project around the real setup.sh: wheels made on the spot, a package index on the loopback, a bare PATH."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

ROOT = Path(__file__).parents[3]
SETUP_SECONDS = 240
PACKAGES = ("sllm", "sllm_runtime", "sllm_gateway", "sllm_invoker", "sllm_loaderd")
TOOLS = ["sh", "cat", "cksum", "tr", "df", "awk", "id", "sed", "mkdir", "mv", "rm", "dirname", "basename", "cut"]
TORCH = "version = type('version', (), {'cuda': None})\n"

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "backend"
backend-path = ["."]
[project]
name = "sllm"
version = "0.1.0"
[project.optional-dependencies]
server = []
worker = ["torch>=2.11"]
dev = []
cuda = []
"""

# An editable build that only adds the folder; where HOLD names a FIFO, it is held there after one reader was told.
BACKEND = """\
import os, zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    if os.environ.get("HOLD"):
        held = open(os.environ["HOLD"], "w")
        held.write("here")
        held.close()
        __import__("signal").pause()
    name, info = "sllm-0.1.0-py3-none-any.whl", "sllm-0.1.0.dist-info/"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("sllm.pth", os.getcwd())
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: sllm\\nVersion: 0.1.0\\n"
                       "Requires-Dist: torch>=2.11; extra == 'worker'\\n"
                       + "".join(f"Provides-Extra: {e}\\n" for e in ("server", "worker", "dev", "cuda")))
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""


def write_wheel(
    folder: Path, name: str, version: str, *, requires: tuple[str, ...] = (), code: str = "", padding: int = 0
) -> Path:
    """Write a wheel with one module of `code` and `padding` bytes of data; returns its path."""
    module = name.replace("-", "_")
    stem = f"{module}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{module}.py", code)
        wheel.writestr(f"{module}_data.bin", bytes(padding))
        wheel.writestr(
            f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def write_build_wheels(folder: Path) -> None:
    """The packages that a build asks for, at the versions that the constraints pin."""
    write_wheel(folder, "hatchling", pinned("hatchling"))
    write_wheel(folder, "editables", pinned("editables"))


def pinned(name: str) -> str:
    """The version of `name` in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{name}=="))


def bare_path(folder: Path, *, python: bool = True) -> Path:
    """A folder for PATH with the ordinary tools, no make, and Python where asked."""
    folder.mkdir(parents=True)
    for tool in (*TOOLS, "env", "flock"):
        found = shutil.which(tool)
        assert found, f"{tool} is not on this machine"
        (folder / tool).symlink_to(found)
    if python:
        (folder / "python3").symlink_to(Path(sys.executable).resolve())
    return folder


@dataclass(frozen=True)
class Project:
    """A folder in which the real setup.sh runs."""

    folder: Path
    path: Path

    @classmethod
    def create(cls, folder: Path, path: Path) -> "Project":
        """Lay out the project in `folder`; `path` is its PATH."""
        folder.mkdir(parents=True)
        shutil.copy(ROOT / "setup.sh", folder)
        shutil.copy(ROOT / "constraints.txt", folder)
        shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "pyproject.toml").write_text(PYPROJECT)
        (folder / "backend.py").write_text(BACKEND)
        for package in PACKAGES:
            (folder / f"{package}.py").write_text("")
        return cls(folder, path)

    @property
    def python(self) -> Path:
        """The interpreter of the project's environment."""
        return self.folder / ".venv/bin/python"

    def environment(self, settings: Mapping[str, str]) -> dict[str, str]:
        """What setup.sh sees of the environment: nothing of pip's settings on this machine."""
        own = {"PATH": str(self.path), "HOME": str(self.folder), "PIP_CONFIG_FILE": os.devnull}
        temporary = self.folder.with_name("tmp")
        temporary.mkdir(exist_ok=True)
        return own | {"TMPDIR": str(temporary), "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "0"} | dict(settings)

    def setup(self, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run setup.sh to its end; stdout and stderr come together."""
        return subprocess.run(
            ["sh", str(self.folder / "setup.sh")],
            env=self.environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SETUP_SECONDS,
            check=False,
        )

    def start(self, **settings: str) -> "subprocess.Popen[bytes]":
        """Start setup.sh in a process group of its own."""
        return subprocess.Popen(
            ["sh", str(self.folder / "setup.sh")],
            env=self.environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def torch(self) -> str:
        """Version of torch in the environment, or "" where there is none."""
        ask = "import importlib.metadata as m; print(*(d.version for d in m.distributions(name='torch')))"
        return subprocess.run(
            [self.python, "-c", ask], capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve `folder` on the loopback; its listings are a simple package index. Yields the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(timeout=60)

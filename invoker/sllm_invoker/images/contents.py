"""What an image made of this machine holds: the interpreter that runs this, its standard library, the packages that
workers import, and the shared libraries of all of them. In two layers: what changes with an installation, and ours."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from sllm_invoker.images import distributions, libraries, places
from sllm_invoker.images.entries import Layer, digest_of, tree

PACKAGES: Final = ("sllm_runtime", "sllm_loaderd", "sllm")
"""Ours, as far as a worker or a function imports them."""
_STDLIB_SKIPPED: Final = (
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3",
)  # fmt: skip
_METADATA: Final = ("METADATA", "entry_points.txt", "WHEEL")
MINOR: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE: Final = places.packages(MINOR)


def interpreter() -> Path:
    """The program itself, behind a virtual environment's links."""
    return Path(sys.executable).resolve()


def _stdlib() -> Iterator[tuple[str, Path]]:
    home = f"{places.PYTHON_HOME}/lib/python{MINOR}"
    paths = sysconfig.get_paths(vars={"installed_base": sys.base_prefix, "installed_platbase": sys.base_exec_prefix})
    for root in dict.fromkeys((Path(paths["stdlib"]), Path(paths["platstdlib"]))):
        for name, path in tree(root, home, skip=_STDLIB_SKIPPED):
            if (
                not name.startswith(f"{home}/config-")
                and not path.name.startswith("_tkinter")
                and ".opt-" not in path.name
            ):
                yield name, path


def _own_metadata() -> Iterator[tuple[str, Path]]:
    """What ``importlib.metadata`` tells of ours; where it was installed from stays on this machine."""
    distribution = metadata.distribution(distributions.OURS)
    for name in _METADATA:
        for file in distribution.files or ():
            if file.name == name and file.parent.name.endswith(".dist-info"):
                yield f"{SITE}/{file.as_posix()}", Path(str(distribution.locate_file(file)))


def _shared(files: dict[str, Path]) -> dict[str, Path]:
    """The libraries that ``files`` and the interpreter need from elsewhere, by where they must lie."""
    programs = [interpreter(), *(path for name, path in files.items() if ".so" in Path(name).name)]
    inside = {path.resolve() for path in files.values()}
    found = {}
    for path in libraries.needed_by(programs):
        real, base = path.resolve(), Path(sys.base_prefix).resolve()
        if real in inside:
            continue
        under = real.is_relative_to(base)  # of the interpreter's own prefix, which goes to another place
        found[f"{places.PYTHON_HOME}/lib/{path.name}" if under else str(path).lstrip("/")] = real
    return found


def linked_to_prefix() -> bool:
    """Whether the interpreter needs libraries of its own prefix."""
    base = Path(sys.base_prefix).resolve()
    return base != Path("/usr") and any(
        path.resolve().is_relative_to(base) for path in libraries.needed_by([interpreter()])
    )


def system() -> Layer:
    """Everything that is not ours. Takes seconds."""
    files = dict(_stdlib())
    for distribution in distributions.closure():
        files.update(distributions.files_of(distribution, SITE))
    files.update(_shared(files))
    files[f"{places.PYTHON_HOME}/bin/python{MINOR}"] = interpreter()
    if libraries.CACHE.is_file():
        files[str(libraries.CACHE).lstrip("/")] = libraries.CACHE
    return Layer(
        files,
        texts={**places.ACCOUNTS, f"{places.ENVIRONMENT}/pyvenv.cfg": f"home = /{places.PYTHON_HOME}/bin\n"},
        links={
            f"{places.ENVIRONMENT}/bin/python": f"/{places.PYTHON_HOME}/bin/python{MINOR}",
            f"{places.ENVIRONMENT}/bin/python3": "python",
        },
        directories=places.DIRECTORIES,
    )


def ours() -> Layer:
    """Our own packages, from where this process imports them."""
    files = dict(_own_metadata())
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            files.update(tree(Path(root), f"{SITE}/{package}"))
    return Layer(files)


def system_digest() -> str:
    """Changes when ``system`` would: interpreter, C library, distributions by their RECORDs. Takes a second."""
    parts = [
        f"format {places.FORMAT}",
        f"{platform.python_implementation()} {platform.python_version()} {platform.machine()}",
        hashlib.sha256(interpreter().read_bytes()).hexdigest(),
        os.confstr("CS_GNU_LIBC_VERSION") or "",
        *map(distributions.identity, distributions.closure()),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """Hex digests of what an image made of this installation holds; equal digests, equal contents."""

    system: str
    base: str
    """Of both layers."""
    python: str
    """Minor version, as ``3.11``."""
    library_path: bool
    """See ``places.configuration``."""


def digests() -> Digests:
    """Changes when what would be built changes. Takes a second."""
    system = system_digest()
    base = hashlib.sha256(f"{system} {digest_of(ours().files)}".encode()).hexdigest()
    return Digests(system=system, base=base, python=MINOR, library_path=linked_to_prefix())

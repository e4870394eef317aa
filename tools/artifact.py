"""Pack every wheel that a machine of the cloud installs into one archive: ours, what it needs, and pip itself.

`make dist WHEELS=all` runs it. pip resolves for the interpreter that machines have (`--python`), from metadata alone;
what comes as source is built. With `--torch image` torch and what nothing else needs (CUDA's libraries) stay out:
machines take the torch of their image. The same wheels make the same archive.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = "sllm"
KINDS = {"server": "server", "node": "server,worker,cuda"}
"""Kinds of machine, and our extras that each installs (EXTRAS of its boot settings)."""
RESOLVE_SECONDS = 600
DOWNLOAD_SECONDS = 3600


@dataclass(frozen=True)
class Wheel:
    """What pip would install: a distribution, and those it requires there, each with the extras it asks for."""

    name: str
    version: str
    url: str
    requires: tuple[str, ...]


def read_report(report: dict[str, Any]) -> dict[str, Wheel]:
    """The wheels of an installation report of pip (its JSON, decoded), by canonical name."""
    found: dict[str, Wheel] = {}
    for item in report["install"]:
        metadata = item["metadata"]
        name = canonicalize_name(metadata["name"])
        requires = tuple(metadata.get("requires_dist", ()))
        found[name] = Wheel(name, metadata["version"], item["download_info"]["url"], requires)
    return found


def needed(wheels: dict[str, Wheel], roots: Iterable[str], environment: dict[str, str], without: str = "") -> set[str]:
    """Names of what ``roots`` (requirements) need, and their own; ``without`` and what only that needs left out."""
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        if name == without or name not in wheels:
            continue
        for extra in ("", *asked.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += _edges(wheels[name], {**environment, "extra": extra})
    return {name for name, _ in seen}


def _edges(wheel: Wheel, environment: dict[str, str]) -> Iterator[Requirement]:
    for line in wheel.requires:
        need = Requirement(line)
        if need.marker is None or need.marker.evaluate(environment):
            yield need


def pip(python: str, *words: str, seconds: int) -> str:
    """Output of this environment's pip, as of that interpreter. Raises ``CalledProcessError``; pip says why itself."""
    command = [sys.executable, "-m", "pip", "--python", python, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=seconds, check=True)
    return done.stdout.decode()


def collect(kind: str, wheel: Path, constraints: Path, python: str, into: Path, *, torch: bool) -> None:
    """Put the wheels of a ``kind`` of machine into ``into``. ``torch``: that too."""
    roots = (f"{OURS}[{KINDS[kind]}] @ {wheel.resolve().as_uri()}", "pip")
    bound = ("--quiet", "--prefer-binary", "--constraint", str(constraints))
    words = ("install", "--dry-run", "--ignore-installed", "--report", "-", *bound, *roots)
    report = json.loads(pip(python, *words, seconds=RESOLVE_SECONDS))
    wheels = read_report(report)
    names = needed(wheels, roots, report["environment"], without="" if torch else "torch")
    (into / wheel.name).write_bytes(wheel.read_bytes())
    exact = [f"{name}=={wheels[name].version}" for name in sorted(names - {OURS})]
    pip(python, "wheel", "--no-deps", "--wheel-dir", str(into), *bound, *exact, seconds=DOWNLOAD_SECONDS)


def pack(folder: Path, archive: Path) -> None:
    """``folder``'s files as an archive that is the same whenever and by whomever it is made."""
    with (
        archive.open("wb") as file,
        gzip.GzipFile("", "wb", 1, file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in sorted(folder.iterdir()):
            entry = tarfile.TarInfo(path.name)
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as content:
                tar.addfile(entry, content)


def main() -> int:
    """Pack the archive; 0 when it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("archive", type=Path)
    parser.add_argument("--wheel", type=Path, required=True, help="ours, as `make dist` builds it")
    parser.add_argument("--constraints", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="an interpreter of the machines' version and platform")
    parser.add_argument("--torch", choices=("archive", "image"), default="archive", help="where machines have it from")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.archive.parent) as folder:  # gigabytes: not where TMPDIR may be memory
        into, torch = Path(folder), given.torch == "archive"
        try:
            collect(given.kind, given.wheel, given.constraints, given.python, into, torch=torch)
        except subprocess.CalledProcessError as error:
            return error.returncode
        pack(into, given.archive)
    print(f"{given.archive}: {given.archive.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

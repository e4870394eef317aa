"""Install torch into the environment that runs this: the CPU build, unless CUDA was asked for.

The first that works is taken: a torch that is already installed, the build that pip finds by itself, the index
named by TORCH_INDEX. Nothing is downloaded to find out which build that would be: pip resolves from the metadata
alone. Gigabytes of CUDA libraries are fetched only on TORCH=cuda. Standard library only, since it runs before
anything else is installed.
"""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DEFAULT_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST = (2, 11)
RESOLVE_SECONDS = 300
DOWNLOAD_SECONDS = 3600
HEAD_SECONDS = 20
IMPORT_SECONDS = 120
CUDA_PACKAGE = re.compile(r"^(nvidia[-_]|cuda[-_]|pytorch[-_]triton|triton$)")


@dataclass(frozen=True)
class Source:
    """A place that pip may take torch from.

    `only_here` holds the options that look at nothing but this place, to learn which version it has; the rest of
    what torch needs may come from elsewhere.
    """

    name: str
    requirement: str
    options: tuple[str, ...]
    only_here: tuple[str, ...] = ()


@dataclass(frozen=True)
class Build:
    """The build of torch that a source would give: its version, and every file that pip would fetch."""

    version: str
    packages: tuple[str, ...]
    urls: tuple[str, ...]

    @property
    def is_cuda(self) -> bool:
        """Whether this build computes on CUDA: by its local version, else by the libraries it requires."""
        local = self.version.partition("+")[2]
        if local:
            return local.startswith(("cu", "rocm"))
        return any(CUDA_PACKAGE.match(name) for name in self.packages)


class CannotResolveError(RuntimeError):
    """pip found no torch at a source; holds pip's own last words."""


def read_build(report: dict[str, Any]) -> Build:
    """The build described by an installation report of pip (its JSON, decoded)."""
    items = report["install"]
    names = [str(item["metadata"]["name"]).lower() for item in items]
    version = next(str(i["metadata"]["version"]) for i in items if str(i["metadata"]["name"]).lower() == "torch")
    return Build(version, tuple(names), tuple(str(item["download_info"]["url"]) for item in items))


def resolve(source: Source) -> tuple[Source, Build]:
    """Ask pip what it would install from `source`; the source comes back narrowed to the version found there.

    Raises CannotResolveError."""
    if source.only_here:
        found = dry_run([*source.only_here, "--no-deps", source.requirement])
        source = replace(source, requirement=f"torch=={found.version}", only_here=())
    return source, dry_run([*source.options, source.requirement])


def dry_run(arguments: list[str]) -> Build:
    """What `pip install *arguments` would install into an empty environment. Raises CannotResolveError."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--only-binary=:all:", "--report", "-", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=RESOLVE_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise CannotResolveError(f"no answer within {RESOLVE_SECONDS} s") from late
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotResolveError((errors or done.stderr.splitlines() or ["pip gave no reason"])[-1])
    return read_build(json.loads(done.stdout))


def nbytes(url: str) -> int:
    """Size of the file at `url` in bytes; 0 where the server does not tell."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path)).stat().st_size
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=HEAD_SECONDS) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (urllib.error.URLError, TimeoutError):
        return 0


def size_text(urls: tuple[str, ...]) -> str:
    """The size of all of `urls` together, for people."""
    sizes = [nbytes(url) for url in urls]
    total = sum(sizes)
    text = f"{total / 1e9:.1f} GB" if total >= 1e8 else f"{total / 1e6:.3g} MB"
    unknown = sizes.count(0)
    return f"{text} and {unknown} files of unknown size" if unknown else text


def sources(requirement: str, wheelhouse: str | None, index: str | None, want_cuda: bool) -> list[Source]:
    """The places to try, in order; `index` is None where the person named none."""
    if wheelhouse:
        options = ("--no-index", "--find-links", wheelhouse)
        return [Source(f"WHEELHOUSE {wheelhouse}", requirement, options)]
    url = index or DEFAULT_INDEX
    only_index = ("--index-url", url, "--retries", "1", "--timeout", "15")
    at_index = Source(f"TORCH_INDEX {url}", requirement, ("--extra-index-url", url), only_index)
    if not want_cuda:
        return [Source("pip's own index and links", requirement, ()), at_index]
    # `===` keeps pip from preferring a local `+cpu` wheel of the same version.
    plain = Source("pip's own index and links", requirement.replace("==", "==="), ())
    return [at_index, plain] if index else [plain]


def installed(want_cuda: bool) -> str | None:
    """Version of the installed torch, where it is new enough, imports, and is of the wanted kind."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        print(f"setup: torch {version} is installed, but sllm needs {OLDEST[0]}.{OLDEST[1]} or newer")
        return None
    probe = [sys.executable, "-c", "import torch; print(torch.version.cuda or '')"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    if done.returncode != 0:
        print(f"setup: torch {version} is installed, but does not import: {done.stderr.strip()[-200:]}")
        return None
    if want_cuda and not done.stdout.strip():
        print(f"setup: torch {version} is installed, but it is a CPU build")
        return None
    return version


def install(source: Source) -> None:
    """Let pip install torch from `source`."""
    command = [sys.executable, "-m", "pip", "install", "--only-binary=:all:"]
    command += [*([] if sys.stdout.isatty() else ["-qq"]), *source.options, source.requirement]
    sys.stdout.flush()
    subprocess.run(command, timeout=DOWNLOAD_SECONDS, stdin=subprocess.DEVNULL, check=True)


def refusal(refused: list[tuple[Source, Build]], failures: list[str]) -> str:
    """What to tell a person for whom no source gave a CPU build."""
    lines = [f"setup: no {failure}" for failure in failures]
    for source, build in refused:
        size = size_text(build.urls)
        lines.append(f"setup: {source.name} gives torch {build.version} for CUDA: {size}. Not fetched.")
    lines.append("setup: set TORCH_INDEX to an index with CPU wheels, or WHEELHOUSE to a folder that holds one;")
    lines.append("setup: or say TORCH=cuda to fetch the CUDA build after all")
    return "\n".join(lines)


def main() -> int:
    """Install torch and say which was taken; 0 when it is there, 1 when none could be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requirement", default="torch", help="for instance torch==2.13.0")
    arguments = parser.parse_args()
    kind = os.environ.get("TORCH", "cpu")
    if kind not in {"cpu", "cuda"}:
        print(f"setup: TORCH={kind} is not known; say TORCH=cpu (the default) or TORCH=cuda", file=sys.stderr)
        return 1
    want_cuda = kind == "cuda"
    version = installed(want_cuda)
    if version:
        print(f"setup: torch {version}, already installed")
        return 0
    places = sources(
        arguments.requirement,
        os.environ.get("WHEELHOUSE") or None,
        os.environ.get("TORCH_INDEX") or None,
        want_cuda,
    )
    return take_first(places, want_cuda)


def take_first(places: list[Source], want_cuda: bool) -> int:
    """Install from the first of `places` that has the wanted build; 1, with the reasons, where none has."""
    refused: list[tuple[Source, Build]] = []
    failures: list[str] = []
    for place in places:
        try:
            source, build = resolve(place)
        except CannotResolveError as problem:
            failures.append(f"torch from {place.name}: {problem}")
            continue
        if build.is_cuda and not want_cuda:
            refused.append((source, build))
            continue
        if want_cuda and not build.is_cuda:
            failures.append(f"CUDA build of torch from {source.name}: it has {build.version}")
            continue
        print(f"setup: torch {build.version} from {source.name} (with what it needs {size_text(build.urls)})")
        install(source)
        return 0
    print(refusal(refused, failures), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

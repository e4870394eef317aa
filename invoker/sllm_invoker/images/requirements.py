"""A function's ``requirements`` as a layer over the base: what pip adds to what the base has.

pip runs here, with this machine's index settings, over a shadow of the base: an environment that has the base's
metadata and nothing of its code, so that pip finds there what a container would. Only wheels are taken. Unpacking one
runs nothing of it; building from source would run its author's code as the platform's user. What the base has stays as
it is (constraints), since our worker runs on it.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sllm_invoker.images import distributions
from sllm_invoker.images.contents import MINOR, SITE
from sllm_invoker.images.entries import Layer, tree
from sllm_runtime.protocol.errors import ImageFailed

MAX_REQUIREMENTS: Final = 100
WORDS: Final = 3000
"""Characters of pip's last words that an error has."""
_PIP: Final = (
    "install", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--progress-bar", "off",
    "--no-warn-script-location", "--root-user-action", "ignore",
)  # fmt: skip


def checked(requirements: Iterable[str]) -> tuple[str, ...]:
    """``requirements`` in one spelling and order. Raises ``ImageFailed`` for what names no package of an index: an
    option, a path or an address would have the node read what its user may read."""
    found = set()
    for line in requirements:
        try:
            wanted = Requirement(line)
        except InvalidRequirement as error:
            first = str(error).partition("\n")[0]
            raise ImageFailed(
                f"requirement {line!a:.100}: {first}; write it as 'name>=1.2'", field="requirements"
            ) from error
        if wanted.url is not None:
            text = f"requirement {line!a:.100} is an address; name a package of the index, or bundle the source"
            raise ImageFailed(text, field="requirements")
        if "/" in str(wanted.specifier) or not str(wanted).isprintable():  # `===` takes anything, and pip a path
            text = f"requirement {line!a:.100} has a character that no version has; write it as 'name>=1.2'"
            raise ImageFailed(text, field="requirements")
        wanted.name = canonicalize_name(wanted.name)
        found.add(str(wanted))
    if len(found) > MAX_REQUIREMENTS:
        raise ImageFailed(f"{len(found)} requirements, at most {MAX_REQUIREMENTS} are taken", field="requirements")
    return tuple(sorted(found))


def layer(requirements: Iterable[str], shadow: Path) -> Layer:
    """What pip lays beside the base for ``requirements``, in the new directory ``shadow``. Raises ``ImageFailed``."""
    site = _shadow(shadow)
    there = {path.name for path in site.iterdir()}
    limits, python = shadow / "constraints.txt", shadow / "bin" / "python"
    limits.write_text("".join(f"{pin}\n" for pin in distributions.pins()))
    wanted = checked(requirements)
    # As words, not as a file: in one pip reads options, and ${NAME} as a variable of this node's environment.
    words = (sys.executable, "-m", "pip", "--python", str(python), *_PIP, "-c", str(limits), "--", *wanted)
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=shadow, check=False)
    if done.returncode != 0:
        raise ImageFailed(f"pip could not install {', '.join(wanted)}: {_last_words(done, shadow)}")
    return Layer(dict(tree(site, SITE, skip=there)))


def _shadow(directory: Path) -> Path:
    """An environment with the base's metadata; its site-packages."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(directory)
    site = directory / "lib" / f"python{MINOR}" / "site-packages"
    for distribution in distributions.inside():
        name = f"{canonicalize_name(distribution.name).replace('-', '_')}-{distribution.version}.dist-info"
        (site / name).mkdir()
        (site / name / "METADATA").write_text(distribution.read_text("METADATA") or "", encoding="utf-8")
        # Without a list of its files pip could not remove it, and so does not try to.
        (site / name / "INSTALLER").write_text("sllm\n")
    return site


def _last_words(done: subprocess.CompletedProcess[str], shadow: Path) -> str:
    lines = [line.replace(f"{shadow}/", "") for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    text = "\n".join(line for line in lines if not line.startswith("Looking in"))[-WORDS:]
    if "No matching distribution" in text:
        text += "\nonly wheels are taken: a package that comes as source alone needs an image of its own"
    return text

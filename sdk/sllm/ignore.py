"""Which files of a function's directory go into its bundle: everything but these patterns and ``.sllmignore``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from pathspec import GitIgnoreSpec

from sllm_runtime.protocol.errors import InvalidBundle
from sllm_runtime.protocol.profiles import LOCK_FILE, PLATFORM_LOCK

IGNORE_FILE: Final = ".sllmignore"
DEFAULTS: Final = (
    ".*",
    "__pycache__/",
    "*.py[co]",
    "node_modules/",
    "venv/",
    "*.egg-info/",
    "dist/",
    "*.safetensors",
    "*.gguf",
    "*.ckpt",
    "*.pt",
    "*.pth",
    "pytorch_model*.bin",
    "partition_*.bin",
    "*.log",
)
"""Weights travel as models, not in bundles. ``!pattern`` in ``.sllmignore`` brings a file back."""
_SECRET: Final = frozenset({PLATFORM_LOCK, LOCK_FILE})
"""In what ``sllm up --data`` names, in ``SLLM_HOME``."""
_OF_HERE: Final = frozenset({"pyvenv.cfg", *_SECRET})
"""In a virtual environment too."""


def spec(root: Path, also: tuple[str, ...] = ()) -> GitIgnoreSpec:
    """Defaults, then the lines of ``root/.sllmignore`` (gitignore's syntax), then ``also``; later lines win.

    Raises ``InvalidBundle`` for a pattern that is none.
    """
    own = root / IGNORE_FILE
    try:
        # Windows' editors begin a file with a mark, which would be a part of the first pattern.
        lines = own.read_text(encoding="utf-8-sig").splitlines() if own.is_file() else []
        return GitIgnoreSpec.from_lines([*DEFAULTS, *lines, *also])
    except (ValueError, OSError) as error:
        raise InvalidBundle(f"{own} cannot be used: {error}") from error


def spec_of(pattern: str) -> GitIgnoreSpec:
    """One pattern of a function's ``include``. Raises ``InvalidBundle`` if it is none."""
    try:
        return GitIgnoreSpec.from_lines([pattern])
    except ValueError as error:
        raise InvalidBundle(f"include={pattern!r} is no pattern: {error}") from error


def _leads_into(pattern: str, directory: str) -> bool:
    """Whether ``directory`` is among those that a pattern names (``data/*.bin``; one without any names none)."""
    named, here = pattern.removeprefix("/").split("/")[:-1], directory.split("/")
    if "**" in named[: len(here)]:
        first = named.index("**")
        return first > 0 and all(map(fnmatchcase, here[:first], named[:first]))
    return len(here) <= len(named) and all(map(fnmatchcase, here, named))


def files(
    root: Path, rules: GitIgnoreSpec, outside: list[str] | None = None, include: tuple[str, ...] = ()
) -> Iterator[str]:
    """Paths below ``root`` (posix, relative, sorted by directory) that no rule ignores, or that ``include`` asks for,
    also in a directory that is ignored if it names that.

    A link to a file inside ``root`` counts as that file; one that leads out of it, or to a directory, is not followed
    and is named in ``outside``. Raises ``InvalidBundle`` where ``root`` itself is what a platform keeps.
    """
    _keeps_no_secrets(root)
    asked = GitIgnoreSpec.from_lines(include)
    environments: tuple[str, ...] = ()
    """Those that are entered all the same: nothing else of them travels."""

    def enters(name: str) -> bool:
        ignored = rules.match_file(f"{name}/") or _is_of_here(root / name) or name.startswith(environments)
        if not ignored or asked.match_file(f"{name}/"):  # all of it is asked for by its own name
            return True
        return any(_leads_into(pattern, name) for pattern in include)

    for directory, below, names in os.walk(root, followlinks=False, onerror=_unreadable):
        here = Path(directory).relative_to(root)
        prefix = "" if here == Path(".") else f"{here.as_posix()}/"
        environments += (prefix,) if prefix and _OF_HERE.intersection(names) else ()
        wanted = sorted(name for name in below if enters(f"{prefix}{name}"))
        below[:] = [name for name in wanted if not (root / prefix / name).is_symlink()]
        if outside is not None:
            outside.extend(f"{prefix}{name}" for name in wanted if name not in below)
        for name in sorted(names):
            path = prefix + name
            if (rules.match_file(path) or path.startswith(environments)) and not asked.match_file(path):
                continue
            if not _inside(root, root / path):
                if outside is not None:
                    outside.append(path)
            elif (root / path).is_file():
                yield path


def _keeps_no_secrets(root: Path) -> None:
    if any((root / name).is_file() for name in _SECRET):
        raise InvalidBundle(
            f"{root} is where a platform or its profiles are kept, whose tokens and keys would travel: "
            "move the function into a folder of its own"
        )


def _is_of_here(directory: Path) -> bool:
    """Whether it is of this machine alone, whatever its name: a virtual environment of Python, or where a platform or
    who uses one keeps tokens, keys and all functions' secrets."""
    return any((directory / name).is_file() for name in _OF_HERE)


def _inside(root: Path, path: Path) -> bool:
    try:
        return not path.is_symlink() or path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # it leads round in a circle
        return False


def _unreadable(error: OSError) -> None:
    raise InvalidBundle(
        f"{error.filename} cannot be read ({error.strerror}); list it in {IGNORE_FILE} if a call does not need it"
    ) from error

"""Functions' files are imported by name, and most are called ``function``: what one deployment imports ends with it."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


@contextlib.contextmanager
def own_modules() -> Iterator[None]:
    """Forget, after, what was imported inside from a directory that was put in front of the path inside.

    Libraries stay: an extension such as torch's cannot be imported twice.
    """
    before, path = set(sys.modules), list(sys.path)
    try:
        yield
    finally:
        roots = [Path(each) for each in sys.path if each not in path]
        for name in set(sys.modules) - before:
            if any(_file(sys.modules[name]).is_relative_to(root) for root in roots):
                del sys.modules[name]
        sys.path[:] = path


def _file(module: ModuleType) -> Path:
    """Where it was read from; a namespace package is the first of its directories."""
    found = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    return Path(found)

"""What a layer of an image is made of: files by their path in it, and the digest of their contents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layer:
    """``files``: from paths in the image (without a leading ``/``) to files of this machine; ``texts``: what stands in
    a file; ``links``: targets of symbolic links; ``directories``: modes of empty ones."""

    files: Mapping[str, Path]
    texts: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    directories: Mapping[str, int] = field(default_factory=dict)


def tree(root: Path, target: str, *, skip: Iterable[str] = ()) -> Iterator[tuple[str, Path]]:
    """Every regular file below ``root`` with its path below ``target``. ``skip``: names that are left out, whatever
    lies below them. Links to files are followed, links to directories are not."""
    left_out = frozenset(skip)
    for path in sorted(root.iterdir()):
        if path.name in left_out:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from tree(path, f"{target}/{path.name}", skip=left_out)
        elif path.is_file():
            yield f"{target}/{path.name}", path


def byte_code(name: str) -> bool:
    """Whether it is made from another file, and may be there or not."""
    return name.endswith(".pyc")


def digest_of(files: Mapping[str, Path]) -> str:
    """Hex digest of names and contents; byte code is left out."""
    found = hashlib.sha256()
    for name in sorted(files):
        if not byte_code(name):
            found.update(f"{name}\0".encode() + hashlib.sha256(files[name].read_bytes()).digest())
    return found.hexdigest()

"""A layer as a tar stream: everything root's, readable by all, writable by root alone, no setuid bit."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import BinaryIO

from sllm_invoker.images.entries import Layer


def _info(name: str, kind: bytes, mode: int, *, size: int = 0, mtime: int = 0, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size, info.mtime, info.linkname = kind, mode, size, mtime, link
    info.uname = info.gname = "root"
    return info


def parents(names: Iterable[str]) -> list[str]:
    """Every directory above ``names``, upper ones first."""
    found = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    return sorted(found - {"."})


def write(layer: Layer, out: BinaryIO) -> None:
    """Write ``layer`` to ``out``, which need not be seekable."""
    names = (*layer.files, *layer.texts, *layer.links, *layer.directories)
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=2**20) as tar:
        for name in parents(names):
            if name not in layer.directories:
                tar.addfile(_info(name, tarfile.DIRTYPE, 0o755))
        for name, mode in layer.directories.items():
            tar.addfile(_info(name, tarfile.DIRTYPE, mode))
        for name, target in layer.links.items():
            tar.addfile(_info(name, tarfile.SYMTYPE, 0o777, link=target))
        for name, text in layer.texts.items():
            data = text.encode()
            tar.addfile(_info(name, tarfile.REGTYPE, 0o644, size=len(data)), io.BytesIO(data))
        for name, path in sorted(layer.files.items()):
            with open(path, "rb", buffering=2**20) as file:
                status = path.stat()
                mode = 0o755 if status.st_mode & 0o100 else 0o644
                # Byte code is valid for a source of this time and size.
                info = _info(name, tarfile.REGTYPE, mode, size=status.st_size, mtime=int(status.st_mtime))
                tar.addfile(info, file)

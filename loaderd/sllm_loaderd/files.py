"""File reads that end in a typed error, and the names of a model's small files."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Final

import xxhash

from sllm_runtime.protocol.checkpoint import is_plain_name
from sllm_runtime.protocol.errors import CorruptCheckpoint, InvalidCheckpoint, Unavailable

_GGUF_PART: Final = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf")
_HUB_FILE: Final = re.compile(r"/(.+/)?models--[^/]+/blobs/[0-9a-f]{40,64}")
"""A file of a model in a hub's cache, wherever that is."""
MAX_SMALL_FILE: Final = 64 * 2**20
"""A small file above this is refused: it would be sent to every sandbox."""
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What says that a disk has no room."""
SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
"""What says that this process or machine is short of something, and nothing of the file."""
ONE_FILE: Final = "model.safetensors"
SHARD_INDEX: Final = "model.safetensors.index.json"
"""What a model has its weights in: one, or those that the index names."""
SMALL_NAMES: Final = (
    "config.json", "adapter_config.json", "generation_config.json", "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.json", "sentence_bert_config.json", "modules.json", "merges.txt", "vocab.txt",
    "chat_template.jinja", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""The small files a model may bring. Code and weights never are."""


def is_small_file(name: str) -> bool:
    """Whether ``name`` is one of ``SMALL_NAMES``."""
    return name in SMALL_NAMES


def small_files(directory: Path) -> dict[str, bytes]:
    """The small files of a model directory, by name, ascending. Raises ``InvalidCheckpoint`` if one is too big."""
    found = {}
    for name in sorted(entry for entry in os.listdir(directory) if is_small_file(entry)):
        path = directory / name
        if not path.is_file():
            continue
        with open(open_source_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_SMALL_FILE:
                raise InvalidCheckpoint(f"{path} has {size} bytes, above the limit of {MAX_SMALL_FILE}", field=name)
            found[name] = file.read()
    return found


def gguf_parts(file: Path) -> list[Path]:
    """The files of the model that a GGUF file is, or is a part of, by their names; they may be missing."""
    match = _GGUF_PART.fullmatch(file.name)
    if match is None or not int(match[2]):
        return [file]
    return [file.with_name(f"{match[1]}-{part:05}-of-{match[2]}.gguf") for part in range(1, int(match[2]) + 1)]


def open_file(path: Path) -> int:
    """A descriptor for reading a plain file. Whoever may write to its directory may have put something else there, and
    to open a pipe would last until somebody writes to it. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return fd


def open_source_file(path: Path) -> int:
    """A descriptor for reading a file of a model's source. Raises ``InvalidCheckpoint``, as ``require_own`` does."""
    try:
        fd = open_file(path)
    except OSError as error:
        require_enough(error, path)
        raise InvalidCheckpoint(f"{path} cannot be opened: {error.strerror}", field=path.name) from error
    try:
        require_own(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def require_own(fd: int, path: Path) -> None:
    """Raises ``InvalidCheckpoint`` if a link led from ``path``, opened as ``fd``, out of the model's directory.

    We see files that are hidden from the function whose model this is: by a link to them it would have their bytes.
    Asked of what is open, since the link may be another one by now. A hub's cache has a model's files beside its
    snapshots, and links to them are elsewhere, too. Where ``blobs`` is a link it says nothing: it may lead anywhere.
    """
    real, home = Path(os.readlink(f"/proc/self/fd/{fd}")), path.parent.resolve()
    blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    if not (real.is_relative_to(home) or real.parent in blobs or _HUB_FILE.fullmatch(str(real))):
        raise InvalidCheckpoint(
            f"{path} is a link to {real}, outside the model's directory; put the file itself there", field=path.name
        )


def require_enough(error: OSError, path: Path | str) -> None:
    """Raises ``Unavailable`` where ``error`` says nothing of the file ``path``: it is whole, and can be read later."""
    if error.errno in SHORT:
        raise Unavailable(f"{path} cannot be read now: {error.strerror}; try again") from error


def read_exactly(fd: int, view: memoryview, offset: int, path: Path | str) -> None:
    """Fill ``view`` from ``fd`` at ``offset``. Raises ``CorruptCheckpoint`` if the file ends too early."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            require_enough(error, path)
            raise CorruptCheckpoint(
                f"{path} cannot be read at byte {offset + done}: {error.strerror};"
                " restore it or convert the model again",
                field=str(path),
            ) from error
        if count == 0:
            raise CorruptCheckpoint(
                f"{path} ends at byte {offset + done}, {len(view) - done} bytes too early;"
                " restore it or convert the model again",
                field=str(path),
            )
        done += count


def chunk_digest(view: memoryview | bytes | bytearray) -> str:
    """The digest of one chunk: xxh3-128, in hex."""
    return xxhash.xxh3_128_hexdigest(view)


def plain_name(name: str, what: str) -> str:
    """``name``, if it is one path component. Raises ``InvalidCheckpoint`` for what could leave its directory."""
    if not is_plain_name(name):
        raise InvalidCheckpoint(f"{what} {name!r} is not a plain file name inside the directory", field=name)
    return name


def write_durable(path: Path, data: bytes) -> None:
    """Write the new file ``path``; it is on the disk when this returns (its name is, after ``sync_directory``)."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames and new names in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Templates that ``sllm fn init`` copies."""

from __future__ import annotations

from pathlib import Path

from sllm_runtime.protocol.errors import Conflict, InvalidArgument


def _home() -> Path:
    """Inside the wheel beside this file; in a checkout at its root."""
    here = Path(__file__).resolve().parent
    packaged = here / "templates"
    return packaged if packaged.is_dir() else here.parents[1] / "templates"


def templates() -> list[str]:
    """Names of the templates."""
    return sorted(path.name for path in _home().iterdir() if path.is_dir()) if _home().is_dir() else []


def init(directory: Path, template: str) -> list[str]:
    """Copy a template. Overwrites nothing: raises ``Conflict`` naming the file that is there.

    Raises ``InvalidArgument`` for a directory that cannot be written.
    """
    if template not in templates():
        raise InvalidArgument(f"no template {template!r}; there are: {', '.join(templates())}", field="--template")
    source = _home() / template
    names = sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
    names = [name for name in names if "__pycache__" not in name]
    try:
        _copy(source, directory, names)
    except OSError as error:
        raise InvalidArgument(
            f"{error.filename or directory} cannot be written ({error.strerror}); choose another directory",
            field="directory",
        ) from error
    return names


def _copy(source: Path, directory: Path, names: list[str]) -> None:
    for name in names:
        if (directory / name).exists():
            raise Conflict(f"{directory / name} is there already; choose an empty directory")
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes((source / name).read_bytes())

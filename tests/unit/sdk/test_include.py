"""Names of directories in ``include``: in the release before all of an ignored one travelled by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.sdk.test_bundle import FUNCTION, build, modules, write  # noqa: F401


@pytest.mark.parametrize("ignored", ["data/", "data", "/data/", "data/*"])
@pytest.mark.parametrize("include", ["data", "data/", "/data/", "data/**", "/data/**"])
def test_all_of_an_ignored_directory_that_is_included_travels(tmp_path: Path, ignored: str, include: str) -> None:
    text = FUNCTION.replace("@model_function\n", f"@model_function(include={[include]!r})\n")
    files = {"data/a.bin": "1", "data/sub/b.bin": "2", "data/sub/deep/c.bin": "3"}
    write(tmp_path, {"function.py": text, **files, ".sllmignore": ignored})
    assert build(tmp_path).files == (*sorted(files), "function.py")

"""What functions' log files take together, and whose go first."""

import asyncio
import os
from pathlib import Path

import pytest

from sllm_invoker import old_logs
from sllm_invoker.old_logs import Lines, found, keep_within, surplus
from tests.fixtures.waiting import until


@pytest.mark.parametrize(
    ("limit", "busy", "gone"),
    [(60, set(), []), (59, set(), ["old"]), (59, {"old"}, ["newer"]), (10, set(), ["old", "newer", "new"]),
     (10, {"old", "newer", "new"}, [])],
)  # fmt: skip
def test_who_wrote_least_recently_goes_first(limit: int, busy: set[str], gone: list[str]) -> None:
    known = [Lines("new", 3.0, 30), Lines("old", 1.0, 10), Lines("newer", 2.0, 20)]
    assert [lines.function for lines in surplus(known, busy, limit)] == gone


async def test_files_of_functions_that_are_gone_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "logs"
    assert found(folder) == []
    folder.mkdir()
    for at, name in enumerate(("a.jsonl.2", "a.jsonl.1", "b-a.jsonl.1", "b-a.jsonl", "a.jsonl", "c.jsonl", "d.jsonl")):
        (folder / name).write_bytes(bytes(10))
        os.utime(folder / name, (at, at))
    known = {lines.function: (lines.written, lines.nbytes) for lines in found(folder)}
    assert known == {"a": (4.0, 30), "b-a": (3.0, 20), "c": (5.0, 10), "d": (6.0, 10)}
    monkeypatch.setattr(old_logs, "EVERY_S", 0.01)
    keeping = asyncio.create_task(keep_within(folder, lambda: {"a"}, limit=45))
    try:
        await until(lambda: {path.name.partition(".")[0] for path in folder.iterdir()} == {"a", "d"})
        assert len(list(folder.iterdir())) == 4
        (folder / "e.jsonl").write_bytes(bytes(10))
        await until(lambda: not (folder / "d.jsonl").exists())
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

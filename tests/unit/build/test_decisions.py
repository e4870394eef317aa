"""Decisions are found by their numbers, and what has overturned one is newer."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
DECISIONS = {path.name[:4]: path for path in (DOCS / "decisions").glob("*.md")}


def test_each_has_a_number_of_its_own() -> None:
    assert len(DECISIONS) == len(list((DOCS / "decisions").iterdir()))
    for number, path in DECISIONS.items():
        assert path.read_text().startswith(f"# {number}: "), path


def test_what_pages_link_to_is_there() -> None:
    pages = [*DOCS.glob("*.md"), *DECISIONS.values()]
    gone = [
        (page.name, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert gone == []


def test_what_overturned_a_decision_is_newer() -> None:
    marked = 0
    for number, path in DECISIONS.items():
        note = path.read_text().split("\n\n", 2)[1]
        if "uperseded" in note.split(":")[0]:
            newer = re.findall(r"\[(\d{4})\]", note)
            assert newer, path
            assert all(each > number for each in newer), path
            marked += 1
    assert marked

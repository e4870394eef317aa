"""A pytest plugin: runs of the same tests, side by side, share them a file at a time (`tools/run_tests.py`).

`SLLM_TEST_SHARE=FOLDER:front` or `FOLDER:back`: the folder is the runs' own, and empty at first. A run takes a file by
making its mark there, which only one can; one takes from the front, the other from the back, so that the long tests of
whole platforms, which come first and mostly wait, stand beside those that compute.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

VARIABLE = "SLLM_TEST_SHARE"
STOP = "stop"


def taken(claims: Path, items: list[pytest.Item], *, from_back: bool) -> Iterator[list[pytest.Item]]:
    """The tests of each file that no other run has taken; it is taken when it is asked for."""
    of_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_file.setdefault(item.location[0], []).append(item)
    for file in reversed(of_file) if from_back else of_file:
        try:
            (claims / file.replace(os.sep, "%")).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield of_file[file]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """pytest's own loop, but for where the next test comes from."""
    if session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own says what is wrong, or lists them
    folder, _, end = os.environ[VARIABLE].rpartition(":")
    stop = Path(folder) / STOP
    for items in taken(Path(folder), session.items, from_back=end == "back"):
        # What of the set-up is wanted next: after a file's last test, the session's alone.
        for item, wanted in zip(items, [*items[1:], session], strict=True):
            if stop.exists():
                return True
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=wanted)
            if session.shouldfail or session.shouldstop:
                stop.touch()
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True

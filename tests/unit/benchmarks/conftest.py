"""What a benchmark deploys is imported by this process: it ends with the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fixtures.modules import own_modules


@pytest.fixture(autouse=True)
def _own_modules() -> Iterator[None]:
    with own_modules():
        yield

"""Processes that parts of an engine run in."""

from collections.abc import Iterator

import pytest

from tests.fixtures.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks them; one for all tests, since its imports take seconds."""
    made = Nursery()
    yield made
    made.close()

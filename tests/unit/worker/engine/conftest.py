"""Processes that parts of an engine run in."""

from collections.abc import Iterator

import pytest
import torch

from tests.fixtures.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks them; one for all tests, since its imports take seconds."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def compiled() -> Iterator[None]:
    """What a test has torch compile is not counted among another's: torch goes on uncompiled where a function has had
    too many kinds of arguments, as it has over many models in one process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

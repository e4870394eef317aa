"""Two small models of a store, shared by the tests of one module, and who forks the loaderds of all."""

from collections.abc import Iterator

import pytest

from sllm_loaderd.store import StoredModel
from tests.fixtures.loaderd import forked_by
from tests.fixtures.loaderd_nursery import Nursery
from tests.unit.loaderd.node import stored_model


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def _forked(nursery: Nursery) -> Iterator[None]:
    """Tests of the program's own start are in `test_daemon`."""
    with forked_by(nursery):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredModel]:
    with stored_model(tmp_path_factory.mktemp("one")) as made:
        yield made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredModel]:
    with stored_model(tmp_path_factory.mktemp("two"), seed=1) as made:
        yield made

"""Two small models of a store, shared by the tests of one module."""

from collections.abc import Iterator

import pytest

from sllm_loaderd.store import StoredModel
from tests.unit.loaderd.node import stored_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredModel]:
    with stored_model(tmp_path_factory.mktemp("one")) as made:
        yield made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredModel]:
    with stored_model(tmp_path_factory.mktemp("two"), seed=1) as made:
        yield made

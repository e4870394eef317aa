"""The file that the platform and the SDK both write."""

import tomllib
from datetime import UTC
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.protocol.profiles import profile_name, toml

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans())
times = st.one_of(st.dates(), st.times(), st.datetimes(), st.datetimes(timezones=st.just(UTC)))
values = st.recursive(
    st.one_of(texts, numbers, times),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(st.dictionaries(texts, inner, max_size=2), min_size=1, max_size=2)
    ),
    max_leaves=4,
)
tables = st.recursive(
    st.dictionaries(texts, values, max_size=4), lambda inner: st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


@given(document=tables)
def test_what_is_written_is_read_again(document: dict[str, Any]) -> None:
    assert tomllib.loads(toml(document)) == document


@pytest.mark.parametrize("name", ["a", "b-x.y", "two words", "é😀"])
def test_a_name_of_a_profile(name: str) -> None:
    assert profile_name(name) == name


@pytest.mark.parametrize("name", ["", " ", "a\nb", b"caf\xe9".decode("utf-8", "surrogateescape")])
def test_no_name_of_a_profile(name: str) -> None:
    with pytest.raises(ValueError, match="no profile's name"):
        profile_name(name)

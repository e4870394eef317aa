"""What a machine lacks: tests that need it are skipped, or fail where it is demanded."""

import pytest

from tests.fixtures.needs import NEEDS, need


@pytest.mark.parametrize("required", ["", "gpu,others"])
def test_what_nobody_demands_is_skipped(monkeypatch: pytest.MonkeyPatch, required: str) -> None:
    monkeypatch.setitem(NEEDS, "it", lambda: "it is not here")
    monkeypatch.setenv("SLLM_TEST_REQUIRE", required)
    with pytest.raises(pytest.skip.Exception, match="needs it: it is not here"):
        need("it")


def test_what_is_demanded_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEEDS, "it", lambda: "it is not here")
    monkeypatch.setitem(NEEDS, "there", lambda: None)
    monkeypatch.setenv("SLLM_TEST_REQUIRE", "gpu,it,there")
    need("there")
    with pytest.raises(pytest.fail.Exception, match="needs it: it is not here"):
        need("it")


def test_each_is_a_marker(pytestconfig: pytest.Config) -> None:
    assert NEEDS.keys() <= {line.partition(":")[0] for line in pytestconfig.getini("markers")}

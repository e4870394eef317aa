"""Settings from the environment."""

from pathlib import Path

import pytest
from pydantic import Field

from sllm_runtime.platform.settings import Identity, Settings
from sllm_runtime.protocol.errors import InvalidRequest


class Mine(Settings):
    port: int = Field(default=1, le=65535)
    names: tuple[str, ...] = ()
    table: dict[str, int] = Field(default_factory=dict)


def test_variables_and_given_values() -> None:
    found = Mine.load({"SLLM_PORT": "80", "SLLM_HOME": "/x", "PORT": "9", "SLLM_UNKNOWN": "1"}, log_json=True)
    assert (found.port, found.home, found.log_json) == (80, Path("/x"), True)
    assert Mine.load({"SLLM_PORT": "80"}, port=81).port == 81


def test_an_empty_variable_is_none() -> None:
    assert Mine.load({"SLLM_PORT": "", "SLLM_NATS_URL": ""}) == Mine.load({})


@pytest.mark.parametrize("text", ['["a", "b"]', "a,b", " a , b "])
def test_lists_are_json_or_words(text: str) -> None:
    assert Mine.load({"SLLM_NAMES": text}).names == ("a", "b")


def test_mappings_are_json() -> None:
    assert Mine.load({"SLLM_TABLE": '{"a": 1}'}).table == {"a": 1}


@pytest.mark.parametrize("value", ["many", "65536"])
def test_a_wrong_value_names_its_variable(value: str) -> None:
    with pytest.raises(InvalidRequest, match="SLLM_PORT") as caught:
        Mine.load({"SLLM_PORT": value})
    assert caught.value.field == "SLLM_PORT"


@pytest.mark.parametrize("value", ["loud", "10", "warnings"])
def test_a_level_of_logs_that_is_none_names_its_variable(value: str) -> None:
    """Else each daemon ends by a bug, with a traceback, when it begins to log."""
    with pytest.raises(InvalidRequest, match="SLLM_LOG_LEVEL") as caught:
        Mine.load({"SLLM_LOG_LEVEL": value})
    assert caught.value.field == "SLLM_LOG_LEVEL"


@pytest.mark.parametrize("value", ["debug", "Warning", "ERROR"])
def test_a_level_of_logs_is_one_of_pythons(value: str) -> None:
    assert Mine.load({"SLLM_LOG_LEVEL": value}).log_level.lower() == value.lower()


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Mine.load({}).port = 2


def test_the_identity_file(tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    assert Mine.load({}).identity() is None
    file.write_text('{"identity": "n1", "user": "u", "password": "secret", "kind": "node", "new": 1}')
    found = Mine.load({"SLLM_IDENTITY_FILE": str(file)}).identity()
    assert found == Identity("n1", "u", "secret", "node")
    assert "secret" not in repr(found)
    file.write_text("{")
    with pytest.raises(InvalidRequest, match="SLLM_IDENTITY_FILE"):
        Mine.load({"SLLM_IDENTITY_FILE": str(file)}).identity()

"""What a function returns, as JSON, and what is said of what is none."""

from pathlib import Path
from typing import Any

import pytest

from sllm_runtime.protocol.errors import FunctionError
from sllm_runtime.worker.values import encode
from tests.unit.worker.harness import Worker, bundle_of, manifest


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({(1, 2): 0.5}, r"\(1, 2\) \(tuple\)"),
        ([{"a": {None: 1}}], r"None \(NoneType\)"),
        ({"counts": {b"a".__class__: 1}}, r"\(type\)"),
    ],
)
def test_a_key_that_is_no_text_is_named_as_that(value: Any, key: str) -> None:
    """The type alone says a wrong thing: a tuple and None are JSON, as values."""
    with pytest.raises(FunctionError, match=f"its key .*{key} is neither text nor a number"):
        encode(value)


def test_a_value_that_is_not_json_is_named_by_its_type() -> None:
    with pytest.raises(FunctionError, match=r"not JSON: builtins\.object; return JSON types"):
        encode({"a": [object()], 1: 2})


def test_the_log_of_a_result_that_is_not_json_has_no_frames_of_ours(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest(), bundle_of({"user.py": "def fn():\n    return {(1, 2): 3}\n"}), workdir=tmp_path)
    error = worker.run({}).error
    assert error.code == "function_error"
    assert "Traceback" not in str(error.detail)


def test_the_log_of_a_failed_import_begins_with_the_users_line(worker: Worker, tmp_path: Path) -> None:
    error = worker.fail(manifest(), bundle_of({"user.py": "x = {}\nx['a']\n"}), workdir=tmp_path)
    assert error.message == "import failed: KeyError: 'a'"
    first = next(line for line in str(error.detail).splitlines() if line.startswith("  File "))
    assert "user.py" in first, error.detail

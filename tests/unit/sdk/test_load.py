"""What a file describes, and what is wrong with a file that describes nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sllm.cli import load
from sllm_runtime.protocol.errors import InvalidBundle, InvalidManifest
from tests.fixtures.modules import own_modules

HEAD = "from sllm import model_function\n"
ONE = HEAD + "@model_function\ndef one(text: str) -> str:\n    return text\n"
TWO = ONE + "@model_function\ndef two(text: str) -> str:\n    return text\n"


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    with own_modules():
        yield


@pytest.mark.parametrize("target", ["nothing_like_it", "nothing_like_it.at.all::f", "Not A Module"])
def test_what_is_no_file_and_no_module_is_not_to_be_installed(target: str) -> None:
    with pytest.raises(InvalidBundle, match=r"is not there|there is no file or module") as found:
        load.load(target)
    assert "install" not in found.value.message
    assert "name a .py file" in found.value.message


def test_all_functions_of_a_file_or_the_one_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "function.py").write_text(TWO)
    assert [each.name for each in load.load(str(tmp_path / "function.py"))] == ["one", "two"]
    assert load.one(f"{tmp_path}/function.py::two").name == "two"
    assert [each.name for each in load.load(str(tmp_path))] == ["one", "two"]
    assert [each.name for each in load.load("function::one")] == ["one"]
    with pytest.raises(InvalidBundle, match=r"describes 2 functions; name one: .*::one, .*::two"):
        load.one(str(tmp_path / "function.py"))


@pytest.mark.parametrize(
    ("text", "target", "said"),
    [
        ("x = 1", "", "describes no function; put @model_function above one"),
        (HEAD + "class A:\n    @model_function\n    def b(self): ...", "", "a method of class A; put it above"),
        (HEAD + "if __name__ == '__main__':\n    @model_function\n    def a(): ...", "", "outside of `if __name__"),
        (ONE, "::other", "has no other; there: one"),
        (ONE + "def plain(): ...", "::plain", "plain in .* is a function without @model_function; there: one"),
        ("import nothing_like_it", "", r"f\.py:1: ModuleNotFoundError: .*; install it here, or import it inside"),
        ("def f(:", "", r"f\.py:1: SyntaxError"),
        ("\n\n1 / 0", "", r"f\.py:3: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "", r"f\.py:2: SystemExit: 3"),
        (HEAD + "model_function(3)", "", "stands on int 3"),
        (ONE + "@model_function(name='one')\ndef three(): ...", "", "describes 'one' twice"),
    ],
)
def test_garbage_is_named(tmp_path: Path, text: str, target: str, said: str) -> None:
    (tmp_path / "f.py").write_text(text)
    with pytest.raises((InvalidBundle, InvalidManifest), match=said) as found:
        load.load(f"{tmp_path}/f.py{target}")
    assert "f.py" in found.value.message


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.py", r"nowhere\.py is not there"),
        ("notes.txt", "is no Python file"),
        ("json.py:one", r"json\.py:one is not there; .* two colons: .*json\.py::one"),
        ("empty", r"empty has no function\.py"),
        ("two-words.py", "'two-words' can be no module's name"),
        ("json.py", "imported as 'json', but so is another module here"),
        ("wave.py", "imported as 'wave', but so is another module here"),
        ("torch.py", "imported as 'torch', but so is another module here"),
        ("numpy.py", "imported as 'numpy', but so is another module here"),
        ("yaml.py", r"imported as 'yaml', but so is another module here \(.*site-packages"),
    ],
)
def test_paths_that_cannot_be_imported(tmp_path: Path, target: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("notes.txt", "two-words.py", "json.py", "wave.py", "torch.py", "numpy.py", "yaml.py"):
        (tmp_path / name).write_text(ONE)
    with pytest.raises(InvalidBundle, match=said):
        load.load(str(tmp_path / target))


def test_what_a_module_prints_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "function.py").write_text("print('loading')\n" + ONE)
    load.load(str(tmp_path))
    assert capsys.readouterr() == ("", "loading\n")

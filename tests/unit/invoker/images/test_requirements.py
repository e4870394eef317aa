"""Requirements as a layer: the real pip, over wheels that this test makes, with no index."""

import os
import zipfile
from pathlib import Path

import pytest

from sllm_invoker.images import requirements
from sllm_invoker.images.contents import SITE
from sllm_runtime.protocol.errors import ImageFailed
from tests.fixtures.wheels import only, wheel


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip looks, and nowhere else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in only(tmp_path / "wheels").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def test_only_what_the_base_lacks_is_laid_over_it(wheels: Path, tmp_path: Path) -> None:
    wheel(wheels, "greeting", "1.0", "msgspec>=0.1", "politeness")
    wheel(wheels, "greeting", "2.0", "politeness")
    wheel(wheels, "politeness", "0.1")
    wheel(wheels, "msgspec", "99.0")  # a newer one than the base's, which stays
    found = requirements.layer(["greeting<2"], tmp_path / "shadow").files
    names = {name.removeprefix(f"{SITE}/") for name in found if "__pycache__" not in name}
    assert {"greeting.py", "politeness.py", "greeting-1.0.dist-info/METADATA"} <= names
    assert not any(name.startswith(("msgspec", "torch", "pip")) for name in names)
    assert found[f"{SITE}/greeting.py"].read_text() == "version = '1.0'\n"


def test_what_does_not_go_with_the_base_is_refused_with_pips_words(wheels: Path, tmp_path: Path) -> None:
    wheel(wheels, "greeting", "1.0", "msgspec>=99")
    wheel(wheels, "msgspec", "99.0")
    with pytest.raises(ImageFailed, match=r"pip could not install greeting: [\s\S]*msgspec"):
        requirements.layer(["greeting"], tmp_path / "shadow")


def test_ours_stays_as_it_is(wheels: Path, tmp_path: Path) -> None:
    """A list of requirements, or a package that calls functions, names it; no index may have it, or another one."""
    wheel(wheels, "caller", "1.0", "sllm>=0.1")
    found = requirements.layer(["caller", "sllm"], tmp_path / "shadow").files
    assert f"{SITE}/caller.py" in found
    wheel(wheels, "sllm", "99.0")
    found = requirements.layer(["caller", "sllm"], tmp_path / "another").files
    assert not any(name.removeprefix(f"{SITE}/").startswith("sllm") for name in found)
    with pytest.raises(ImageFailed, match="sllm"):
        requirements.layer(["sllm>=99"], tmp_path / "third")


def test_source_is_not_built(wheels: Path, tmp_path: Path) -> None:
    source = wheels / "evil-1.0.zip"
    with zipfile.ZipFile(source, "w") as file:
        file.writestr("evil-1.0/setup.py", f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ImageFailed, match="only wheels are taken"):
        requirements.layer(["evil"], tmp_path / "shadow")
    assert not (tmp_path / "ran").exists()


def test_nobody_reads_the_nodes_environment(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip says which markers do not hold, and reads a variable's name in a file of requirements as its value."""
    monkeypatch.setenv("OF_THE_OPERATOR", "secret")
    wanted = ['six; os_name == "${OF_THE_OPERATOR}"', "no-such-package"]
    with pytest.raises(ImageFailed) as caught:
        requirements.layer(wanted, tmp_path / "shadow")
    assert "${OF_THE_OPERATOR}" in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "line",
    ["-r /etc/passwd", "--index-url=http://x", "evil @ file:///etc", "evil @ https://x/y.whl", "./here", "/etc", "",
     "a b", "ok\n-r /etc/passwd", "ok #\\\n", "evil===/../../evil-1.0-py3-none-any.whl", "ok===1\0",
     "ok===\ud800"],
)  # fmt: skip
def test_what_names_no_package_of_an_index_is_refused(line: str) -> None:
    with pytest.raises(ImageFailed, match=r"requirement .*(name>=1|is an address)"):
        requirements.checked([line])


def test_one_spelling_and_one_order() -> None:
    assert requirements.checked(["Flask_Cors >= 3", "a", "flask-cors>=3"]) == ("a", "flask-cors>=3")
    with pytest.raises(ImageFailed, match="at most 100"):
        requirements.checked([f"p{number}" for number in range(101)])

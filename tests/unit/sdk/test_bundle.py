"""What goes into a bundle, and that nothing else decides its digest."""

import importlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sllm import bundle, ignore, pickled
from sllm.cli import load
from sllm_runtime.protocol.errors import BodyTooLarge, InvalidArgument, InvalidBundle, InvalidManifest
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.worker import bundle as workers
from sllm_runtime.worker.arguments import Arguments
from tests.fixtures.examples import examples
from tests.fixtures.modules import own_modules

FUNCTION = "from sllm import model_function\n\n@model_function\ndef hello(text: str) -> str:\n    return text\n"
PICKLES = """
import sys
from dataclasses import dataclass, field
from typing import Annotated
from pydantic import Field
from sllm import bundle, model_function
import beside

WORD = "hi"

@dataclass
class How:
    mark: str
    times: int = 1
    after: list[str] = field(default_factory=list)

@dataclass
class Place:  # named by a hint alone
    hows: list[How]

@model_function
def hello(text: Annotated[str, Field(max_length=9)], how: How = How(""), place: Place | None = None) -> str:
    return f"{WORD} {beside.shout(text)}{how.mark * how.times}{''.join(how.after)}"

built = bundle.build(hello)
sys.stdout.buffer.write(built.manifest.handler.entry.encode() + b"\\n" + built.data)
"""


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """Each test's modules are its own, though all are called `function`."""
    with own_modules():
        yield


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def build(root: Path, file: str = "function.py") -> bundle.Bundle:
    return bundle.build(load.one(str(root / file)))


def test_files_beside_the_function_travel_and_rubbish_does_not(tmp_path: Path) -> None:
    write(tmp_path, {"function.py": FUNCTION, "prompts/a.txt": "a", "lib/__init__.py": "", "lib/x.py": "x = 1"})
    write(
        tmp_path, {".env": "secret", ".git/config": "", "__pycache__/a.pyc": "", "model.safetensors": "w", "a.log": ""}
    )
    built = build(tmp_path)
    assert built.files == ("function.py", "lib/__init__.py", "lib/x.py", "prompts/a.txt")
    assert built.manifest.handler.entry == "function:hello"
    assert zipfile.ZipFile(io.BytesIO(built.data)).read("prompts/a.txt") == b"a"


def test_a_virtual_environment_stays_whatever_its_name(tmp_path: Path) -> None:
    tree = {"env/pyvenv.cfg": "", "env/lib/a.py": "", "py/3/pyvenv.cfg": "", "envs/b.py": "", "function.py": FUNCTION}
    assert build(write(tmp_path, tree)).files == ("envs/b.py", "function.py")


def test_what_a_platform_keeps_in_the_project_stays(tmp_path: Path) -> None:
    """`sllm up --data run` there, or an `SLLM_HOME` that is not hidden: its token, its keys, every function's secrets,
    and the bundles of before."""
    platform = ("up.lock", "token", "secrets/key", "nats/identities/controller.json", "nats/jetstream/1.blk")
    home = ("profiles.lock", "profiles.toml", "run/token")
    tree = [f"data/{name}" for name in platform] + [f"home/{name}" for name in home]
    assert build(write(tmp_path, dict.fromkeys(tree, "") | {"function.py": FUNCTION})).files == ("function.py",)


@pytest.mark.parametrize("lock", ["up.lock", "profiles.lock"])
def test_a_project_that_is_what_a_platform_keeps_is_refused(tmp_path: Path, lock: str) -> None:
    tree = {"function.py": FUNCTION, lock: "", "token": "t"}
    with pytest.raises(InvalidBundle, match="move the function into a folder of its own"):
        build(write(tmp_path, tree))


def test_of_an_environment_only_what_is_asked_for_travels(tmp_path: Path) -> None:
    tree = dict.fromkeys(("env/pyvenv.cfg", "env/lib/a.py", "env/data/x.bin", "function.py"), "")
    write(tmp_path, tree)
    found = ignore.files(tmp_path, ignore.spec(tmp_path), None, ("env/data/*.bin",))
    assert sorted(found) == ["env/data/x.bin", "function.py"]


def test_of_an_environment_that_is_asked_into_no_link_is_missed(tmp_path: Path) -> None:
    """Each environment on Linux has ``lib64 -> lib``."""
    tree = ("env/pyvenv.cfg", "env/lib/a.py", "env/data/x.bin", "env/d/e/y.bin", "function.py")
    write(tmp_path, dict.fromkeys(tree, ""))
    (tmp_path / "env/lib64").symlink_to("lib")
    outside: list[str] = []
    asked = ("env/data/*.bin", "env/d")
    found = ignore.files(tmp_path, ignore.spec(tmp_path), outside, asked)
    assert sorted(found) == ["env/d/e/y.bin", "env/data/x.bin", "function.py"]
    assert outside == []


def test_patterns(tmp_path: Path) -> None:
    write(tmp_path, {"function.py": FUNCTION, "data/big.csv": "1", "data/small.csv": "2", "w.pt": "3", "notes.md": "4"})
    write(tmp_path, {".sllmignore": "# comment\ndata/\n*.md\n!w.pt\n"})
    assert build(tmp_path).files == ("function.py", "w.pt")


def test_a_mark_at_the_beginning_is_no_part_of_a_pattern(tmp_path: Path) -> None:
    write(tmp_path, {"function.py": FUNCTION, "secret.txt": "s"})
    (tmp_path / ".sllmignore").write_bytes("secret.txt\n".encode("utf-8-sig"))
    assert build(tmp_path).files == ("function.py",)


def test_include_wins(tmp_path: Path) -> None:
    text = FUNCTION.replace("@model_function\n", '@model_function(include=["w.pt", "notes.md"])\n')
    write(tmp_path, {"function.py": text, "w.pt": "3", "notes.md": "4", ".sllmignore": "*.md"})
    assert build(tmp_path).files == ("function.py", "notes.md", "w.pt")


@pytest.mark.parametrize("ignored", ["data/", "data", "/data/", "data/*", "d*/"])
def test_include_wins_over_an_ignored_directory(tmp_path: Path, ignored: str) -> None:
    """Also where that is ignored by default. No more of it travels than was asked for."""
    include = ["data/a.bin", "dist/*.txt", ".config/deep/x.json"]
    text = FUNCTION.replace("@model_function\n", f"@model_function(include={include!r})\n")
    files = {"data/a.bin": "1", "data/b.bin": "2", "dist/x.txt": "3", "dist/y.md": "4", ".config/deep/x.json": "5"}
    write(tmp_path, {"function.py": text, **files, ".config/y.json": "6", ".sllmignore": ignored})
    assert build(tmp_path).files == (".config/deep/x.json", "data/a.bin", "dist/x.txt", "function.py")


@pytest.mark.parametrize("pattern", ["nothing/*", "w.py", "data"])
def test_an_include_that_matches_nothing_is_named(tmp_path: Path, pattern: str) -> None:
    text = FUNCTION.replace("@model_function\n", f'@model_function(include=["w.pt", "{pattern}"])\n')
    write(tmp_path, {"function.py": text, "w.pt": "3"})
    (tmp_path / "data").mkdir()
    with pytest.raises(InvalidBundle, match=re.escape(f"include='{pattern}' matches no file")):
        build(tmp_path)


def test_a_package_is_kept_whole(tmp_path: Path) -> None:
    write(tmp_path, {"pkg/__init__.py": "", "pkg/sub/__init__.py": "", "pkg/sub/serve.py": FUNCTION, "pkg/x.py": ""})
    built = build(tmp_path, "pkg/sub/serve.py")
    assert built.manifest.handler.entry == "pkg.sub.serve:hello"
    assert set(built.files) == {"pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/serve.py", "pkg/x.py"}


def test_the_model_beside_it_travels_by_itself(tmp_path: Path) -> None:
    text = FUNCTION.replace("@model_function\n", '@model_function(model="weights")\n')
    write(tmp_path, {"function.py": text, "weights/config.json": "{}", "weights/tokenizer.json": "{}"})
    assert build(tmp_path).files == ("function.py",)


def test_adapters_travel_by_themselves(tmp_path: Path) -> None:
    options = 'model="weights", engine=True, adapters={"fr": "tuned/fr", "far": "hf://org/far"}'
    text = FUNCTION.replace("@model_function\n", f"@model_function({options})\n")
    files = {"weights/config.json": "{}", "tuned/fr/adapter_config.json": "{}", "tuned/notes.md": "n"}
    root = write(tmp_path / "fn", {"function.py": text, **files})
    built = build(root)
    assert built.files == ("function.py", "tuned/notes.md")
    assert built.manifest.adapters == {"fr": str((root / "tuned/fr").resolve()), "far": "hf://org/far"}


def test_an_adapter_that_is_not_there_is_named(tmp_path: Path) -> None:
    options = 'model="weights", engine=True, adapters={"fr": "tuned"}'
    text = FUNCTION.replace("@model_function\n", f"@model_function({options})\n")
    write(tmp_path, {"function.py": text, "weights/config.json": "{}"})
    with pytest.raises(InvalidManifest, match=r"adapter directory .*tuned is not there") as caught:
        build(tmp_path)
    assert caught.value.field == "adapters"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"adapters": {"fr": "/fr"}}, "adapters need engine=True"),
        ({"model": "/m", "engine": True, "adapters": {"Fr": "/fr"}}, "'Fr' is no name"),
        ({"model": "/m", "engine": True, "adapters": {"fr": ""}}, "adapter 'fr' needs a place"),
        ({"model": "/m", "engine": True, "adapters": {f"a{n}": "/a" for n in range(257)}}, "257 adapters"),
    ],
)
def test_adapters_that_make_no_sense(fields: dict[str, Any], words: str) -> None:
    handler = {"entry": "f:f", "kind": "generator", "streams": True}
    with pytest.raises(ValueError, match=words):
        Manifest.model_validate({"name": "fn", "handler": handler, **fields})


def test_links_are_not_followed_out_of_the_directory(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"secret.txt": "s", "dir/x.txt": "x", "model/config.json": "{}"})
    text = FUNCTION.replace("@model_function\n", '@model_function(model="model")\n')
    root = write(tmp_path / "fn", {"function.py": text, "real.txt": "r"})
    (root / "leak.txt").symlink_to(outside / "secret.txt")
    (root / "dir").symlink_to(outside / "dir")
    (root / "model").symlink_to(outside / "model")
    (root / "alias.txt").symlink_to("real.txt")
    (root / "loop").symlink_to(".")
    built = build(root)
    assert built.files == ("alias.txt", "function.py", "real.txt")
    assert sorted(built.left_out) == ["dir", "leak.txt", "loop"]


def test_what_has_changed_since_it_was_imported_is_not_bundled_half(tmp_path: Path) -> None:
    """In a notebook: the file is edited, and what was imported of it before is deployed again."""
    old = "@model_function(memory='1GiB')\ndef hello(text: str) -> str:"
    write(tmp_path, {"function.py": FUNCTION.replace("@model_function\ndef hello(text: str) -> str:", old)})
    (function,) = load.load(str(tmp_path))
    assert bundle.build(function).manifest.memory == 1 << 30
    new = old.replace("1GiB", "2GiB").replace("text: str", "text: str, times: int = 2")
    write(tmp_path, {"function.py": FUNCTION.replace("@model_function\ndef hello(text: str) -> str:", new)})
    with pytest.raises(InvalidBundle, match=r"function.py has changed since hello was imported; import it again"):
        bundle.build(function)
    module = sys.modules.pop("function")
    importlib.invalidate_caches()
    (again,) = load.load(str(tmp_path))
    assert sys.modules["function"] is not module
    built = bundle.build(again)
    assert (built.manifest.memory, list(built.manifest.handler.input_schema["properties"])) == (
        2 << 30,
        ["text", "times"],
    )
    with pytest.raises(InvalidBundle, match="import it again"):  # as `%autoreload` leaves what a cell imported by name
        bundle.build(function)


def test_a_link_to_itself_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"function.py": FUNCTION})
    (tmp_path / "round").symlink_to("round")
    built = build(tmp_path)
    assert (built.files, built.left_out) == (("function.py",), ("round",))


def test_the_limit_names_the_largest(tmp_path: Path) -> None:
    write(tmp_path, {"function.py": FUNCTION, "small.txt": "x"})
    for name, mib in (("huge.bin", 3000), ("large.bin", 90)):  # sparse: nothing may read them
        with (tmp_path / name).open("wb") as file:
            file.truncate(mib * 2**20)
    with pytest.raises(BodyTooLarge, match=r"limit is 100\.0 MiB; largest: huge\.bin \(2\.9 GiB\), large\.bin"):
        build(tmp_path)


@pytest.mark.parametrize(("files", "nbytes", "warned"), [(199, 0, False), (200, 0, True), (1, 5 << 20, True)])
def test_a_large_bundle_of_which_nothing_is_left_out(tmp_path: Path, files: int, nbytes: int, warned: bool) -> None:
    write(tmp_path, {"function.py": FUNCTION, **{f"{number}.txt": "x" * nbytes for number in range(files)}})
    warning = build(tmp_path).warning
    assert bool(warning) is warned
    if warned:
        assert f"{files + 1} files" in warning
        assert f"{tmp_path}/.sllmignore" in warning
    write(tmp_path, {".sllmignore": "nothing.csv"})
    assert build(tmp_path).warning == ""


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"function.py": FUNCTION})
    function = load.one(str(tmp_path / "function.py"))
    (tmp_path / "gone.txt").symlink_to("nowhere.txt")
    assert bundle.build(function).files == ("function.py",)
    os.mkfifo(tmp_path / "pipe")
    assert bundle.build(function).files == ("function.py",)


def test_a_home_directory_is_never_bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, {"function.py": FUNCTION, "letters.txt": "private"})
    with pytest.raises(InvalidBundle, match="a directory of its own"):
        build(tmp_path)


def test_a_function_inside_a_function_is_refused(tmp_path: Path) -> None:
    nested = "\n".join("    " + line for line in FUNCTION.splitlines()[1:])
    write(
        tmp_path,
        {"function.py": f"from sllm import model_function\ndef make():\n{nested}\n    return hello\nx = make()"},
    )
    with pytest.raises(InvalidBundle, match=r"function\.py:\d+: hello is defined inside another function"):
        build(tmp_path)


def test_the_ignore_file_cannot_leave_out_the_function(tmp_path: Path) -> None:
    write(tmp_path, {"function.py": FUNCTION, ".sllmignore": "*.py"})
    with pytest.raises(InvalidBundle, match=r"function\.py itself is ignored"):
        build(tmp_path)


NAMES = st.text("abc.é ", min_size=1, max_size=6).filter(lambda name: name.strip(". ") == name)


@given(st.dictionaries(NAMES, st.binary(max_size=20), max_size=5), st.randoms())
def test_only_names_and_contents_count(contents: dict[str, bytes], random: Any) -> None:
    shuffled = list(contents.items())
    random.shuffle(shuffled)
    assert bundle.pack(dict(shuffled)) == bundle.pack(contents)
    archive = zipfile.ZipFile(io.BytesIO(bundle.pack(contents)))
    assert {name: archive.read(name) for name in archive.namelist()} == contents
    changed = {**contents, "new": b""}
    assert bundle.pack(changed) != bundle.pack(contents)


@given(
    st.sets(st.text("ab/", min_size=1, max_size=6), max_size=8),
    st.lists(st.sampled_from(["a", "b/", "!a", "/a/b", "*"])),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60))
def test_what_is_walked_is_what_the_patterns_leave(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], patterns: list[str]
) -> None:
    root = tmp_path_factory.mktemp("walk")
    for name in sorted(names):
        path = root / name.strip("/") if name.strip("/") else root / "x"
        if not path.exists() and all(parent.is_dir() or not parent.exists() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    rules = ignore.spec(root, tuple(patterns))
    found = list(ignore.files(root, rules))
    everything = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]

    def kept(name: str) -> bool:
        parts = name.split("/")
        parents = ["/".join(parts[:depth]) + "/" for depth in range(1, len(parts))]
        return not rules.match_file(name) and not any(rules.match_file(parent) for parent in parents)

    assert sorted(found) == sorted(name for name in everything if kept(name))


def test_times_and_order_on_disk_do_not_count(tmp_path: Path) -> None:
    first = build(write(tmp_path / "a", {"function.py": FUNCTION, "x.txt": "1", "y.txt": "2"}))
    second = write(tmp_path / "b", {"y.txt": "2", "x.txt": "1", "function.py": FUNCTION})
    os.utime(second / "x.txt", (1, 1))
    os.chmod(second / "y.txt", 0o600)
    del sys.modules["function"]
    sys.path.remove(str(tmp_path / "a"))
    assert build(second).digest == first.digest


@pytest.mark.parametrize("first", ["", "from __future__ import annotations"])
def test_a_function_of_main_travels_with_what_it_imports(tmp_path: Path, first: str) -> None:
    """Bundled by a program of its own, run by the worker's code. Its hints are what they are, also where they are
    texts."""
    write(tmp_path, {"main.py": first + PICKLES, "beside.py": SHOUT, "unused.py": ""})
    done = subprocess.run([sys.executable, tmp_path / "main.py"], capture_output=True, timeout=60, check=True)
    entry, _, data = done.stdout.partition(b"\n")
    assert entry == b"pickle:"
    assert sorted(zipfile.ZipFile(io.BytesIO(data)).namelist()) == ["beside.py", "function.pkl"]
    code = tmp_path / "worker"
    zipfile.ZipFile(io.BytesIO(data)).extractall(code)
    from sllm_runtime.protocol.manifest import Handler

    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    handler = Handler(entry="pickle:", kind="function", streams=False, python=minor)
    target, _ = workers.import_target(handler, code)
    assert target(text="you") == "hi YOU"
    assert target(**Arguments(target).convert({"text": "you", "how": {"mark": "!", "times": 2}})) == "hi YOU!!"
    with pytest.raises(InvalidArgument, match=r"'how\.mark' is missing"):
        Arguments(target).convert({"text": "you", "how": {}})
    with pytest.raises(InvalidArgument, match=r"'text': .*at most 9"):
        Arguments(target).convert({"text": "y" * 10})
    found = Arguments(target).convert({"text": "you", "place": {"hows": [{"mark": "!", "times": "2"}]}})
    assert found["place"].hows[0].times == 2


UNRESOLVED = """
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar
from sllm import bundle, model_function

if TYPE_CHECKING:
    import pandas as pd

@dataclass
class How:
    mark: str
    seen: ClassVar["pd.DataFrame"]

@dataclass
class Result:
    frame: "pd.DataFrame"

@model_function
def hello(how: How) -> Result:
    return Result(how.mark)

sys.stdout.buffer.write(bundle.build(hello).data)
"""


def test_hints_that_no_call_needs_are_not_looked_up(tmp_path: Path) -> None:
    """Those of what is returned, and of what is no field."""
    write(tmp_path, {"main.py": UNRESOLVED})
    data = zipfile.ZipFile(io.BytesIO(bundled(tmp_path, "main.py"))).read("function.pkl")
    (tmp_path / "function.pkl").write_bytes(data)
    call = """
import pickle
from sllm_runtime.worker.arguments import Arguments
target = pickle.load(open("function.pkl", "rb"))
print(target(**Arguments(target).convert({"how": {"mark": "!"}})).frame)
"""
    assert bundled(tmp_path, "-c", call) == b"!\n"


RECORDS = """
from __future__ import annotations
import sys
from datetime import datetime
from typing import NamedTuple, NewType
from pydantic import BaseModel
from typing_extensions import Required, TypeAliasType, TypedDict
from sllm import bundle, model_function

Name = NewType("Name", str)
Names = TypeAliasType("Names", list[Name])

class Told(TypedDict, total=False):
    when: Required[datetime]

class Outer(BaseModel):
    below: Below

class Below(BaseModel):
    told: Told

class Inner(NamedTuple):
    when: datetime

class Point(NamedTuple):
    x: int
    inner: Inner

@model_function
def hello(p: Point, name: Name, names: Names, told: Told, outer: Outer) -> str:
    return f"{name} {type(p).__name__} {p.inner.when.year} {names[0]} {told['when'].year} {type(outer.below).__name__}"

sys.stdout.buffer.write(bundle.build(hello).data)
"""


def test_types_of_all_kinds_of_main_travel(tmp_path: Path) -> None:
    write(tmp_path, {"main.py": RECORDS})
    data = zipfile.ZipFile(io.BytesIO(bundled(tmp_path, "main.py"))).read("function.pkl")
    (tmp_path / "function.pkl").write_bytes(data)
    call = """
import pickle
from sllm_runtime.worker.arguments import Arguments
target = pickle.load(open("function.pkl", "rb"))
when = "2026-01-02T03:04:05"
told = {"when": when}
given = {"p": [1, [when]], "name": "me", "names": ["you"], "told": told, "outer": {"below": {"told": told}}}
print(target(**Arguments(target).convert(given)))
"""
    assert bundled(tmp_path, "-c", call) == b"me Point 2026 you 2026 Below\n"


HINTED = """
from __future__ import annotations
import sys
from dataclasses import dataclass
from typing import NamedTuple, NewType
from pydantic import BaseModel
from typing_extensions import TypeAliasType
from sllm import bundle, model_function

@dataclass
class Inner:
    y: int

@dataclass
class Outer:
    inner: Inner

{more}

@model_function
def hello(p: {hint}) -> str:
    return "{hint}"

sys.stdout.buffer.write(bundle.build(hello).data)
"""


@pytest.mark.parametrize(
    ("more", "hint", "given"),
    [
        ("", "BaseModel", {}),
        ('Named = NewType("Named", Outer)', "Named", {"inner": {"y": 1}}),
        ('Many = TypeAliasType("Many", list[Outer])', "Many", [{"inner": {"y": 1}}]),
    ],
)
def test_hints_travel(tmp_path: Path, more: str, hint: str, given: object) -> None:
    write(tmp_path, {"main.py": HINTED.format(more=more, hint=hint)})
    data = zipfile.ZipFile(io.BytesIO(bundled(tmp_path, "main.py"))).read("function.pkl")
    (tmp_path / "function.pkl").write_bytes(data)
    call = f"""
import pickle
from sllm_runtime.worker.arguments import Arguments
target = pickle.load(open("function.pkl", "rb"))
print(target(**Arguments(target).convert({{"p": {given!r}}})))
"""
    assert bundled(tmp_path, "-c", call).decode() == f"{hint}\n"


MAIN = """
import sys
from sllm import bundle, model_function
{imports}

@model_function({options})
def hello(text: str) -> str:
    return shout(text)

sys.stdout.buffer.write(bundle.build(hello).data)
"""
SHOUT = "def shout(text):\n    return text.upper()\n"
CALL = "import pickle; print(pickle.load(open('function.pkl', 'rb'))('hi'))"


def ran(where: Path, *words: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [sys.executable, *words], cwd=where, env={**os.environ, **env}, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done


def bundled(where: Path, *words: str, **env: str) -> bytes:
    """What a program of ``MAIN`` writes."""
    return ran(where, *words, **env).stdout


@pytest.mark.parametrize(
    ("files", "words", "path", "names"),
    [
        ({"pkg/__init__.py": "", "pkg/util.py": SHOUT, "lib/__init__.py": "", "lib/x.py": ""}, ("-m", "pkg.main"), "",
         ["lib/__init__.py", "lib/x.py", "pkg/__init__.py", "pkg/util.py"]),
        ({"pkg/util.py": SHOUT, "lib/x.py": ""}, ("-m", "pkg.main"), "", ["lib/x.py", "pkg/util.py"]),
        ({"pkg/__init__.py": "", "pkg/util.py": SHOUT, "lib/x.py": ""}, ("pkg/main.py",), ".",
         ["pkg/__init__.py", "pkg/util.py"]),
        ({"pkg/src/pkg/util.py": SHOUT, "lib/x.py": ""}, ("pkg/main.py",), "pkg/src:.", ["pkg/util.py"]),
    ],
)  # fmt: skip
def test_modules_travel_by_the_names_that_they_are_imported_by(
    tmp_path: Path, files: dict[str, str], words: tuple[str, ...], path: str, names: list[str]
) -> None:
    """However the program is started, and wherever their files lie."""
    main = MAIN.format(imports="import lib.x\nfrom pkg.util import shout", options="")
    write(tmp_path, {**files, "pkg/main.py": main})
    archive = zipfile.ZipFile(io.BytesIO(bundled(tmp_path, *words, PYTHONPATH=path)))
    assert sorted(archive.namelist()) == ["function.pkl", *names]
    archive.extractall(tmp_path / "worker")
    assert bundled(tmp_path / "worker", "-c", CALL) == b"HI\n"


@pytest.mark.parametrize(
    ("files", "line", "names"),
    [
        ({"beside.py": SHOUT}, "from beside import shout", ["beside.py"]),
        ({"pkg/__init__.py": "", "pkg/beside.py": SHOUT, "pkg/more.py": ""},
         "from pkg import beside; shout = beside.shout", ["pkg/__init__.py", "pkg/beside.py"]),
        ({"beside.py": "def shout(text):\n    import deep\n    return deep.shout(text)\n", "deep.py": SHOUT},
         "from beside import shout", ["beside.py", "deep.py"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("early", [False, True])
def test_what_is_imported_inside_a_function_travels_too(
    tmp_path: Path, files: dict[str, str], line: str, names: list[str], early: bool
) -> None:
    """Nobody has imported it when the function is bundled."""
    imports = line if early else ""
    main = MAIN.format(imports=imports, options="").replace(
        "    return shout", f"    {'' if early else line + '; '}return shout"
    )
    write(tmp_path, {"main.py": main, **files})
    archive = zipfile.ZipFile(io.BytesIO(bundled(tmp_path, "main.py")))
    assert sorted(archive.namelist()) == sorted(["function.pkl", *names])
    archive.extractall(tmp_path / "worker")
    assert bundled(tmp_path / "worker", "-c", CALL) == b"HI\n"


def test_a_cell_that_a_debugger_has_written_to_a_file_is_a_notebooks(tmp_path: Path) -> None:
    """As JupyterLab's does, somewhere below /tmp: the notebook's directory is the current one all the same."""
    cell = MAIN.format(imports="from beside import shout", options="")
    kernel = "import sys\nsys.path.insert(0, '')\nexec(compile(open(%r).read(), %r, 'exec'))"
    write(tmp_path, {"notebooks/beside.py": SHOUT, "ipykernel_1/12.py": cell})
    file = str(tmp_path / "ipykernel_1/12.py")
    archive = zipfile.ZipFile(io.BytesIO(bundled(tmp_path / "notebooks", "-c", kernel % (file, file))))
    assert sorted(archive.namelist()) == ["beside.py", "function.pkl"]


@pytest.mark.parametrize("file", ["01_prep.py", "my-steps/__init__.py"])
def test_a_module_travels_whose_name_is_no_identifier(tmp_path: Path, file: str) -> None:
    imports = f"import importlib\nshout = importlib.import_module({file.partition('.')[0].partition('/')[0]!r}).shout"
    write(tmp_path, {"main.py": MAIN.format(imports=imports, options=""), file: SHOUT})
    archive = zipfile.ZipFile(io.BytesIO(bundled(tmp_path, "main.py")))
    assert set(archive.namelist()) == {file, "function.pkl"}
    archive.extractall(tmp_path / "worker")
    assert bundled(tmp_path / "worker", "-c", CALL) == b"HI\n"


@pytest.mark.parametrize(
    ("imports", "options", "lacks", "warns"),
    [
        ("import far", "", "ModuleNotFoundError", True),
        ("import far", "image='mine:3'", "ModuleNotFoundError", False),
        ("import cloudpickle, far; cloudpickle.register_pickle_by_value(far)", "", "", False),
        ("import cloudpickle, far.off as far; cloudpickle.register_pickle_by_value(far)", "", "", False),
        ("import cloudpickle, far, far.off; cloudpickle.register_pickle_by_value(far); far = far.off", "", "", False),
    ],
)
def test_a_module_that_nothing_takes_along_is_named(
    tmp_path: Path, imports: str, options: str, lacks: str, warns: bool
) -> None:
    """And not refused: the nodes may have one, as whose daemons have a PYTHONPATH."""
    main = MAIN.format(imports=imports, options=options).replace("shout(text)", "far.shout(text)")
    write(tmp_path, {"app/main.py": main, "lib/far/__init__.py": SHOUT, "lib/far/off.py": SHOUT})
    done = ran(tmp_path / "app", "main.py", PYTHONPATH="../lib")
    named = re.search(r"UserWarning: hello \(main\.py:6\) uses 'far' \(.*/far/__init__\.py\)", done.stderr.decode())
    assert bool(named) is warns, done.stderr
    assert warns or not done.stderr
    zipfile.ZipFile(io.BytesIO(done.stdout)).extractall(tmp_path / "worker")
    assert bundled(tmp_path / "worker", "-c", CALL, PYTHONPATH="../lib") == b"HI\n"
    if lacks:
        with pytest.raises(AssertionError, match=lacks):
            bundled(tmp_path / "worker", "-c", CALL)
    else:
        assert bundled(tmp_path / "worker", "-c", CALL) == b"HI\n"


def test_what_is_installed_does_not_travel() -> None:
    """Though all of it may lie below a home directory."""
    for module in (json, pytest, bundle):
        assert pickled.modules(Path(str(module.__file__)).resolve().parents[1]) == {}
    own = pickled.modules(Path(__file__).resolve().parents[3])
    assert own[__name__] == Path(__file__).resolve()


def test_include_brings_files_of_a_program(tmp_path: Path) -> None:
    main = MAIN.format(imports="from beside import shout", options="include=['data/*.bin', 'w.pt']")
    write(tmp_path, {"main.py": main, "beside.py": SHOUT, "data/a.bin": "a", "data/b.txt": "b", "w.pt": "w", "c": ""})
    archive = zipfile.ZipFile(io.BytesIO(bundled(tmp_path, "main.py")))
    assert sorted(archive.namelist()) == ["beside.py", "data/a.bin", "function.pkl", "w.pt"]
    (tmp_path / "w.pt").unlink()
    with pytest.raises(AssertionError, match=r"include='w\.pt' matches no file"):
        bundled(tmp_path, "main.py")


@pytest.mark.parametrize("include", ["data/*.bin", None, 3, [3]])
def test_an_include_that_is_no_list_is_named(tmp_path: Path, include: Any) -> None:
    write(tmp_path, {"function.py": FUNCTION.replace("@model_function\n", f"@model_function(include={include!r})\n")})
    with pytest.raises(InvalidManifest, match="hello: include is a list of patterns") as caught:
        build(tmp_path)
    assert caught.value.field == "include"


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    program = """
import threading
from sllm import bundle, model_function
lock = threading.Lock()

@model_function
def hello(text: str) -> str:
    with lock:
        return text

bundle.build(hello)
"""
    write(tmp_path, {"main.py": program})
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py"], capture_output=True, text=True, timeout=60, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "InvalidBundle: hello (main.py:6) cannot be pickled: it uses 'lock' (_thread.lock)" in last
    assert "create it inside the function" in last


@pytest.mark.parametrize("line", ["from apart.data import x", "from cloudy.deep import storage"])
def test_a_namespace_package_in_one_that_nothing_imported(tmp_path: Path, line: str) -> None:
    """Python looks for the parent's module to know where such a package is."""
    program = "from sllm import bundle, model_function\n\n@model_function\ndef hello(text: str) -> str:\n"
    program += f"    {line}\n    return text\n\nbundle.build(hello)\n"
    for name in ("apart/__init__.py", "apart/data/x.py", "cloudy/deep/storage.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]


COUNTED = """
import sys
from collections import Counter, defaultdict
from pydantic import BaseModel
from sllm import bundle, model_function

class Seen(BaseModel):
    words: Counter = Counter()
    lists: defaultdict[str, list[int]] = defaultdict(list)

@model_function
def hello(text: str) -> str:
    seen = Seen()
    seen.words[text] += 1
    seen.lists[text].append(1)
    return f"{type(seen.words).__name__} {type(seen.lists).__name__}"

sys.stdout.buffer.write(bundle.build(hello).data)
"""


def test_a_default_of_a_model_stays_what_it_is(tmp_path: Path) -> None:
    write(tmp_path, {"main.py": COUNTED})
    data = zipfile.ZipFile(io.BytesIO(bundled(tmp_path, "main.py"))).read("function.pkl")
    (tmp_path / "function.pkl").write_bytes(data)
    call = "import pickle; print(pickle.load(open('function.pkl', 'rb'))('a'))"
    assert bundled(tmp_path, "-c", call) == b"Counter defaultdict\n"


CALLS_ANOTHER = """
import sys
from sllm import bundle, model_function

@model_function
def shout(text: str) -> str:
    return text.upper()

@model_function
def hello(text: str) -> str:
    return shout(text)

sys.stdout.buffer.write(bundle.build(hello).data)
"""


def test_what_is_beside_a_function_of_main_does_not_decide_its_digest(tmp_path: Path) -> None:
    write(tmp_path, {"main.py": CALLS_ANOTHER})
    before = bundled(tmp_path, "main.py")
    write(tmp_path, {"main.py": CALLS_ANOTHER + "# a word more, that no call needs\n"})
    assert bundled(tmp_path, "main.py") == before

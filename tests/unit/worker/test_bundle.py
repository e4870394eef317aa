from __future__ import annotations

import io
import os
import stat
import sys
import zipfile
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_runtime.protocol.errors import InvalidBundle, PythonMismatch
from sllm_runtime.protocol.manifest import TARGET_ATTRIBUTE, Handler
from sllm_runtime.worker.bundle import import_target, unpack
from tests.unit.worker.harness import bundle_of, sealed


def test_files_arrive(tmp_path: Path) -> None:
    unpack(sealed(bundle_of({"a.py": "x = 1", "pkg/b/c.txt": b"\0"})), tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 1"
    assert (tmp_path / "pkg/b/c.txt").read_bytes() == b"\0"


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a\\..\\x", link("l")])
def test_what_leads_outside_is_refused_before_anything_is_written(tmp_path: Path, name: str | zipfile.ZipInfo) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("good.py", "")
        archive.writestr(name, "target")
    with pytest.raises(InvalidBundle, match=r"leads out|link"):
        unpack(sealed(buffer.getvalue()), tmp_path / "in")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["/tmp", "..", "good"])
def test_a_file_below_a_link_is_refused_before_anything_is_written(tmp_path: Path, target: str) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("good/good.py", "")
        archive.writestr(link("away"), target)
        archive.writestr("away/planted.py", "")
    with pytest.raises(InvalidBundle, match="'away' is a link"):
        unpack(sealed(buffer.getvalue()), tmp_path / "in")
    assert not list(tmp_path.iterdir())


def test_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sllm_runtime.worker.bundle.MAX_BUNDLE", 1000)
    with pytest.raises(InvalidBundle, match="limit"):
        unpack(sealed(bundle_of({"a": b"0" * 1001})), tmp_path)


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidBundle):
        unpack(sealed(data), Path("/nowhere"))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    data = bundle_of({"a": b"hello" * 100})
    with pytest.raises(InvalidBundle, match="cannot be unpacked"):
        unpack(sealed(data.replace(b"hellohello", b"hellpzello", 1)), tmp_path)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def handler(entry: str, python: str | None = None) -> Handler:
    return Handler(entry=entry, kind="function", streams=False, python=python)


def test_a_decorated_object_is_unwrapped(tmp_path: Path) -> None:
    source = f"def raw(): pass\nclass D: pass\nfn = D()\nsetattr(fn, {TARGET_ATTRIBUTE!r}, raw)\n"
    (tmp_path / "unwrapped_mod.py").write_text(source)
    target, module = import_target(handler("unwrapped_mod:fn"), tmp_path)
    assert module is not None
    assert target is module.raw


def test_pickled_functions(tmp_path: Path) -> None:
    offset = 3
    (tmp_path / "function.pkl").write_bytes(cloudpickle.dumps(lambda value: value + offset))
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    target, module = import_target(handler("pickle:", minor), tmp_path)
    assert (target(1), module) == (4, None)
    with pytest.raises(PythonMismatch, match=r"2\.7"):
        import_target(handler("pickle:", "2.7"), tmp_path)
    os.unlink(tmp_path / "function.pkl")
    with pytest.raises(InvalidBundle, match=r"function\.pkl"):
        import_target(handler("pickle:"), tmp_path)

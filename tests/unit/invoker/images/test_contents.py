"""What an image of this machine would hold, of the installation that runs these tests."""

import io
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from sllm_invoker.images import archive, compiled, contents, distributions, entries, libraries, places

SITE = contents.SITE


@pytest.fixture(scope="module")
def system() -> entries.Layer:
    return contents.system()


def tar_of(layer: entries.Layer) -> tarfile.TarFile:
    out = io.BytesIO()
    archive.write(layer, out)
    out.seek(0)
    return tarfile.open(fileobj=out)


def test_what_a_worker_imports_is_there(system: entries.Layer) -> None:
    home = f"{places.PYTHON_HOME}/lib/python{contents.MINOR}"
    for name in (f"{SITE}/torch/__init__.py", f"{SITE}/torch/bin/torch_shm_manager", f"{SITE}/transformers/__init__.py",
                 f"{SITE}/msgspec/__init__.py", f"{home}/os.py", f"{home}/asyncio/__init__.py"):  # fmt: skip
        assert name in system.files
    assert system.files[f"{places.PYTHON_HOME}/bin/python{contents.MINOR}"] == contents.interpreter()
    assert any(name.endswith("/libc.so.6") for name in system.files)


def test_what_no_worker_needs_is_not_there(system: entries.Layer) -> None:
    names = set(system.files)
    assert not any(name.startswith((f"{SITE}/torch/include/", f"{SITE}/torch/test/")) for name in names)
    for tool in ("pytest", "mypy", "boto3", "nats", "uvicorn"):
        assert f"{SITE}/{tool}/__init__.py" not in names


def test_ours_tells_nothing_of_this_machine() -> None:
    files = contents.ours().files
    assert f"{SITE}/sllm_runtime/worker/main.py" in files
    assert f"{SITE}/sllm/__init__.py" in files
    assert any(name.endswith(".dist-info/METADATA") for name in files)
    assert not any(name.endswith(("direct_url.json", ".pth", "RECORD")) for name in files)
    assert not any("sllm_gateway" in name or "sllm_invoker" in name for name in files)


def test_every_requirement_of_what_is_inside_is_inside() -> None:
    """As pip checks it: nothing inside asks for something installed that is outside."""
    names = {distribution.name.lower().replace("_", "-") for distribution in distributions.closure()}
    assert {"torch", "numpy", "transformers", "msgspec", "pydantic", "pydantic-core"} <= names
    assert "sllm" not in names
    assert all("==" in pin and "+" not in pin for pin in distributions.pins())


def test_digests_are_of_the_contents_alone() -> None:
    first, second = contents.digests(), contents.digests()
    assert first == second
    assert first.base != first.system
    assert first.python == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_digest_changes_with_a_name_or_a_byte_and_not_with_byte_code(tmp_path: Path) -> None:
    one, other, code = tmp_path / "one.py", tmp_path / "other.py", tmp_path / "one.pyc"
    one.write_text("a = 1\n")
    other.write_text("a = 2\n")
    code.write_bytes(b"x")
    digests = {
        entries.digest_of(files)
        for files in ({"m.py": one}, {"m.py": other}, {"n.py": one}, {"m.py": one, "n.py": one})
    }
    assert len(digests) == 4
    assert entries.digest_of({"m.py": one, "m.pyc": code}) == entries.digest_of({"m.py": one})


def test_what_the_loader_finds_is_read_and_what_it_does_not_is_passed_over() -> None:
    text = (
        "/usr/bin/python3:\n"
        "\tlinux-vdso.so.1 (0x00007fae52418000)\n"
        "\tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007fae51b3e000)\n"
        "\tlibcuda.so.1 => not found\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x00007fae5241a000)\n"
        "/etc/passwd:\n\tnot a dynamic executable\n"
    )
    expected = {Path("/lib/x86_64-linux-gnu/libm.so.6"), Path("/lib64/ld-linux-x86-64.so.2")}
    assert libraries.parse(text) == expected


def test_a_layer_is_roots_readable_by_all_and_has_no_setuid_bit(tmp_path: Path) -> None:
    program, data = tmp_path / "program", tmp_path / "data"
    program.write_text("x")
    data.write_text("secretly private")
    program.chmod(0o4750)
    data.chmod(0o600)
    layer = entries.Layer(
        {"opt/a/program": program, "opt/a/data": data},
        texts={"etc/passwd": "root"},
        links={"bin/p": "/opt/a/program"},
        directories=places.DIRECTORIES,
    )
    with tar_of(layer) as tar:
        found = {member.name: member for member in tar}
    assert all((member.uid, member.gid, member.uname) == (0, 0, "root") for member in found.values())
    assert not any(member.mode & (stat.S_ISUID | stat.S_ISGID) for member in found.values())
    assert (found["opt/a/program"].mode, found["opt/a/data"].mode) == (0o755, 0o644)
    assert found["tmp"].mode == 0o1777
    assert found["bin/p"].linkname == "/opt/a/program"
    names = list(found)
    assert names.index("opt") < names.index("opt/a") < names.index("opt/a/data")


def test_our_byte_code_is_taken_whatever_time_its_source_has(tmp_path: Path) -> None:
    source, broken = tmp_path / "m.py", tmp_path / "broken.py"
    source.write_text("compiled = True\n")
    broken.write_text("def (:\n")
    stale = tmp_path / "stale.pyc"
    stale.write_bytes(b"x")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    old = f"opt/__pycache__/m.{sys.implementation.cache_tag}.pyc"
    found = compiled.compiled({"opt/m.py": source, "opt/broken.py": broken, old: stale}, scratch)
    assert set(found) == {"opt/m.py", "opt/broken.py", old}
    code = tmp_path / old
    code.parent.mkdir(parents=True)
    shutil.copy(found[old], code)
    (tmp_path / "opt/m.py").write_text("compiled = 'from the source, which is younger'\n")
    words = [sys.executable, "-c", "import m; print(m.compiled)"]
    done = subprocess.run(words, cwd=tmp_path / "opt", capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"


def test_the_layer_of_ours_is_written_whole_by_the_program() -> None:
    words = [sys.executable, "-m", "sllm_invoker.images", "ours"]
    done = subprocess.run(words, capture_output=True, timeout=120, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        names = tar.getnames()
    assert f"{SITE}/sllm_runtime/worker/main.py" in names
    assert f"{SITE}/sllm_runtime/worker/__pycache__/main.{sys.implementation.cache_tag}.pyc" in names

"""The parts of ``cold_start`` that need no platform: page cache, synthetic model, what peers print."""

import ast
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cold_cases, page_cache, synthetic
from benchmarks.cold_cases import Check, Stages
from benchmarks.cold_peers import FOREIGN, script, text_of
from benchmarks.platform import Platform
from benchmarks.programs import ROOT, ProgramFailed
from benchmarks.record import Case
from benchmarks.runner import Run
from sllm_runtime.protocol.timeline import Span
from sllm_runtime.worker.imports import PRELOAD
from tests.fixtures.waiting import GIVE_UP_S


def test_what_was_written_is_cached_and_what_was_dropped_is_not(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(3 * 2**20))
    if page_cache.cached_bytes(file) < file.stat().st_size:
        pytest.skip("this filesystem keeps no page cache to look at")
    page_cache.drop(file)
    assert page_cache.cached_bytes(file) == 0
    with file.open("rb") as opened:
        opened.read(4096)
    assert page_cache.cached_bytes(file) > 0


def test_what_a_program_that_ends_has_mapped_is_dropped_when_it_has(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(3 * 2**20))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped[:]) == 3 * 2**20  # every page of it is in the cache, and mapped
        if not page_cache.cached_bytes(file):
            pytest.skip("this filesystem keeps no page cache to look at")
        with pytest.raises(ProgramFailed, match="somebody has it mapped"):
            page_cache.drop(file, settle_s=0.0)
        with ThreadPoolExecutor(1) as pool:
            dropped = pool.submit(page_cache.drop, file, settle_s=GIVE_UP_S)
            mapped.close()
            dropped.result()
    assert page_cache.cached_bytes(file) == 0


@pytest.mark.parametrize("size", [4096, 5 * 2**20, 5 * 2**20 + 4096])
def test_direct_reads_bring_the_whole_file_and_cache_nothing(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(size))
    page_cache.drop(file)
    try:
        made = page_cache.direct_read(file, 3, 2**20)
    except OSError as error:
        pytest.skip(f"this filesystem has no direct I/O: {error}")
    assert made.seconds > 0
    assert made.mib == 3
    assert page_cache.cached_bytes(file) == 0


def test_the_synthetic_model_is_safetensors_with_the_digests_it_says(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    model = synthetic.write(tmp_path / "model", 2 * synthetic.TENSOR_BYTES, step=1024)
    # numpy has no bf16: the same bytes under a type of the same size.
    file = model.directory / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"I16" '))
    tensors = load_file(file)

    assert model.count == 2
    flat = [tensors[f"tensors.{number}"].reshape(-1).astype(np.int64) for number in range(2)]
    assert model.whole == flat[0].sum() + 2 * flat[1].sum()
    assert model.sampled == flat[0][::1024].sum() + 2 * flat[1][::1024].sum()
    assert not (flat[0] == flat[1]).all()


def test_a_platform_that_does_not_come_up_ends_no_other_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_directory: Path) -> Platform:
        raise ProgramFailed("no port is free")

    monkeypatch.setattr(cold_cases, "Platform", fails)
    run = Run(quick=True)
    cold_cases.with_pool(run, tmp_path, ("warm_pool",))
    assert [(case.system, case.not_run) for case in run.cases] == [("sllm", "failed: no port is free")]
    assert [aim.met for aim in run.aims] == [False]


def test_another_text_is_an_error() -> None:
    check = Check()
    check.same("sllm", "abc")
    check.same("ray serve", "abc")
    with pytest.raises(ProgramFailed, match="ray serve"):
        check.same("ray serve", "abd")


def test_stages_are_medians_of_what_the_timelines_said() -> None:
    stages, case = Stages(), Case("c", "sllm", "ms")
    for ms in (1.0, 5.0, 2.0):
        stages.add((Span("weights", 0.0, ms), Span("tokens", 0.0, 99.0)))
    stages.into(case)
    assert case.extra == {"weights_ms": 2.0}


def test_a_bare_import_is_of_nothing_that_a_start_does_not_import() -> None:
    """A reference that does more is no limit."""
    code = f"import sys\nfor name in {FOREIGN!r}: __import__(name)\nprint('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GIVE_UP_S, check=True)
    assert set(FOREIGN) < set(PRELOAD)
    assert done.stdout == "False\n"


def test_a_script_is_told_with_what_it_used(tmp_path: Path) -> None:
    model = synthetic.write(tmp_path / "model", synthetic.TENSOR_BYTES, step=1024)
    made = script(tmp_path, "gigabyte.py", [str(model.directory), "1024"])
    assert made.text == str(model.sampled)
    assert made.cpu_s > 0
    assert made.mib > 0


def test_a_file_is_emptied_out_of_the_page_cache_also_where_it_is_read_before(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(3 * 2**20))
    try:
        page_cache.empty(file)
    except OSError as error:
        pytest.skip(f"this filesystem has no direct I/O: {error}")
    assert page_cache.cached_bytes(file) == 0


def test_text_of_plain_text_events_and_what_bentoml_calls_events() -> None:
    assert text_of(b"a b", "text/plain") == "a b"
    assert text_of(b"data: a\n\ndata:  b\n\n", "text/event-stream") == "a b"
    assert text_of(b"a b", "text/event-stream") == "a b"


def test_ray_makes_its_tokens_by_the_same_code() -> None:
    def body(path: Path) -> list[str]:
        tree = ast.parse(path.read_text())
        found = next(node for node in tree.body if isinstance(node, ast.AsyncFunctionDef) and node.name == "tokens")
        return [ast.unparse(statement) for statement in found.body[1:]]

    ours = ROOT / "benchmarks" / "functions" / "paced" / "function.py"
    assert body(ROOT / "benchmarks" / "peers" / "ray_stream.py") == body(ours)

"""The parts of ``load`` that need no daemon: checkpoints, fio's report, clocks, sums over loads."""

import functools
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from benchmarks import page_cache
from benchmarks.load_bench import Bench
from benchmarks.load_model import ONE, TWO_AND_A_HALF, Shape, write
from benchmarks.load_node import cpu_clock
from benchmarks.load_reference import BLOCK, FIO, READS, fastest, limits, read_report, reference
from benchmarks.load_ssd import rounds, same
from benchmarks.load_store import ranges
from benchmarks.load_systems import MODEL_PEERS, SCRIPTS, Loader, Loading, Programs, take
from benchmarks.programs import Program, ProgramFailed
from benchmarks.record import Case
from benchmarks.runner import Run

SMALL = Shape(1, 64, 128)


def test_a_written_checkpoint_is_one_that_safetensors_opens_with_no_nan(tmp_path: Path) -> None:
    made = write(tmp_path / "m", SMALL)
    with safe_open(made.weights, framework="pt") as file:
        names = list(file.keys())
        assert sorted(names) == sorted(json.loads(made.names.read_text()))
        tensors = [file.get_tensor(name) for name in names]
    assert made.tensors == len(tensors)
    assert made.nbytes == sum(tensor.numel() * 2 for tensor in tensors)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)


def test_a_digest_says_which_bytes_were_written(tmp_path: Path) -> None:
    first, again, other = (write(tmp_path / name, SMALL, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    same("sllm", again.digest, first.digest)
    with pytest.raises(ProgramFailed, match="other tensors"):
        same("sllm", other.digest, first.digest)


@pytest.mark.parametrize(("shape", "gigabytes", "tensors"), [(ONE, 1.0, 80), (TWO_AND_A_HALF, 2.5, 1000)])
def test_the_shapes_are_of_the_sizes_their_cases_are_called_by(shape: Shape, gigabytes: float, tensors: int) -> None:
    made = shape.tensors()
    nbytes = sum(2 * rows * (columns[0] if columns else 1) for _, (rows, *columns) in made)
    assert gigabytes <= nbytes / 1e9 < gigabytes * 1.1
    assert len(made) >= tensors


def _report(nbytes: int, error: int = 0) -> str:
    read = {"io_bytes": nbytes, "bw_bytes": 2 * BLOCK}
    job = {"read": read, "error": error, "usr_cpu": 1.0, "sys_cpu": 4.0, "job_runtime": 2000}
    return "fio: a note\n" + json.dumps({"jobs": [job]})


def test_fio_is_believed_when_it_read_the_whole_file() -> None:
    made = read_report(_report(8 * BLOCK), 8 * BLOCK)
    assert made.seconds == pytest.approx(4.0)
    assert made.cpu_s == pytest.approx(0.1)


@pytest.mark.parametrize("text", [_report(7 * BLOCK), _report(8 * BLOCK, error=5), "fio: no", "{}"])
def test_fio_is_not_believed_when_it_did_not(text: str) -> None:
    with pytest.raises(ProgramFailed, match=r"fio (read|wrote)"):
        read_report(text, 8 * BLOCK)


def test_the_cpu_clock_of_a_process_is_its_own() -> None:
    before, known = time.clock_gettime(cpu_clock(os.getpid())), time.process_time()
    after = time.clock_gettime(cpu_clock(os.getpid()))
    assert before <= known <= after


def test_fewer_cores_are_used_inside_only_by_programs_too(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    with Programs(tmp_path) as programs:
        pid = programs.own("load_boto3.py").pid
        with Bench(Run(quick=False), tmp_path, programs).on_cores(1):
            assert len(os.sched_getaffinity(0)) == len(os.sched_getaffinity(pid)) == 1
        assert os.sched_getaffinity(0) == os.sched_getaffinity(pid) == before


def test_a_program_is_started_once_and_again_when_it_has_ended(tmp_path: Path) -> None:
    with Programs(tmp_path) as programs:
        first, other = programs.own("load_boto3.py"), programs.own("load_boto3.py", lane=1)
        assert programs.own("load_boto3.py") is first is not other
        assert sorted(programs.pids) == sorted((first.pid, other.pid))
        with pytest.raises(ProgramFailed, match="ended"):
            Loader(first, {"endpoint": "http://127.0.0.1:9"}).load()  # no bucket is named: it ends with that
        assert programs.pids == [other.pid]
        assert programs.own("load_boto3.py") is not first
    assert not programs.pids


def test_a_case_has_the_mean_of_costs_and_the_peak_of_memory() -> None:
    case = Case("c", "sllm", "s")
    for seconds, cpu_s, peak, daemon in ((1.0, 0.1, 50.0, 0.3), (3.0, 0.3, 40.0, 0.1)):
        take(case, Loading(seconds, seconds / 2, cpu_s, cpu_s, 10, 0, 2, peak, 7, "", daemon))
    assert (case.samples, case.cpu_s, case.peak_rss_mib) == ([1.0, 3.0], 0.4, 50.0)
    assert case.extra == {"loaded_s": 1.0, "minor_faults": 10, "major_faults": 0, "touch_faults": 2}


def test_every_peer_has_its_program() -> None:
    assert all((SCRIPTS / peer.words[0]).is_file() for peer in MODEL_PEERS)


@given(st.integers(0, 10**12), st.integers(1, 64))
def test_ranges_cover_every_byte_once(nbytes: int, count: int) -> None:
    borders = [edge for first, last in ranges(nbytes, count) for edge in (first, last + 1)]
    assert borders == sorted(borders)
    assert sum(last - first + 1 for first, last in ranges(nbytes, count)) == nbytes


def test_a_limit_that_cannot_be_measured_here_is_listed_with_the_reason(tmp_path: Path) -> None:
    file, case, tried = tmp_path / "file", Case("c", "fio", "s"), []
    file.write_bytes(b"x" * 4096)

    def read(of: Path) -> page_cache.DiskRead:
        tried.append(of)
        raise ProgramFailed("fio is not installed")

    for _ in range(2):
        reference(case, read, file, primed=False)
    assert (case.not_run, case.samples, tried) == ("fio is not installed", [], [file])


def test_the_limits_bring_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(2 * BLOCK + 4096))
    cases = {system: Case("c", system, "ms") for system in limits()}
    try:
        for system, read in limits().items():
            reference(cases[system], read, file)
        assert fastest(file) in READS
    except OSError as error:
        pytest.skip(f"this filesystem has no direct I/O: {error}")
    assert all(case.median if system not in FIO else case.median or case.not_run for system, case in cases.items())


class Sums:
    """A loading program that touches what it is told."""

    def __init__(self, sums: Sequence[int]) -> None:
        self._sums = iter(sums)

    def say(self, message: object) -> None:
        pass

    def hear(self, timeout_s: float) -> dict[str, Any]:
        return {"touched": next(self._sums)} | dict.fromkeys(
            ("seconds", "loaded_s", "cpu_s", "loaded_cpu_s", "minor_faults", "major_faults", "touch_faults"), 0
        ) | {"peak_rss_mib": 1.0, "digest": "d"}  # fmt: skip


def test_a_load_that_touches_other_bytes_than_the_first_like_it_is_an_error(tmp_path: Path) -> None:
    loader = Loader(cast(Program, Sums([7, 7, 9, 5, 5, 8])), {"model": "m"})
    loader.load(tmp_path / "names")
    loader.load()
    loader.load(model="another")
    loader.load(read_all=True)
    loader.load(read_all=True, populated=True)
    with pytest.raises(ProgramFailed, match="their sum is 8, not 7"):
        loader.load(read_all=False)


def test_cores_are_given_back_where_a_program_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    before = os.sched_getaffinity(0)
    with Programs(tmp_path) as programs:
        monkeypatch.setattr(Programs, "pids", [ended.pid])
        with Bench(Run(quick=False), tmp_path, programs).on_cores(1):
            assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("count", [2, 3])
def test_each_round_begins_with_another_system(count: int) -> None:
    run, order = Run(quick=True), list[int]()
    rounds(run, "c", [functools.partial(order.append, number) for number in range(count)], each=2)
    assert len(order) == count * 2 * run.rounds
    assert order[::count] == [number % count for number in range(2 * run.rounds)]

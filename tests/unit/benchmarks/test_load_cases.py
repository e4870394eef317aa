"""What single cases of ``load`` stand on: copies, adapters, slower disks, peers that are left out, charts."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from benchmarks import load, load_copies
from benchmarks.chart import bars
from benchmarks.charts import charts, write_charts
from benchmarks.load_abilities import YES, abilities
from benchmarks.load_adapter import LARGE, SMALL, AdapterShape, write_adapter
from benchmarks.load_bench import Bench, Converted
from benchmarks.load_copies import make_copy, size
from benchmarks.load_model import ONE, QUICK, Checkpoint, Shape, write_tensors
from benchmarks.load_ssd import Competitor, near
from benchmarks.load_systems import MODEL_PEERS, NOT_HERE, Peer, Programs
from benchmarks.load_tiers import write_s
from benchmarks.programs import ROOT, ProgramFailed
from benchmarks.runner import Run
from benchmarks.throttle import limiter
from sllm_loaderd.convert import convert_directory
from sllm_loaderd.files import chunk_digest
from sllm_runtime.protocol.checkpoint import INDEX_NAME, decode_index, index_digest, partition_name

TINY = AdapterShape(1, 128, 256, 128, 2)


def test_what_the_machine_gives_is_tried_out(tmp_path: Path) -> None:
    found = abilities(tmp_path)
    assert found.pop("shmem huge pages")
    assert found["memfd seals"] == YES, "loaderd runs on no kernel without"
    assert len(found) == 5
    assert all(answer == YES or answer.startswith("no: ") for answer in found.values()), found
    assert not list(tmp_path.iterdir())


def test_what_a_file_system_has_not_is_said() -> None:
    assert abilities(Path("/dev/shm"))["page cache can be dropped"].startswith("no: "), "it is in memory alone"
    assert abilities(Path("/proc"))["O_DIRECT"].startswith("no: ")


def test_what_a_quick_run_leaves_out_are_cases() -> None:
    assert set(load.CASES) > load.ONLY_FULL


@pytest.mark.parametrize(("shape", "nbytes"), [(SMALL, 1e8), (LARGE, 1e9)])
def test_adapters_are_of_the_sizes_their_cases_are_called_by(shape: AdapterShape, nbytes: float) -> None:
    assert nbytes * 0.99 < shape.nbytes < nbytes * 1.05


def test_an_adapter_is_one_to_the_converter(tmp_path: Path) -> None:
    made = write_adapter(tmp_path / "a", TINY)
    convert_directory(made.directory, tmp_path / "sllm")
    index = decode_index((tmp_path / "sllm" / INDEX_NAME).read_bytes())
    assert index.adapter is not None
    assert (index.adapter.rank, sorted(each.name for each in index.tensors)) == (
        TINY.rank,
        sorted(name for name, _ in TINY.tensors()),
    )
    assert made.nbytes == TINY.nbytes


@given(st.integers(0, 10**13), st.integers(1, 40))
def test_copies_leave_half_of_the_disk_or_are_small(free: int, count: int) -> None:
    chosen = size(free, count)
    assert chosen == QUICK or (chosen == ONE and 4 * count * chosen.nbytes <= free)


def test_copies_differ_alike_in_both_forms(tmp_path: Path) -> None:
    source = write_tensors(_directory(tmp_path / "m"), "model.safetensors", Shape(1, 64, 128).tensors())
    model = convert_directory(source.directory, tmp_path / "converted")
    stored = Converted(tmp_path / "converted", model, 0.0)
    copies = [make_copy(source, stored, tmp_path / str(number), number) for number in (1, 2)]
    assert len({source.digest, *(copy.digest for copy in copies)}) == 3
    for number, copy in enumerate(copies, 1):
        encoded = (copy.stored.directory / INDEX_NAME).read_bytes()
        index, data = decode_index(encoded), (copy.stored.directory / partition_name(0)).read_bytes()
        assert copy.stored.model == index_digest(encoded) != model
        size_, digests = index.chunk_bytes, index.partitions[0].digests
        assert [chunk_digest(data[at : at + size_]) for at in range(0, len(data), size_)] == list(digests)
        with safe_open(copy.directory / "model.safetensors", framework="np") as file:
            assert sorted(file.keys()) == sorted(each.name for each in index.tensors)
        first = next(each for each in index.tensors if each.name == "model.embed_tokens.weight")
        raw = (copy.directory / "model.safetensors").read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        assert raw[start : start + first.nbytes] == data[first.offset : first.offset + first.nbytes]
        assert raw[start : start + 2] == number.to_bytes(2, "little")


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_converted_model_is_placed_where_a_store_has_it(tmp_path: Path) -> None:
    made = _directory(tmp_path / "converted")
    (made / "partition_0.bin").write_bytes(b"x")
    Converted(made, "sha256:00ff", 0.0).place(tmp_path / "data")
    placed = tmp_path / "data" / "models" / "00ff" / "partition_0.bin"
    assert placed.samefile(made / "partition_0.bin")


def test_a_model_that_does_not_fit_the_disk_is_said(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match="TMPDIR"):
        Bench(Run(quick=True), tmp_path, Programs(tmp_path)).need(10**18)


def test_peers_far_behind_the_fastest_are_named_with_that_and_not_measured_again() -> None:
    run, chosen = Run(quick=False), MODEL_PEERS[:4]
    for peer, seconds in zip(chosen[:3], (1.0, 1.4, 1.6), strict=True):
        run.case("first", peer.name, "s").take(seconds, seconds)
    run.case("first", chosen[3].name, "s").not_run = "no GPU"
    assert near(run, "second", chosen, "first") == list(chosen[:2])
    left = {case.system: case.not_run for case in run.cases if case.case == "second"}
    assert set(left) == {chosen[2].name, chosen[3].name, *NOT_HERE}
    assert left[chosen[2].name].startswith("1.6 times the fastest")
    assert left[chosen[3].name] == "no GPU"


def test_who_used_the_least_cpu_is_measured_where_it_was_slow() -> None:
    """With one core less it may be the fastest."""
    run, chosen = Run(quick=False), MODEL_PEERS[:3]
    for peer, seconds, cpu_s in zip(chosen, (1.0, 2.0, 3.0), (2.0, 0.2, 2.5), strict=True):
        run.case("first", peer.name, "s").take(seconds, cpu_s)
    assert near(run, "second", chosen, "first") == list(chosen[:2])


def test_a_case_on_one_core_leaves_out_by_one_on_one_core() -> None:
    for name, measure in load.CASES.items():
        like = getattr(measure, "keywords", {}).get("like", "")
        assert not like or like.endswith("_1core") == name.endswith("_1core"), name


def test_copies_have_the_fastest_peers_of_those_that_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(quick=False)
    for number, peer in enumerate(MODEL_PEERS, 1):
        run.case("first", peer.name, "s").take(0.1 if peer.reads != "model.safetensors" else float(number), 1.0)
    asked: list[str] = []

    def started(_bench: Bench, _case: str, _checkpoint: Checkpoint, peers: Sequence[Peer]) -> list[Competitor]:
        asked.extend(peer.name for peer in peers)
        return []

    monkeypatch.setattr(load_copies, "start", started)
    checkpoint = write_tensors(_directory(tmp_path / "m"), "model.safetensors", Shape(1, 64, 128).tensors())
    load_copies._peers(Bench(run, tmp_path, Programs(tmp_path)), "copies", checkpoint, MODEL_PEERS, "first")
    assert asked == ["safetensors load_file", "safetensors safe_open"]


def test_all_peers_are_measured_where_no_other_case_was() -> None:
    run = Run(quick=False)
    assert near(run, "second", MODEL_PEERS, "first") == list(MODEL_PEERS)
    assert [case.system for case in run.cases] == list(NOT_HERE)


def test_a_written_file_is_gone_when_its_time_is_known(tmp_path: Path) -> None:
    try:
        assert write_s(tmp_path / "written", 2**20)[0] > 0
    except OSError as error:
        pytest.skip(f"this filesystem has no direct I/O: {error}")
    assert not list(tmp_path.iterdir())


def test_a_hierarchy_that_limits_reads_is_found(tmp_path: Path) -> None:
    new, old = _directory(tmp_path / "v2"), _directory(tmp_path / "blkio")
    with pytest.raises(ProgramFailed, match="no cgroup"):
        limiter((new,), old)
    (old / "blkio.throttle.read_bps_device").touch()
    assert limiter((new,), old).line.format(device="8:0", rate=5) == "8:0 5"
    (new / "cgroup.subtree_control").write_text("cpu io\n")
    assert limiter((new,), old).line.format(device="8:0", rate=5) == "8:0 rbps=5"


_LIMITED = """
import contextlib, os, subprocess, sys
from pathlib import Path
from benchmarks.programs import ProgramFailed
from benchmarks.throttle import limiter, throttled
def groups():
    return Path("/proc/self/cgroup").read_text()
before, own = groups(), f"benchmark-{os.getpid()}"
def of(pid):
    return Path(f"/proc/{pid}/cgroup").read_text()
with contextlib.ExitStack() as stack:
    try:
        stack.enter_context(throttled(Path(sys.argv[1]), 10**10))
    except ProgramFailed as error:
        print(error)
        sys.exit(77)
    assert own in groups()
assert groups() == before
assert not (limiter().root / own).exists()
with subprocess.Popen(["sleep", "600"]) as child:
    with throttled(Path(sys.argv[1]), 10**10, [child.pid], own=False):
        assert own in of(child.pid)
        assert groups() == before
    assert of(child.pid) == before
    with throttled(Path(sys.argv[1]), 10**10, [child.pid], own=False):
        child.kill()
        child.wait()
    assert not (limiter().root / own).exists()
"""


def test_a_limit_is_there_inside_only(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _LIMITED, str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr


@given(st.lists(st.tuples(st.text("ab <&>\"'", max_size=9), st.floats(0.01, 1e4)), min_size=1, max_size=9))
def test_a_chart_has_a_bar_of_its_length_for_each_value(values: list[tuple[str, float]]) -> None:
    tree = ElementTree.fromstring(bars("t", "GB/s", values, ("limit", 1.0)))
    widths = [float(bar.attrib["width"]) for bar in tree.iter("{http://www.w3.org/2000/svg}rect")]
    longest = max(values, key=lambda each: each[1])[1]
    assert len(widths) == len(values)
    for width, (_, value) in zip(widths, values, strict=True):
        assert width == pytest.approx(max(widths) * value / longest, abs=0.2)


def test_a_chart_of_nothing_is_none() -> None:
    with pytest.raises(ValueError, match="above 0"):
        bars("t", "s", [])
    assert charts({"benchmark": "load", "cases": [], "settings": {}}, "m") == {}


def test_the_ablation_of_a_record_is_drawn(tmp_path: Path) -> None:
    steps = [{"case": "ablation", "system": name, "median": 1.0} for name in ("tensor by tensor", "+ bulk")]
    left_out = {"case": "ablation", "system": "+ pinned", "not_run": "no GPU"}
    record = {"benchmark": "load", "cases": [*steps, left_out], "settings": {"ablation_device": "fake:0"}}
    (written,) = write_charts(record, "m", tmp_path / "docs")
    assert written.name == "load-ablation-m.svg"
    text = written.read_text()
    assert all(word in text for word in ("fake:0", "+ bulk"))
    assert "+ pinned" not in text

"""``benchmarks.replay`` without its platform: the trace, the callers, the sums, where a run begins."""

from __future__ import annotations

import itertools
import os
import socket
import statistics
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replay import LEAST_CALLS, OURS, POLICIES, judge
from benchmarks.replay_client import IN_TIME_S, LIMIT_S, Heard, Told, checked, play, sums
from benchmarks.replay_peers import RAY, texts_of
from benchmarks.replay_platform import PUBLISHED, Beginning, Scene, name_of, share_out, write_models
from benchmarks.replay_trace import CV, LENGTHS, Arrival, Shape, trace
from benchmarks.runner import Run, in_turn
from sllm_invoker.machine import parse_gpus
from sllm_loaderd.devices.fake import parse_fake_devices
from sllm_loaderd.verify import open_checkpoint
from sllm_runtime.control.scheduling import policies
from sllm_runtime.protocol.limits import CHUNK_BYTES

SHAPES = st.builds(Shape, functions=st.integers(1, 64), calls=st.integers(1, 200), seconds=st.floats(0.1, 600.0))


def test_each_round_begins_with_another_system() -> None:
    rounds = [in_turn(POLICIES, number) for number in range(2 * len(POLICIES))]
    assert [first for first, *_ in rounds] == [*POLICIES, *POLICIES]
    assert all(sorted(each) == sorted(POLICIES) for each in rounds)


@given(SHAPES, st.integers(0, 2**32))
def test_a_trace_fills_its_time_in_order_and_is_the_same_again(shape: Shape, seed: int) -> None:
    made = trace(shape, seed)
    assert len(made) == shape.calls
    assert all(before.at <= after.at for before, after in itertools.pairwise(made))
    assert 0.0 <= made[0].at <= made[-1].at == pytest.approx(shape.seconds)
    assert {arrival.function for arrival in made} <= set(range(shape.functions))
    assert {arrival.tokens for arrival in made} <= LENGTHS.keys()
    assert made == trace(shape, seed)


def test_gaps_vary_as_said_and_another_seed_is_another_trace() -> None:
    shape = Shape(32, 50_000, 1000.0)
    made = trace(shape, 1)
    gaps = [after.at - before.at for before, after in itertools.pairwise(made)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(CV, rel=0.1)
    assert made != trace(shape, 2)


def test_functions_are_called_by_their_rank_and_lengths_by_their_share() -> None:
    made = trace(Shape(32, 50_000, 1000.0), 1)
    calls = Counter(arrival.function for arrival in made)
    assert calls[0] / calls[1] == pytest.approx(2.0, rel=0.1)
    assert calls[0] / calls[9] == pytest.approx(10.0, rel=0.15)
    lengths = Counter(arrival.tokens for arrival in made)
    assert [lengths[tokens] / len(made) for tokens in LENGTHS] == pytest.approx(list(LENGTHS.values()), abs=0.01)


def test_every_call_is_told_in_order_and_what_fails_counts_with_the_limit() -> None:
    def call(arrival: Arrival) -> Heard:
        if arrival.function == 1:
            raise ConnectionResetError("gone")
        return Heard(first=0.0, text=f"{arrival.tokens} tokens", cold=arrival.function == 2)

    arrivals = [Arrival(0.0, function, 48) for function in range(3)]
    told = play(arrivals, call, lambda: None)
    assert [each.arrival for each in told] == arrivals
    assert [each.served for each in told] == [True, False, True]
    assert told[1].startup_ms == LIMIT_S * 1e3
    assert "ConnectionResetError: gone" in told[1].error
    assert [each.cold for each in told] == [False, False, True]
    assert told[0].text == "48 tokens"


def test_an_interrupt_breaks_calls_off() -> None:
    broken: list[bool] = []

    def call(arrival: Arrival) -> Heard:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play([Arrival(0.0, 0, 32)], call, lambda: broken.append(True))
    assert broken == [True]


def _told(ms: float, text: str = "a", tokens: int = 32, error: str = "") -> Told:
    return Told(Arrival(0.0, 0, tokens), ms, text, error=error)


def test_another_text_of_the_same_length_is_wrong_and_counts_with_the_limit() -> None:
    right = {32: "a", 96: "b", 256: "c"}
    fine, other, gone = checked([_told(1.0), _told(1.0, "b", tokens=96), _told(1.0, error="gone", text="")], right)
    assert (fine.wrong, other.wrong, gone.wrong, gone.error) == (False, False, False, "gone")
    wrong, nothing = checked([_told(1.0, "c", tokens=96), _told(1.0, "", tokens=256)], right)
    assert (wrong.wrong, wrong.served, wrong.startup_ms) == (True, False, LIMIT_S * 1e3)
    assert wrong.error == "96 tokens of function 0 are 'c' at their end, not 'b'"
    assert nothing.wrong, "an empty answer is none"


def test_a_wrong_answer_makes_an_aim_false_whatever_broke_then() -> None:
    run = Run(quick=False)
    right = checked([_told(1.0)] * LEAST_CALLS, {32: "a"})
    judge(run, {"random": [checked([_told(1.0, "c")], {32: "a"})], "locality": [right], RAY["store"]: [right]})
    met = {aim.aim: aim.met for aim in run.aims}
    assert met["replay: wrong answers, random"] is False
    assert met["replay: wrong answers, locality"] is True
    assert met[f"replay: wrong answers, {RAY['store']}"] is True
    assert met["replay: wrong answers, startup-time"] is None, "it said nothing"


def test_what_peers_have_to_say_is_what_transformers_says() -> None:
    texts = texts_of([f"<{number}>" for number in range(max(LENGTHS))])
    assert texts[16] == "".join(f"<{number}>" for number in range(16))
    assert set(texts) == set(LENGTHS)


def test_the_sums_of_calls() -> None:
    found = sums([*(_told(float(ms)) for ms in range(1, 100)), _told(LIMIT_S * 1e3, error="gone")])
    assert (found.calls, found.served, found.p50, found.p99) == (100, 0.99, 50.0, 99.0)
    assert found.mean == pytest.approx((4950 + LIMIT_S * 1e3) / 100)
    assert found.longest == LIMIT_S * 1e3
    late = sums([_told(1.0), _told(IN_TIME_S * 1e3 + 1), _told(IN_TIME_S * 1e3), _told(1.0, error="gone")])
    assert (late.served, late.in_time) == (0.75, 0.5)
    with pytest.raises(ValueError, match="no samples"):
        sums([])


def test_ours_is_judged_beside_each_other_system() -> None:
    run = Run(quick=False)
    trace_of = LEAST_CALLS // run.least + 1
    many = {system: [[_told(10.0 if system == OURS else 20.0)] * trace_of] * run.least for system in POLICIES}
    many["locality"] = [[_told(IN_TIME_S * 1e3 + 1)] * trace_of, *[[_told(5.0)] * trace_of] * (run.least - 1)]
    judge(run, many)
    aims = {aim.aim: aim for aim in run.aims}
    assert (aims["replay: startup-time / random, p99 startup latency"].value) == 0.5
    assert aims["replay: startup-time / locality, mean startup latency"].met is True, "by its first round"
    assert aims["replay: startup-time / locality, mean startup latency of a round (median)"].value == 2.0
    assert aims["replay: startup-time / locality, longest startup latency of a round (median)"].met is False
    assert aims["replay: startup-time / locality, share served within 5 s"].value == pytest.approx(7 / 6)
    assert aims["replay: startup-time / preemption, share served within 5 s"].value == 1.0
    assert aims["replay: startup-time / ray serve, no cache, p99 startup latency"].met is None, "it did not run"
    few = Run(quick=True)
    judge(few, {system: rounds[:3] for system, rounds in many.items()})
    assert {aim.met for aim in few.aims} == {None}


def test_systems_are_compared_on_the_traces_that_both_had() -> None:
    """One that broke in the last round, or was broken off, lacks that one: it may be the worst of all."""
    rounds = LEAST_CALLS // 50
    mine, theirs = [[_told(10.0)] * 50] * rounds, [[_told(5.0)] * 50] * rounds
    run = Run(quick=False)
    judge(run, {OURS: mine, "random": [*theirs, [_told(IN_TIME_S * 1e3 + 1)] * 50]})
    aims = {aim.aim: aim for aim in run.aims}
    for what in ("p99 startup latency", "mean startup latency"):
        assert aims[f"replay: {OURS} / random, {what}"].value == 2.0, "in each trace that both had"
    assert aims[f"replay: {OURS} / random, share served within 5 s"].value == 1.0


def test_the_policies_are_all_that_there_are_and_the_settings_are_ones() -> None:
    assert set(POLICIES) == set(policies.POLICIES)
    scene = Scene(nodes=4, devices=4, functions=32)
    found = scene.settings("random", devices=2)
    assert [gpu.kind for gpu in parse_gpus(found["SLLM_GPUS"])] == ["virtual"] * 2
    assert parse_fake_devices(found["SLLM_FAKE_DEVICES"]).count == 2
    assert (scene.dram_models, scene.ssd_models) == (4, 12)
    assert int(found["SLLM_SSD_BYTES"]) == 12 * CHUNK_BYTES


def test_models_have_the_same_bytes_and_digests_of_their_own(tmp_path: Path) -> None:
    write_models(tmp_path / "store", 3)
    found = [open_checkpoint(tmp_path / "store" / name_of(number)) for number in range(3)]
    assert len({each.digest for each in found}) == 3
    assert len({(tmp_path / "store" / name_of(n) / "partition_0.bin").stat().st_ino for n in range(3)}) == 1
    assert (tmp_path / "store" / PUBLISHED / "model.safetensors").is_file()


def test_a_run_begins_with_the_state_and_the_ssds_as_they_were(tmp_path: Path) -> None:
    home = tmp_path / "first"
    (home / "run" / "ssd").mkdir(parents=True)
    (home / "run" / "state").write_text("kept")
    copy = home / "run" / "ssd" / "model.bin"
    copy.write_bytes(b"weights")
    os.utime(copy, ns=(9_000_000_000, 5_000_000_000))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(home / "run" / "socket"))
        Beginning(home, {}).copy(tmp_path / "next")
    made = tmp_path / "next" / "home" / "run"
    assert sorted(path.name for path in made.iterdir()) == ["ssd", "state"]
    (made / "state").write_text("changed")
    assert (home / "run" / "state").read_text() == "kept"
    assert (made / "ssd" / "model.bin").stat().st_ino == copy.stat().st_ino
    assert copy.stat().st_atime_ns == 5_000_000_000, "what was used last in a run before is not known to the next"


def test_of_the_copies_on_all_nodes_each_models_stays_on_one_in_turn(tmp_path: Path) -> None:
    models = [f"sha256:{number:064x}" for number in range(3)]
    for node in ("n1", "n2"):
        (tmp_path / "nodes" / node / "loaderd" / "ssd").mkdir(parents=True)
        for model in models:
            (tmp_path / "nodes" / node / "loaderd" / "ssd" / f"{model.removeprefix('sha256:')}.0.bin").touch()
    share_out(tmp_path, ("n1", "n2"), models)
    left = {node: sorted(path.name[63] for path in (tmp_path / "nodes" / node).rglob("*.bin")) for node in ("n1", "n2")}
    assert left == {"n1": ["0", "2"], "n2": ["1"]}

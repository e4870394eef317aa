"""The load generator: what it makes of bytes, and against the real bare endpoint."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.generator import Load, Outcome, arrivals, regular
from benchmarks.programs import ROOT, Program
from sllm_runtime.platform.nats_server import free_port


@given(st.lists(st.integers(1, 10**15), min_size=1, max_size=30), st.data())
def test_every_token_arrives_with_its_last_byte_wherever_the_bytes_are_cut(
    dues: list[int], data: st.DataObject
) -> None:
    text, ends = b"HTTP/1.1 200 OK\r\n\r\n", []
    for index, due in enumerate(dues):
        text += b'1c\r\ndata: "t%d@%d.' % (index, due)
        ends.append(len(text))
        text += b'"\n\n\r\n'
    cuts = sorted({*data.draw(st.lists(st.integers(1, len(text) - 1), max_size=20)), len(text)})
    pieces = [(cut, text[start:cut]) for start, cut in zip([0, *cuts], cuts, strict=False)]

    found = arrivals(pieces)

    assert [(index, due) for _, index, due in found] == list(enumerate(dues))
    assert [at for at, _, _ in found] == [min(cut for cut in cuts if cut >= end) for end in ends]


def test_tokens_out_of_order_missing_or_off_their_pace_are_not_regular() -> None:
    right = [(0, index, 1000 + index * 20_000_000) for index in range(5)]

    assert regular(right, 5, 0.02)
    assert not regular(right, 6, 0.02)
    assert not regular([right[1], right[0], *right[2:]], 5, 0.02)
    assert not regular([*right[:4], (0, 4, right[4][2] + 1000)], 5, 0.02)
    assert regular([(0, index, 7) for index in range(5)], 5, 0.0)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    log = tmp_path_factory.mktemp("bare") / "log"
    with Program([sys.executable, "-m", "benchmarks.bare", "--port", str(port)], log, cwd=ROOT) as program:
        program.hear(60)
        yield port


@pytest.fixture
def generator(tmp_path: Path) -> Iterator[Program]:
    with Program([sys.executable, "-m", "benchmarks.generator"], tmp_path / "log", cwd=ROOT) as program:
        yield program


def ask(generator: Program, load: Load) -> Outcome:
    generator.say(dataclasses.asdict(load))
    return Outcome(**generator.hear(60))


def load_of(port: int, streams: int, count: int, interval: float, **more: float) -> Load:
    body = json.dumps({"count": count, "interval": interval})
    return Load(port, "/stream", {}, body, streams, count, interval, **more)


def test_a_burst_brings_every_token_of_every_stream(bare: int, generator: Program) -> None:
    outcome = ask(generator, load_of(bare, 20, 50, 0.0))

    assert (outcome.completed, outcome.failed, outcome.wrong, outcome.tokens) == (20, 0, 0, 1000)
    assert len(outcome.ttft_ms) == 20
    assert all(0 < ttft < outcome.seconds * 1e3 for ttft in outcome.ttft_ms)


def test_paced_streams_last_as_long_as_their_pace_and_no_token_comes_before_it_is_due(
    bare: int, generator: Program
) -> None:
    outcome = ask(generator, load_of(bare, 5, 10, 0.02, spread_s=0.1))

    assert outcome.completed == 5
    assert outcome.seconds >= 9 * 0.02
    assert 0 < outcome.delay_p50_ms <= outcome.delay_p99_ms <= outcome.delay_max_ms


def test_one_after_the_other_never_has_two_under_way(bare: int, generator: Program) -> None:
    outcome = ask(generator, load_of(bare, 4, 4, 0.02, spread_s=-1.0))

    assert outcome.completed == 4
    assert outcome.seconds >= 4 * 3 * 0.02


def test_what_is_not_finished_by_the_deadline_has_failed_and_says_how_far_it_came(
    bare: int, generator: Program
) -> None:
    for patience in (2.0, 10.0, 40.0):
        outcome = ask(generator, load_of(bare, 3, 10_000, 0.02, deadline_s=patience))
        if outcome.tokens:
            break  # where the machine stands still the deadline may come before the first one

    assert (outcome.completed, outcome.failed) == (0, 3)
    assert 0 < outcome.tokens < 30_000
    assert "not ended" in outcome.errors[0]


def test_an_error_of_the_server_is_a_failed_stream_with_its_words(bare: int, generator: Program) -> None:
    outcome = ask(generator, Load(bare, "/nowhere", {}, "{}", 2, 5, 0.0))

    assert outcome.failed == 2
    assert "Not Found" in outcome.errors[0]


def test_the_chat_route_of_the_bare_endpoint_streams_the_same_tokens(bare: int, generator: Program) -> None:
    asked = {"messages": [{"role": "user", "content": json.dumps({"count": 7, "interval": 0.01})}]}
    outcome = ask(generator, Load(bare, "/v1/chat/completions", {}, json.dumps(asked), 3, 7, 0.01))

    assert (outcome.completed, outcome.wrong) == (3, 0)

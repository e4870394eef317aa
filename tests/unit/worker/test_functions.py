"""Every kind of function, good and bad, in a real worker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sllm.cli.load import one as find
from sllm_runtime.protocol import limits
from sllm_runtime.worker.local import run_local
from tests.unit.worker.harness import Answer, Worker, Zygote, bundle_of, manifest

FUNCTIONS = Path(__file__).parents[2] / "fixtures" / "functions"

Start = Callable[..., Worker]


def source(name: str) -> bytes:
    return bundle_of({f"{name}.py": (FUNCTIONS / f"{name}.py").read_bytes()})


@pytest.fixture
def start(worker: Worker, tmp_path: Path) -> Start:
    def begin(name: str, entry: str = "fn", kind: Any = "function", **changes: Any) -> Worker:
        worker.start(manifest(f"{name}:{entry}", kind, **changes), source(name), workdir=tmp_path)
        return worker

    return begin


def gone(pid: int, deadline_s: float = 60.0) -> bool:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] == b"Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("entry", "kind", "arguments", "outputs"),
    [
        (
            "plain", "function", {"point": {"x": 1}, "pair": {"left": "a", "right": "b"}, "numbers": [1, "2"]},
            [{"sum": 1.5, "pair": {"left": "a", "right": "b"}, "point": {"x": 1, "y": 0.5}, "numbers": [1, 2],
              "flag": False}],
        ),
        ("awaited", "async_function", {"text": "ab"}, ["AB"]),
        ("yields", "generator", {"count": 2}, [{"left": "0", "right": "r"}, {"left": "1", "right": "r"}]),
        ("yields_async", "async_generator", {"count": 3}, [0, 1, 2]),
        ("returns_iterator", "function", {"count": 2}, [0, 1]),
        ("anything", "function", {"a": None, "c": 3}, [[None, 2, {"c": 3}]]),
        ("AsyncCounter", "class", {}, [10, 11]),
        (
            "tensors", "function", {},
            [{"scalar": 1.5, "array": [[0, 1], [2, 3]], "tensor": [1.0, 1.0], "nan": None, "set": [1],
              "bytes": "YWI="}],
        ),
    ],
)  # fmt: skip
def test_kinds(start: Start, entry: str, kind: str, arguments: Any, outputs: list[Any]) -> None:
    answer = start("kinds", entry, kind).run(arguments)
    assert answer.end is not None
    assert answer.end.error is None
    assert answer.outputs == outputs


@pytest.mark.parametrize(
    ("entry", "kind", "outputs", "yielded"),
    [
        ("mapped", "function", [0, 1], True),
        ("wrapped", "function", [0, 1], True),
        ("returns_iterator", "function", [0, 1], True),
        ("yields_async", "async_generator", [0, 1], True),
        ("lists", "function", [[0, 1]], False),
    ],
)
def test_each_call_says_whether_it_yielded(
    start: Start, entry: str, kind: str, outputs: list[Any], yielded: bool
) -> None:
    """Its hints may say something else, or nothing."""
    answer = start("kinds", entry, kind, streams=not yielded).run({"count": 2})
    assert answer.end is not None
    assert (answer.outputs, answer.end.yielded) == (outputs, yielded)


@pytest.mark.parametrize(
    ("name", "given", "outputs", "yielded"),
    [
        ("awaited_in_a_wrapper", {"text": "ab"}, ["AB"], False),
        ("yields_async_in_a_wrapper", {"count": 2}, [0, 1], True),
        ("returns_async_iterator", {"count": 2}, [0, 1], True),
        ("awaits_an_iterator", {"count": 2}, [0, 1], True),
        ("WrappedAsyncCall", {"count": 2}, [0, 1], True),
    ],
)
def test_what_runs_here_runs_deployed(
    start: Start, name: str, given: dict[str, Any], outputs: list[Any], yielded: bool
) -> None:
    """Also where a decorator, which need not be ``async``, stands before an async function: it is what it returns."""
    function = find(f"{FUNCTIONS / 'kinds.py'}::{name}")
    described = function.manifest(f"kinds:{name}").handler
    answer = start("kinds", name, described.kind, streams=described.streams).run(given)
    assert answer.end is not None
    assert answer.end.error is None
    assert (answer.outputs, answer.end.yielded) == (outputs, yielded)
    assert run_local(function, given) == (outputs if yielded else outputs[0])


def test_a_class_is_set_up_once(start: Start) -> None:
    worker = start("kinds", "Counter", "class")
    assert [worker.run({"step": 2}).outputs for _ in range(3)] == [[2], [4], [6]]


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b"{", "malformed_json", None),
        (b'{"a": \xff}', "malformed_json", None),
        (b"[1]", "invalid_request", None),
        (b'{"pair": {"left": "a", "right": "b"}, "numbers": []}', "invalid_argument", "point"),
        (b'{"point": {"x": "no"}, "pair": {"left": "a", "right": "b"}, "numbers": []}', "invalid_argument", "point.x"),
        (b'{"point": {"x": 1}, "pair": {"left": "a", "right": "b"}, "numbers": [1, null]}', "invalid_argument",
         "numbers.1"),
        (b'{"point": {"x": 1}, "pair": {"left": "a", "right": "b"}, "numbers": [], "other": 1}', "invalid_argument",
         "other"),
    ],
)  # fmt: skip
def test_bad_arguments_name_the_field(start: Start, body: bytes, code: str, field: str | None) -> None:
    worker = start("kinds", "plain")
    error = worker.finish(worker.call(body=body)).error
    assert (error.code, error.field) == (code, field)
    assert worker.run({"point": {"x": 1}, "pair": {"left": "", "right": ""}, "numbers": []}).outputs


def test_an_exception_reaches_the_caller_and_its_traceback_the_log(start: Start) -> None:
    worker = start("raises")
    number = worker.call({"text": "bad luck"})
    error = worker.finish(number).error
    assert (error.code, error.message, error.status) == ("function_error", "ValueError: bad luck", 500)
    assert error.detail is not None
    assert "raises.py" in error.detail
    assert "sllm_runtime" not in error.detail
    logged = [log for log in worker.logs if log.number == number and log.level == "error"]
    assert len(logged) == 1
    assert "raise ValueError(text)" in logged[0].text


CODES = ("instance_lost", "gateway_silent", "cancelled", "call_moved", "unavailable", "unauthorized", "not_found",
         "not_deterministic", "invalid_argument", "unheard_of")  # fmt: skip


def test_what_a_call_of_another_function_ended_with_is_no_word_on_this_one(start: Start) -> None:
    worker = start("calls_others")
    for code in CODES:
        error = worker.run({"code": code}).error
        assert (error.code, error.status, error.retryable) == ("function_error", 500, False), code
        assert error.message.endswith(": the other's instance died")


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}"])
def test_an_error_of_any_length_fits_in_one_frame(start: Start, letter: str) -> None:
    worker = start("raises", concurrency=2)
    text = letter * (limits.MAX_PART // 3)
    number = worker.call({"text": text})
    error = worker.finish(number).error
    assert (error.code, error.message[:20]) == ("function_error", f"ValueError: {letter * 8}")
    (end,) = [frame for batch in worker.batches for each, frames in batch.items for frame in frames if each == number]
    assert len(end.data) < limits.MAX_PART / 2
    assert worker.finish(worker.call(body=b"{" + b"x" * limits.MAX_PART)).error.code == "malformed_json"


def test_what_has_no_text_ends_its_call_and_not_its_instance(start: Start) -> None:
    worker = start("says_the_unsayable", concurrency=2)
    assert "WordlessError" in worker.run({"what": "wordless"}).error.message
    assert worker.run({"what": "surrogate"}).error.message == "ValueError: bad \\ud800 text"
    assert worker.run({"what": "print"}).outputs == ["still here"]
    assert "printed \\ud800" in [log.text for log in worker.logs]


def test_a_forked_child_does_not_speak_for_its_worker(start: Start) -> None:
    worker = start("forks_in_call", kind="generator")
    for _ in range(3):
        assert worker.run().outputs == ["parent", 0]


def test_an_exception_after_outputs(start: Start) -> None:
    answer = start("raises_midstream", kind="generator").run()
    assert answer.outputs == [1, 2]
    assert answer.error.message == "RuntimeError: broke after two"


def test_what_json_cannot_carry_is_named(start: Start) -> None:
    error = start("returns_unserialisable").run().error
    assert error.code == "function_error"
    assert "returns_unserialisable.Secret" in error.message


def test_sys_exit_ends_the_call_alone(start: Start) -> None:
    worker = start("exits_in_call")
    assert worker.run({"status": 4}).error.message == "SystemExit: 4"
    assert worker.run({"status": 5}).error.message == "SystemExit: 5"


def test_a_body_in_parts(start: Start) -> None:
    text = "é" * (limits.MAX_PART * 2)
    answer = start("kinds", "awaited", "async_function").run({"text": text})
    assert answer.outputs == [text.upper()]
    assert len(answer.indexes) > 3, "a big value comes in parts too"


def test_a_reader_without_credit_pauses_the_generator(start: Start, tmp_path: Path) -> None:
    worker = start("big_output", kind="generator")
    number = worker.call({"size": 100_000, "count": 10}, credit=250_000)
    answer = worker.outputs(number, 2)
    worker.until(lambda: len(worker.beats) >= 3)
    assert len(answer.outputs) == 2
    worker.credit(number, 550_000)
    worker.outputs(number, 5)
    worker.credit(number, 10**9)
    assert [len(text) for text in worker.finish(number).outputs] == [100_000] * 10


def test_an_async_generator_pauses_too(start: Start) -> None:
    worker = start("slow_async_stream", kind="async_generator")
    number = worker.call({"count": 6, "pause": 0}, credit=2 * (1 + limits.FRAME_COST))
    answer = worker.outputs(number, 2)
    worker.until(lambda: len(worker.beats) >= 2)
    assert answer.outputs == [0, 1]
    worker.credit(number, 10**6)
    assert worker.finish(number).outputs == list(range(6))


@pytest.mark.parametrize(("name", "kind"), [("slow_stream", "generator"), ("slow_async_stream", "async_generator")])
def test_cancel_stops_at_the_next_yield_and_runs_finally(start: Start, tmp_path: Path, name: str, kind: str) -> None:
    worker = start(name, kind=kind, concurrency=4)
    mark = tmp_path / "mark"
    number = worker.call({"mark": str(mark)})
    other = worker.call({"count": 40})
    worker.outputs(number, 3)
    worker.cancel(number, "deadline_exceeded", "too late")
    answer = worker.finish(number)
    assert (answer.error.code, answer.error.message, answer.error.status) == ("deadline_exceeded", "too late", 504)
    assert mark.read_text() == "closed"
    assert worker.finish(other).outputs == list(range(40)), "others go on"


def test_cancel_wakes_a_generator_that_waits_for_its_reader(start: Start, tmp_path: Path) -> None:
    worker = start("slow_stream", kind="generator")
    mark = tmp_path / "mark"
    number = worker.call({"pause": 0, "mark": str(mark)}, credit=10 * (1 + limits.FRAME_COST))
    worker.outputs(number, 10)
    worker.cancel(number, "slow_consumer")
    assert worker.finish(number).error.code == "slow_consumer"
    assert mark.read_text() == "closed"


def test_calls_run_at_the_same_time(start: Start, tmp_path: Path) -> None:
    worker, gate = start("slow_stream", kind="generator", concurrency=4), tmp_path / "gate"
    numbers = [worker.call({"count": 10, "pause": 0, "gate": str(gate)}) for _ in range(4)]
    worker.until(lambda: all(worker.answers[number].outputs for number in numbers))
    assert all(worker.answers[number].end is None for number in numbers)
    gate.touch()
    for number in numbers:
        assert worker.finish(number).outputs == list(range(10))


def test_prints_are_lines_of_their_call(start: Start) -> None:
    worker = start("prints_a_lot", concurrency=4)
    numbers = {name: worker.call({"lines": 100, "name": name}) for name in ("a", "b")}
    for number in numbers.values():
        worker.finish(number)
    for name, number in numbers.items():
        own = [log for log in worker.logs if log.number == number]
        assert [log.text for log in own if log.text.startswith(f"{name} ")] == [f"{name} {i}" for i in range(100)]
        assert [log.text for log in own if log.stream == "stderr"] == ["to stderr"]
        assert own[-1].text == "no newline"
        assert max(len(log.text) for log in own) <= 8192
        assert sum(log.text.count("y") for log in own) == 100_000


def test_more_prints_than_can_be_taken_are_counted(start: Start) -> None:
    worker = start("prints_a_lot")
    assert worker.run({"lines": 150_000}).outputs == [150_000]
    worker.until(lambda: len(worker.beats) >= 2)
    dropped = sum(int(log.text.split()[0][1:]) for log in worker.logs if "lines dropped" in log.text)
    kept = sum(log.number is not None for log in worker.logs)
    assert kept + dropped == 150_000 + 13 + 2


@pytest.mark.parametrize(
    ("name", "entry", "kind", "stage", "words"),
    [
        ("exit_in_setup", "Fn", "class", "setup", "SystemExit: 3"),
        ("import_error", "fn", "function", "import", "No module named 'no_such_module_anywhere'"),
        ("not_a_function", "fn", "function", "import", "is a int"),
        ("kinds", "nothing", "function", "import", "has no 'nothing'"),
        ("swallows_cancel", "fn", "function", "setup", "add model="),
        ("says_the_unsayable", "Setup", "class", "setup", "WordlessError"),
    ],
)
def test_a_start_that_fails_names_stage_and_reason(
    worker: Worker, tmp_path: Path, name: str, entry: str, kind: str, stage: str, words: str
) -> None:
    error = worker.fail(manifest(f"{name}:{entry}", kind), source(name), workdir=tmp_path)
    assert (error.code, error.stage, error.status) == ("start_failed", stage, 503)
    assert words in error.message
    worker.wait_dead()
    assert any(log.level == "error" for log in worker.logs)


@pytest.mark.parametrize("code", ["unavailable", "instance_lost", "unsupported_model", "no_controller"])
@pytest.mark.parametrize("when", ["import", "setup"])
def test_what_a_call_of_another_function_ended_with_is_no_word_on_this_start(
    worker: Worker, tmp_path: Path, when: str, code: str
) -> None:
    described = manifest("starts_by_others:Fn", "class", env={"CODE": code, "WHEN": when})
    error = worker.fail(described, source("starts_by_others"), workdir=tmp_path)
    assert (error.code, error.stage, error.status, error.retryable) == ("start_failed", when, 503, False)
    assert error.message.startswith(f"{when} failed: ")
    assert error.message.endswith(": the other is away")


def test_memory_beyond_the_limit_fails_the_start(worker: Worker, tmp_path: Path) -> None:
    error = worker.fail(manifest("oom:Fn", "class"), source("oom"), workdir=tmp_path, memory_limit=2**28)
    assert (error.code, error.stage) == ("out_of_memory", "setup")
    assert "raise memory=" in error.message


def test_memory_beyond_the_limit_fails_the_call_alone(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest("oom_in_call:fn"), source("oom_in_call"), workdir=tmp_path, memory_limit=2**28)
    message = worker.run({"gib": 4}).error.message
    assert message.startswith("MemoryError")
    assert "raise memory=" in message
    assert worker.run({"gib": 0}).outputs == [0]


def test_death_in_midstream(start: Start, zygote: Zygote) -> None:
    worker = start("dies_midstream", kind="generator")
    number = worker.call()
    with pytest.raises(EOFError):
        worker.finish(number)
    worker.wait_dead()
    assert zygote.exited(zygote.count).signal == 9


def test_os_exit_in_setup(worker: Worker, zygote: Zygote, tmp_path: Path) -> None:
    worker.assign(manifest("dies_in_setup:Fn", "class"), source("dies_in_setup"), workdir=tmp_path)
    with pytest.raises(EOFError):
        worker.until(lambda: False)
    assert zygote.exited(zygote.count).code == 9


@pytest.mark.parametrize("name", ["spawns_child", "forks_daemon"])
def test_what_a_function_started_dies_with_its_worker(start: Start, zygote: Zygote, name: str) -> None:
    worker = start(name)
    pid = worker.run().outputs[0]
    os.kill(pid, 0)
    worker.kill()
    assert zygote.exited(zygote.count).signal == 9
    assert gone(pid)


def test_stop_drains(start: Start, zygote: Zygote) -> None:
    worker = start("slow_stream", kind="generator")
    number = worker.call({"count": 20})
    worker.outputs(number, 2)
    worker.stop(grace_s=30)
    assert worker.finish(number).outputs == list(range(20))
    worker.wait_dead()
    assert zygote.exited(zygote.count).code == 0


def test_stop_cancels_after_its_grace(start: Start, zygote: Zygote) -> None:
    worker = start("slow_stream", kind="generator")
    number = worker.call({"count": 10_000})
    worker.outputs(number, 2)
    worker.stop(grace_s=0.2)
    assert worker.finish(number).error.code == "cancelled"
    worker.wait_dead()
    assert zygote.exited(zygote.count).code == 0


def test_a_second_stop_ends_it_sooner_and_lets_it_clean_up(start: Start, zygote: Zygote, tmp_path: Path) -> None:
    """A function is deleted with ``force`` while its node is drained: else its worker is killed as one that is deaf."""
    worker, mark = start("slow_stream", kind="generator"), tmp_path / "mark"
    number = worker.call({"count": 1_000, "mark": str(mark)})  # 10 s
    worker.outputs(number, 2)
    worker.stop(grace_s=300)
    worker.outputs(number, 10)
    worker.stop(grace_s=0)
    worker.stop(grace_s=300)  # repeated, it changes nothing
    assert worker.finish(number).error.code == "cancelled"
    worker.wait_dead()
    assert zygote.exited(zygote.count).code == 0
    assert mark.read_text() == "closed"


def test_stop_does_not_wait_for_what_is_deaf(start: Start, zygote: Zygote) -> None:
    worker = start("blocks_forever", kind="generator")
    worker.outputs(worker.call(), 1)
    worker.stop(grace_s=0.1)
    worker.wait_dead(20)
    assert zygote.exited(zygote.count).code == 0


def test_a_loop_that_is_held_shows_in_the_heartbeat(start: Start) -> None:
    worker = start("blocks_loop", kind="async_generator", concurrency=2)
    worker.call()
    worker.until(lambda: any(beat.loop_s > 1 for beat in worker.beats))
    assert worker.beats[-1].running == 1


def test_a_resume_drops_what_was_delivered(start: Start) -> None:
    import hashlib

    worker = start("slow_stream", kind="generator")
    hashed = hashlib.blake2b(b"012", digest_size=16).digest()
    answer = worker.run({"count": 6, "pause": 0}, delivered=3, delivered_hash=hashed)
    assert answer.outputs == [3, 4, 5]
    wrong: Answer = worker.run({"count": 6, "pause": 0}, delivered=3, delivered_hash=b"other")
    assert wrong.error.code == "not_deterministic"


def test_a_resume_that_makes_less_than_was_delivered_is_another_output(start: Start) -> None:
    worker = start("slow_stream", kind="generator")
    answer = worker.run({"count": 2, "pause": 0}, delivered=3, delivered_hash=b"any")
    assert (answer.outputs, answer.error.code) == ([], "not_deterministic")
    assert "2 outputs, 3 were delivered" in answer.error.message


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("entry", "kind", "outputs"),
    [("plain", "generator", [PARENT, PARENT]), ("awaited", "async_function", [PARENT]), ("module", "function", [""])],
)
def test_a_function_can_read_of_which_trace_its_call_is(
    start: Start, entry: str, kind: str, outputs: list[str]
) -> None:
    worker = start("traced", entry, kind)
    assert worker.run(traceparent=PARENT).outputs == outputs
    assert worker.run().outputs == [""] * len(outputs), "the next call is of another one, or of none"


def test_a_function_can_read_what_tracing_systems_have_added(start: Start) -> None:
    worker = start("traced", "added", "generator")
    assert worker.run(traceparent=PARENT, tracestate="a=1").outputs == [PARENT, "a=1"]
    assert worker.run(traceparent=PARENT).outputs == [PARENT, ""]

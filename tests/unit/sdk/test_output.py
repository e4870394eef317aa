"""What people see: ids that can be copied whole from a terminal of any width, and text of others that commands none."""

import io
import json
import os
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import pytest

from sllm.cli import output, show, top
from sllm_runtime.protocol.errors import FunctionError, FunctionNotFound
from sllm_runtime.protocol.http import (
    CallView,
    ErrorView,
    ExplainView,
    FunctionListView,
    FunctionView,
    GpuView,
    HereView,
    NodeDetailView,
    ProgressView,
    StorageView,
)
from tests.fixtures import command
from tests.unit.sdk.gateway import DONE, Answer, Gateway, error, sse

FOUL = "rot \x1b[31mX\x1b]0;title\x07\rOVERWRITE\x9b\x7f\u202eevil\n22:50:00  node.lost  n1"
SHOWN = r"rot \x1b[31mX\x1b]0;title\x07\rOVERWRITE\x9b\x7f\u202eevil"
CALL = "call-cc25d0a91b7c44e0a5f10d1f3b6a7788"
INSTANCE = "summarise-reports-1-3f9a41d07c22"
NODE = "gpu-node-eu-west-17"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[40, 80, 200])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """As wide as that."""
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def plain(terminal: Terminal) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())


def here(*words: str) -> Any:
    return command.here(dict(os.environ), *words, expect=None)


# --- tables ---------------------------------------------------------------------------------------
def whole(text: str, words: Sequence[str]) -> None:
    assert "…" not in text
    for word in words:
        assert re.search(rf"(?<!\S){re.escape(word)}(?!\S)", text), (word, text)


def test_ids_of_calls_can_be_copied_whole(terminal: Terminal) -> None:
    view = CallView(
        id=CALL, function="summarise-reports", version=12, state="SUCCEEDED", created=1.0, finished=3.5,
        instance=INSTANCE, gateway="gateway-0", tokens=123456,
    )  # fmt: skip
    with redirect_stdout(terminal):
        show.calls([view, view.model_copy(update={"id": CALL[:-1] + "9"})])
    whole(plain(terminal), [CALL, CALL[:-1] + "9", INSTANCE, "SUCCEEDED", "gateway-0", "123456", "summarise-reports"])


def test_a_function_that_is_being_deleted_is_not_shown_as_active(terminal: Terminal) -> None:
    going = FunctionView(name="chat", active=1, url="/fn/chat", streams=True, openai=False, deleting=True)
    with redirect_stdout(terminal):
        show.functions([going])
        show.function(going)
    whole(plain(terminal), ["chat", "deleting", "deleted:"])
    assert "v1" not in plain(terminal)


def test_nodes_and_what_is_there_can_be_read_whole(terminal: Terminal) -> None:
    digest = "sha256:" + "ab" * 32
    node = NodeDetailView(
        node=NODE, alive=False, cordoned=False, draining=False, age_s=12.0, cpu=64, free_cpu=63.5, memory=2**39,
        free_memory=2**38, gpus=(GpuView(index=0, kind="H100", memory=1),), instances=2, tiers={digest: ("dram",)},
        here=(HereView(instance=INSTANCE, function="summarise-reports", version=1, state="STARTING"),),
        storage=StorageView(
            dram_used=2**37, dram_limit=2**38, dram_ready=2**30, ssd_used=2**40, ssd_limit=2**42, disk_free=2**41
        ),
    )  # fmt: skip
    with redirect_stdout(terminal):
        show.node(node)
    whole(plain(terminal), [NODE, INSTANCE, "STARTING", "ababababab" + "ab", "GiB/512.0"])


def test_top_can_be_read_whole(terminal: Terminal) -> None:
    node = NodeDetailView(
        node=NODE, alive=False, cordoned=False, draining=False, age_s=12.0, cpu=64, free_cpu=63.5, memory=2**39,
        free_memory=2**38, dram_limit=2**38, instances=2,
    )  # fmt: skip
    with redirect_stdout(terminal):
        top._draw([node], FunctionListView(functions=()), {}, {}, clear=False)
    whole(plain(terminal), [NODE, "silent", "GiB/512.0", "B/256.0"])


def test_what_describes_gives_way_to_what_identifies(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        output.table(("INSTANCE", "ERROR"), [("chat-1-3f9a41d07c", "it did not start " * 9)], empty="")
    lines = plain(terminal).splitlines()
    assert any("chat-1-3f9a41d07c" in line for line in lines)
    assert max(map(len, lines)) <= int(os.environ["COLUMNS"])
    assert plain(terminal).split().count("start") == 9, "nothing of it is lost"


def test_what_fits_is_one_line_a_row(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        output.table(("NAME", "STATE"), [("a", "READY"), ("b", "STARTING")], empty="")
    assert [line.split() for line in plain(terminal).splitlines()] == [
        ["NAME", "STATE"], ["a", "READY"], ["b", "STARTING"],
    ]  # fmt: skip


# --- text of others -------------------------------------------------------------------------------
def clean(text: str) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text), repr(text)
    assert SHOWN in text


def test_an_event_is_one_line_and_commands_no_terminal(gateway: Gateway) -> None:
    event = {"kind": "call.failed", "at": 0.0, "function": "slow", "message": FOUL, "fields": {"why\n": "a\nb\x1b"}}
    gateway.will(Answer((sse(event, event="event"), DONE)))
    said = here("events").stdout
    clean(said)
    assert len(said.splitlines()) == 1
    assert r"evil\n22:50:00  node.lost  n1" in said
    assert r"why\n=a\nb\x1b" in said


def test_an_explanation_commands_no_terminal(gateway: Gateway) -> None:
    found = ExplainView(
        function="slow", version=1, policy="P", decision="a start on n1", pending=FOUL, call="call-1", state="FAILED",
        error=FOUL,
    ).model_dump(mode="json")  # fmt: skip
    gateway.will(Answer(json=found), Answer(json=found | {"error": "", "waits": FOUL}))
    for _ in range(2):
        clean(here("explain", "call-1").stdout)


def test_a_calls_status_commands_no_terminal_and_its_result_is_its_own(gateway: Gateway) -> None:
    view = CallView(
        id="call-1", function="slow", version=1, state="FAILED", created=1.0, waits=FOUL, instance="i\x1b[2J",
        error=ErrorView(code="function_error", message=FOUL, retryable=False), result="é",
    ).model_dump(mode="json")  # fmt: skip
    gateway.will(Answer(json=view))
    said = here("call", "status", "call-1").stdout
    clean(said)
    assert r"i\x1b[2J" in said
    assert said.endswith('"é"\n')


def test_errors_and_notes_command_no_terminal(gateway: Gateway) -> None:
    gateway.will(Answer(problem=FunctionError(FOUL)), Answer((error(FunctionNotFound(FOUL)),)))
    for _ in range(2):
        clean(here("fn", "invoke", "chat").stderr)
    gateway.notes.append(FOUL)
    said = Answer((sse({"stage": "weights", "message": FOUL}, event="progress"), sse("ok", id=0), DONE))
    gateway.will(said)
    shown = here("fn", "invoke", "chat").stderr
    clean(shown)
    assert len(shown.splitlines()) == 1, "one line a stage"
    clean(here("fn", "nothing" + FOUL).stderr)


def test_a_stage_that_says_later_what_it_waits_for_is_shown_so(gateway: Gateway) -> None:
    steps = (
        {"stage": "sandbox"},
        {"stage": "sandbox", "message": "pip, 1 s"},
        {"stage": "sandbox", "message": "pip, 2 s"},
    )
    gateway.will(Answer((*(sse(step, event="progress") for step in steps), sse("ok", id=0), DONE)))
    assert here("fn", "invoke", "chat").stderr.splitlines() == ["chat: sandbox", "chat: pip, 1 s"]


def test_a_stage_that_waits_no_longer_is_not_left_as_waiting(gateway: Gateway) -> None:
    """As ``images.ensure`` tells it: requirements are installed for minutes."""
    said = ("", "another image is waited for", "requirements: a", "requirements: a", "node in 40 s", "node in 39 s")
    steps = ({"stage": "sandbox", **({"message": each} if each else {})} for each in said)
    gateway.will(Answer((*(sse(step, event="progress") for step in steps), sse("ok", id=0), DONE)))
    shown = ["sandbox", "another image is waited for", "requirements: a", "node in 40 s"]
    assert here("fn", "invoke", "chat").stderr.splitlines() == [f"chat: {each}" for each in shown]


def test_what_a_function_answers_and_logs_is_its_own(gateway: Gateway) -> None:
    gateway.will(Answer((sse("\x1b[31mred", id=0), DONE)))
    assert here("fn", "invoke", "chat").stdout == "\x1b[31mred\n"
    line = {"at": 0.0, "version": 1, "instance": "i", "node": "n", "stream": "stdout", "text": "\x1b[31mred"}
    gateway.will(Answer((sse(line), DONE)))
    assert here("fn", "logs", "chat").stdout.endswith("stdout: \x1b[31mred\n")


def test_json_is_as_it_was(gateway: Gateway) -> None:
    gateway.will(Answer(problem=FunctionError(FOUL)))
    assert r"rot \u001b[31mX" in here("fn", "invoke", "chat", "--json").stderr


def test_a_table_on_a_terminal_commands_none(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        output.table(("NAME", "ERROR"), [("a", "x\x1b]0;t\x07\u202ey")], empty="")
    assert "\x1b]0" not in terminal.getvalue()
    assert r"x\x1b]0;t\x07\u202ey" in plain(terminal)


def test_what_is_printable_stays() -> None:
    assert output.printable("a\tb\né😀 \\x1b") == "a\tb\né😀 \\x1b"
    assert output.one_line("a\tb\né\u2028") == r"a\tb\né\u2028"


def test_json_commands_no_terminal_and_reads_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"why\u202e": "".join(map(chr, range(0x300))) + "\u2066\u2028é😀"}
    output.value(document)
    shown = capsys.readouterr().out
    assert json.loads(shown) == document
    assert not {code for code in map(ord, shown.rstrip("\n")) if code in output._COMMANDING}
    assert "é😀" in shown


def test_other_numbers_are_no_news(capsys: pytest.CaptureFixture[str]) -> None:
    shown = output.Progress("f")
    for each in ("8 GiB are free", "7.9 GiB are free", "8 GiB are free", "1,024 of 9 MiB", "900 of 9 MiB"):
        shown(ProgressView(stage="capacity", message=each))
    assert capsys.readouterr().err.splitlines() == ["f: 8 GiB are free", "f: 1,024 of 9 MiB"]

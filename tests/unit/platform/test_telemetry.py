"""Log lines."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.telemetry import configure_logging
from sllm_runtime.platform.trace import within
from tests.unit.platform.test_trace import TRACE


@pytest.fixture(autouse=True)
def root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def speak(capsys: pytest.CaptureFixture[str], **given: object) -> str:
    configure_logging("invoker", "n1", Settings.load({}, **given))
    log = logging.getLogger("sllm_invoker.x")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.warning("instance %s failed", "i1", exc_info=True, extra={"call": "c1"})
    log.debug("not shown")
    return capsys.readouterr().err


def test_text_has_identity_message_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    lines = speak(capsys).splitlines()
    assert "WARNING n1 instance i1 failed" in lines[0]
    assert all(line.startswith("    ") for line in lines[1:])  # so that a record begins where a line does not
    assert lines[-1].endswith("lines call=c1")


def test_what_a_function_says_commands_no_terminal_and_makes_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("invoker", "n1", Settings.load({}))
    said = "\x1b[2Jgone\r2026-01-01T00:00:00.000Z ERROR\x9b\u2028more\tso"
    logging.getLogger("sllm_runtime.test").warning("%s", said, extra={"call": "c1\nc2"})
    line = capsys.readouterr().err
    assert line.endswith("\\x1b[2Jgone\\r2026-01-01T00:00:00.000Z ERROR\\x9b\\u2028more\tso call=c1 c2\n")
    assert len(line.splitlines()) == 1


def test_a_line_of_a_request_names_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    with within(TRACE):
        assert speak(capsys).endswith("call=c1 trace=0af7651916cd43dd8448eb211c80319c\n")


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = speak(capsys, log_json=True).splitlines()
    found = json.loads(line)
    assert {key: found[key] for key in ("level", "component", "identity", "logger", "call")} == {
        "level": "warning",
        "component": "invoker",
        "identity": "n1",
        "logger": "sllm_invoker.x",
        "call": "c1",
    }
    assert found["message"].endswith("ValueError: two\nlines")


def test_what_up_says_of_its_daemons_is_json_as_theirs_is() -> None:
    """It lies beside their logs, and says which of them has died."""
    code = "import logging, sllm_runtime.platform.commands as c; c._begin(False);"
    code += "log = logging.getLogger('sllm_runtime.platform.supervise'); log.info('no'); log.error('%s ended', 'g1')"
    for how, said in (("1", True), ("0", False)):
        env = {**os.environ, "SLLM_LOG_JSON": how}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        (line,) = done.stderr.splitlines()
        if said:
            found = json.loads(line)
            assert (found["level"], found["component"], found["message"]) == ("error", "platform", "g1 ended")
            assert found["at"] > 0
        else:
            assert line == "g1 ended"

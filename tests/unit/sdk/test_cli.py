"""The command line as a program of its own: what is on stdout, what on stderr, and the exit status."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sllm import bundle, profiles, transport
from sllm.cli import fn
from sllm.cli import node as node_verbs
from sllm.cli.top import Look
from sllm_runtime.platform import commands
from sllm_runtime.platform.profile import write_profile
from sllm_runtime.protocol.errors import (
    BY_CODE,
    DeadlineExceeded,
    FunctionError,
    FunctionNotFound,
    InvalidArgument,
    NoCapacity,
    NoController,
    NodeNotFound,
    QueueFull,
    StartFailed,
    Unauthorized,
    Unavailable,
)
from sllm_runtime.protocol.http import (
    CallListView,
    CallView,
    CandidateView,
    DeviceView,
    ExplainView,
    GpuView,
    InstanceView,
    MoveView,
    NodeDetailView,
    OutcomeView,
    StartView,
    StorageView,
    WayView,
)
from tests.fixtures import command
from tests.fixtures.command import WAITS_FOR_ANSWERS, document
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.sdk.gateway import CALL, DONE, TIMELINE, TOKEN, Answer, Gateway, error, progress, sse

SLLM = [sys.executable, "-m", "sllm"]
TEXT = (
    "from sllm import model_function\n\n@model_function(name='chat')\ndef hello(text: str) -> str:\n    return text\n"
)
PIECES = (sse("de", id=0), sse("f é", id=1), TIMELINE, DONE)


def sllm(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONUTF8": "1"}
    return subprocess.run([*SLLM, *words], capture_output=True, text=True, env=env, timeout=60, check=False)


def here(*words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which saves the start of a program."""
    return command.here(os.environ | env, *words, stdin=stdin, expect=None)


def refused(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON object on stderr."""
    assert done.stdout == ""
    found: dict[str, Any] = json.loads(done.stderr)["error"]
    return found


# --- calls ----------------------------------------------------------------------------------------
def test_text_is_printed_as_it_comes(gateway: Gateway) -> None:
    gateway.will(Answer((progress("sandbox"), *PIECES)))
    done = sllm("fn", "invoke", "chat", "text=x", "-v")
    assert (done.returncode, done.stdout) == (0, "def é\n")
    assert "chat: sandbox" in done.stderr
    assert f"call {CALL}" in done.stderr
    assert re.search(r"first_token +20\.0 ms", done.stderr)


def test_json_is_one_value_a_line(gateway: Gateway) -> None:
    gateway.will(Answer(PIECES))
    done = here("fn", "invoke", "chat", "text=x", "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == ["de", "f é"]
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(here("fn", "invoke", "chat", "text=x", "--json", "-v").stderr)
    assert told["call"] == CALL
    assert told["timeline"][1] == {"name": "first_token", "at": 0.1, "ms": 20.0}
    gateway.will(Answer(json={"a": [1]}))
    assert document(here("fn", "invoke", "chat", "--no-stream", "--json")) == {"a": [1]}


@pytest.mark.parametrize("encoding", ["iso-8859-1", "ascii", "UTF8"])
def test_json_is_json_whatever_letters_there_are(gateway: Gateway, encoding: str) -> None:
    gateway.will(Answer((sse("é😀\x85", id=0), DONE)), Answer(problem=FunctionNotFound("no é😀")))
    words = [*SLLM, "fn", "invoke", "chat", "text=x", "--json"]
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(words, capture_output=True, env=env, timeout=60, check=True)
    assert json.loads(done.stdout.decode(encoding)) == "é😀\x85"
    assert ("😀".encode() in done.stdout) == encoding.lower().startswith("utf")
    refused = subprocess.run(words, capture_output=True, env=env, timeout=60, check=False)
    assert json.loads(refused.stderr.decode(encoding))["error"]["message"] == "no é😀"


def test_arguments_by_word_file_and_stdin(gateway: Gateway, tmp_path: Path) -> None:
    gateway.will(Answer(PIECES))
    (tmp_path / "args.json").write_text('{"a": 1, "text": "below"}')
    here("fn", "invoke", "chat", "text=12", "n=12", "other=12", "--args", "@args.json")
    assert gateway.asked[-1][2] == {"a": 1, "text": "12", "n": 12, "other": 12}
    here("fn", "invoke", "chat", "--json-args", "-", stdin='{"text": "from stdin"}')
    assert gateway.asked[-1][2] == {"text": "from stdin"}
    assert [path for method, path, *_ in gateway.asked if method == "GET"] == ["/api/v1/functions/chat"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_arguments_of_a_file_are_json_whatever_this_machine_writes(
    gateway: Gateway, tmp_path: Path, encoding: str
) -> None:
    """A Windows' Python reads text in the machine's code page; its editors and shells begin UTF with a mark."""
    gateway.will(Answer(PIECES))
    (tmp_path / "args.json").write_bytes('{"text": "Grüße 世"}'.encode(encoding))
    env = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    for words, stdin in (("@args.json", b""), ("-", (tmp_path / "args.json").read_bytes())):
        done = subprocess.run(
            [*SLLM, "fn", "invoke", "chat", "--args", words], input=stdin, capture_output=True, env=env, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert gateway.asked[-1][2] == {"text": "Grüße 世"}


def test_words_of_kwargs_are_read_by_their_hint(tmp_path: Path) -> None:
    file = tmp_path / "function.py"
    file.write_text(
        "from sllm import model_function\n\n\n@model_function()\ndef tags(n: int, **more: str) -> dict:\n"
        "    return {'n': n, **more}\n"
    )
    assert document(here("run", str(file), "n=1", "zip=10115", "on=true", "--json")) == {
        "n": 1, "zip": "10115", "on": "true"
    }  # fmt: skip


def test_words_for_another_version_are_read_by_the_types_of_the_active_one_which_is_said(gateway: Gateway) -> None:
    gateway.will(Answer(PIECES))
    said = here("fn", "invoke", "chat", "text=12", "n=12", "of=x", "--version", "2").stderr
    assert "text=12 n=12: read by the types of v1, which is active; --args is exact" in said
    assert gateway.asked[-1][1:3] == ("/fn/chat/v2", {"text": "12", "n": 12, "of": "x"})
    assert here("fn", "invoke", "chat", "text=12", "--version", "2", "--json").stderr == ""
    assert here("fn", "invoke", "chat", "text=12", "--version", "1").stderr == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["text"], "'text' is not key=value"),
        (["x=1", "x=2"], "x is there twice; give a list"),
        (["--args", "{"], "--args is no JSON"),
        (["--args", "@nowhere"], "--args @nowhere cannot be read"),
    ],
)
def test_wrong_arguments(gateway: Gateway, words: list[str], said: str) -> None:
    done = here("fn", "invoke", "chat", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert gateway.asked == []


# --- exit status ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "problem",
    [
        InvalidArgument("no", field="text"),
        FunctionNotFound("no"),
        Unauthorized("no"),
        StartFailed("no", stage="import"),
    ],
)
def test_an_errors_own_status(gateway: Gateway, problem: Any) -> None:
    gateway.will(Answer(problem=problem))
    done = here("fn", "invoke", "chat", "--json")
    assert done.returncode == problem.exit_code == BY_CODE[problem.code].exit_code
    found = refused(done)
    assert (found["code"], found["message"]) == (problem.code, "no")
    assert (found.get("field"), found.get("stage")) == (problem.field, problem.stage)
    shown = here("fn", "invoke", "chat")
    assert (shown.returncode, shown.stdout) == (done.returncode, "")
    assert shown.stderr.startswith("error: no")


def test_an_error_in_mid_stream(gateway: Gateway) -> None:
    gateway.will(Answer((sse("de", id=0), error(StartFailed("weights are broken", stage="weights")))))
    done = here("fn", "invoke", "chat")
    assert (done.returncode, done.stdout) == (5, "de\n")
    assert "weights are broken (weights)  [start_failed]" in done.stderr


def test_what_a_function_raised_is_said_with_where_its_line_is(gateway: Gateway) -> None:
    """Type and text alone may say nothing: ``AssertionError: ``."""
    ends = error(FunctionError("AssertionError: "))
    gateway.will(Answer((progress("setup"), ends)))
    done = here("fn", "invoke", "chat")
    assert f"error: AssertionError; see `sllm fn logs chat --call {CALL}`" in done.stderr
    assert refused(here("fn", "invoke", "chat", "--json"))["message"] == "AssertionError: "


def test_wrong_usage() -> None:
    for words in (["fn", "nothing"], ["fn", "deploy"], ["--nothing"], ["fn", "logs", "x", "--limit", "many"]):
        done = here(*words)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert "--help" in done.stderr
        assert refused(here(*words, "--json"))["code"] == "usage"
    assert "Usage: sllm fn" in here("fn").stderr


def test_nobody_there() -> None:
    done = here("--url", "http://127.0.0.1:9", "fn", "list", "--json")
    assert done.returncode == 5
    assert refused(done)["code"] == "unavailable"


def test_a_reader_that_goes_away(gateway: Gateway) -> None:
    gateway.will(Answer((*(sse("x" * 1000, id=index) for index in range(500)), DONE)))
    with subprocess.Popen([*SLLM, "fn", "invoke", "chat"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.read(process.stdout.fileno(), 10)
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == b""


# --- Ctrl-C ---------------------------------------------------------------------------------------
def interrupted(gateway: Gateway, *words: str, prints: bool = False, argv: Sequence[str] = SLLM) -> tuple[int, str]:
    """Exit status and stderr of a command that is interrupted once the gateway has its request and, if it ``prints``,
    it has begun to."""
    gateway.reached.clear()
    with subprocess.Popen([*argv, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert gateway.reached.wait(GIVE_UP_S)
        assert process.stdout is not None
        if prints:
            assert os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=GIVE_UP_S)
    return process.returncode, errors


def test_ctrl_c_cancels_the_call(gateway: Gateway) -> None:
    gateway.will(Answer((sse("de", id=0),), hangs=True))
    status, errors = interrupted(gateway, "fn", "invoke", "chat", prints=True)
    assert status == 130
    assert f"call {CALL} is cancelled" in errors
    assert gateway.left.wait(GIVE_UP_S)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(json={"undone": True}), "chat is not deployed: what was begun is undone"),
        (Answer(json={"undone": False, "version": 3}), "chat v3 was deployed already; `sllm fn rollback chat`"),
        (Answer(problem=Unavailable("no controller")), "the deployment of chat may go on; `sllm fn describe chat`"),
        (Answer(silent=True), "the deployment of chat may go on; `sllm fn describe chat`"),
    ],
)
def test_ctrl_c_of_a_deployment_undoes_it(gateway: Gateway, tmp_path: Path, answer: Answer, said: str) -> None:
    (tmp_path / "function.py").write_text(TEXT)
    gateway.will(Answer((progress("sandbox"),), hangs=True))
    gateway.withdrawal = answer
    argv = SLLM if answer.silent else WAITS_FOR_ANSWERS
    status, errors = interrupted(gateway, "fn", "deploy", "function.py", "--json", argv=argv)
    assert status == 130
    problem = json.loads(errors)["error"]
    assert problem["code"] == "interrupted"
    assert said in problem["message"]
    (request,) = gateway.requests
    assert {path for method, path, *_ in gateway.asked if method == "DELETE"} == {f"/api/v1/deployments/{request}"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("node", "drain", "n1"), "n1 goes on draining: `sllm node uncordon n1` ends that"),
        (("migrate", "chat-1"), "it goes on moving: `sllm migrate chat-1` again says how that ends"),
        (("call", "cancel", CALL), f"{CALL} may be cancelled: `sllm call status {CALL}` says so"),
        (("model", "place"), "the nodes may go on with it"),
        (("model", "delete", "aaaa"), "it may be deleted"),
        (("model", "validate", "aaaa"), "its nodes go on reading it"),
        (("node", "cordon", "n1"), "what was asked for before may be done"),
    ],
)
def test_ctrl_c_says_what_may_go_on(gateway: Gateway, words: tuple[str, ...], said: str) -> None:
    node = {
        "node": "n1", "alive": True, "cordoned": True, "draining": True, "age_s": 0.0, "cpu": 2, "free_cpu": 1,
        "memory": 4, "free_memory": 3, "instances": 2,
    }  # fmt: skip
    gateway.will(*([Answer(json=node)] if "drain" in words else []), Answer(hangs=True))
    status, errors = interrupted(gateway, *words)
    assert status == 130
    assert said in errors


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(json={"id": CALL, "state": "CANCELLED"}), f"call {CALL} is cancelled"),
        (Answer(problem=Unavailable("it stops")), f"may go on, no gateway answered: `sllm call cancel {CALL}` ends it"),
    ],
)
def test_ctrl_c_of_a_call_that_is_read_on(gateway: Gateway, answer: Answer, said: str) -> None:
    """As at a gateway that was started again."""
    gateway.will(Answer((sse("de", id=0),), breaks=True), answer)
    gateway.reads = [Answer((sse("f", id=1),), hangs=True)]
    argv = [*WAITS_FOR_ANSWERS, "fn", "invoke", "chat"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == "def"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=GIVE_UP_S)
    assert process.returncode == 130
    assert said in errors
    assert gateway.asked[-1][:2] == ("POST", f"/v1/calls/{CALL}/cancel")


def test_ctrl_c_of_logs(gateway: Gateway) -> None:
    gateway.will(Answer(hangs=True))
    assert interrupted(gateway, "fn", "logs", "chat", "-f")[0] == 130


BEGUN = "import os, runpy; os.write(1, b'.'); runpy.run_module('sllm', run_name='__main__', alter_sys=True)"
"""Says that Python has started: a Ctrl-C before that is its own to answer, which it does with status 1."""


def test_ctrl_c_at_any_moment_of_the_start() -> None:
    """Also while modules are imported: no traceback."""
    for after in (0.0, 0.08, 0.16, 0.32):
        argv = [sys.executable, "-c", BEGUN, "doctor"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"."
            time.sleep(after)  # the moments are the point
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=GIVE_UP_S)
        assert process.returncode in (130, -signal.SIGINT)
        assert process.returncode == -signal.SIGINT or b"Traceback" not in errors


LOST = """
import os, signal, sys
from sllm.cli import ctrl_c
ctrl_c.prepare()
class Drops:
    def __del__(self): os.kill(os.getpid(), signal.SIGINT)  # what is raised here goes nowhere
class Lock:
    taken = False
    def __enter__(self):
        self.taken = True
        os.kill(os.getpid(), signal.SIGINT)
        if sys.argv[1] == "taken over":
            signal.signal(signal.SIGINT, lambda *_: os._exit(7))
        return self
    def __exit__(self, *_): self.taken = False
lock = Lock()
try:
    if sys.argv[1] == "import":
        sys.path.insert(0, sys.argv[2])
        import drops
    else:
        with lock:
            signal.pause()
    signal.pause()
except KeyboardInterrupt:
    sys.exit(9 if lock.taken else 130)
"""


@pytest.mark.parametrize(("place", "status"), [("import", 130), ("with", 130), ("taken over", 7)])
def test_ctrl_c_where_nothing_can_be_raised(place: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "drops.py").write_text("import __main__\n__main__.Drops()\n")
    argv = [sys.executable, "-c", LOST, place, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, timeout=GIVE_UP_S, check=False)
    assert (done.returncode, done.stderr) == (status, b"")


USERS = {
    ("fn", "deploy", "function.py"): "import os, threading\nos.write(1, b'.')\nthreading.Event().wait()\n",
    ("run", "function.py"): """
import os, time
from sllm import model_function

@model_function
class Waits:
    def __call__(self) -> str:
        os.write(1, b".")
        while True:
            time.sleep(60)
""",
}
NEVER_BY_ITSELF = """
import os
from sllm.cli import ctrl_c, main
can = ctrl_c._can_raise
ctrl_c._can_raise = lambda frame: os.write(1, b"!") and can(frame)  # says that it looks
ctrl_c.PATIENCE_S = float("inf")
main()
"""


DEPLOY, RUN = USERS


@pytest.mark.parametrize(("words", "impatient"), [(DEPLOY, False), (DEPLOY, True), (RUN, False)])
def test_ctrl_c_ends_what_a_users_code_waits_for(tmp_path: Path, words: tuple[str, ...], impatient: bool) -> None:
    """While it is imported, and within a ``__call__``: by itself after a while, or at the next one."""
    (tmp_path / "function.py").write_text(USERS[words])
    argv = [sys.executable, "-c", NEVER_BY_ITSELF, *words] if impatient else [*SLLM, *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"."
            process.send_signal(signal.SIGINT)
            if impatient:
                assert process.stdout.read(2) == b"!!"  # the first waits
                process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=GIVE_UP_S)
        finally:
            process.kill()
    assert process.returncode == 130, errors


def test_an_alarm_that_is_still_to_come_does_not_kill_what_ends() -> None:
    code = "import os, signal; from sllm.cli import ctrl_c; ctrl_c.prepare(); ctrl_c.leave()"
    argv = [sys.executable, "-c", f"{code}; os.kill(os.getpid(), signal.SIGALRM)"]
    assert subprocess.run(argv, timeout=GIVE_UP_S, check=False).returncode == 0


# --- deployment -----------------------------------------------------------------------------------
def test_deploy(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "function.py").write_text(TEXT)
    done = here("fn", "deploy", ".")
    assert (done.returncode, done.stdout) == (0, f"chat v1: POST {gateway.url}/fn/chat\n")
    assert re.search(r"chat: 1 files, \d+ B", done.stderr)
    found = document(here("fn", "deploy", "function.py::hello", "--json"))
    assert ".sllmignore" not in done.stderr
    (tmp_path / "much").write_bytes(bytes(bundle.MUCH))
    assert ".sllmignore" in here("fn", "deploy", "function.py::hello").stderr
    assert (found["version"], found["function"]["name"]) == (1, "chat")
    gateway.notes.append("slo: nothing acts on it yet")
    assert "chat: slo: nothing acts on it yet\n" in here("fn", "deploy", "function.py::hello").stderr
    assert document(here("fn", "deploy", "function.py::hello", "--json"))["notes"] == gateway.notes


def test_of_a_link_that_is_left_out_it_is_said_what_it_is(gateway: Gateway, tmp_path: Path) -> None:
    """Who is told that it leads out of the directory looks for a mistake that is none."""
    (tmp_path / "function.py").write_text(TEXT)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "m.py").write_text("")
    (tmp_path / "link").symlink_to("lib")
    (tmp_path / "out.txt").symlink_to("/etc/hostname")
    said = here("fn", "deploy", "function.py").stderr
    assert "chat: link is a link to a directory and is left out; only files are followed\n" in said
    assert "chat: out.txt is a link to outside its directory and is left out\n" in said


def test_nothing_is_deployed_where_one_is_wrong(gateway: Gateway, tmp_path: Path) -> None:
    second = "\n@model_function(memory='much')\ndef second(text: str) -> str:\n    return text\n"
    (tmp_path / "function.py").write_text(TEXT + second)
    done = here("fn", "deploy", "function.py", "--json")
    assert (done.returncode, refused(done)["code"]) == (2, "invalid_manifest")
    assert (gateway.deployed, gateway.bundles) == ([], {})


def test_a_deployment_that_fails(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "function.py").write_text(TEXT)
    gateway.will(Answer((progress("sandbox"), error(NoCapacity("needs an H100; node n1 has none")))))
    done = here("fn", "deploy", "function.py")
    assert done.returncode == 5
    assert "needs an H100; node n1 has none" in done.stderr


@pytest.mark.parametrize(("stage", "points"), [("import", True), ("setup", True), ("sandbox", False)])
def test_a_start_that_a_functions_own_code_fails_says_where_its_line_is(
    gateway: Gateway, tmp_path: Path, stage: str, points: bool
) -> None:
    (tmp_path / "function.py").write_text(TEXT)
    gateway.will(Answer((error(StartFailed(f"{stage} failed: KeyError: 'A'", stage=stage)),)))
    done = here("fn", "deploy", "function.py")
    assert done.returncode == 5
    assert ("; see `sllm fn logs chat`" in done.stderr) is points


# --- the rest -------------------------------------------------------------------------------------
def test_init_begins_a_function_that_can_be_deployed(gateway: Gateway, tmp_path: Path) -> None:
    found = document(here("fn", "init", "hello", "--json"))
    assert "function.py" in found["files"]
    assert document(here("fn", "deploy", "hello", "--json"))["function"]["name"] == "hello"
    assert "next: sllm fn deploy 'a b/function.py'\n" in here("fn", "init", "a b").stderr
    again = here("fn", "init", "hello")
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
    assert "there are: basic, class, llm" in here("fn", "init", "x", "--template", "none").stderr
    assert not (tmp_path / "x").exists()


def test_lists(gateway: Gateway) -> None:
    assert document(here("fn", "list", "--json"))["functions"][0]["name"] == "chat"
    rows = here("fn", "list").stdout.splitlines()
    assert [row.split("\t")[:2] for row in rows] == [["NAME", "ACTIVE"], ["chat", "v1"]]
    assert document(here("fn", "describe", "chat", "--json"))["active"] == 1
    assert document(here("fn", "history", "chat", "--json"))[0]["version"] == 1
    gateway.will(Answer(json={"nodes": []}))
    assert document(here("node", "list", "--json")) == {"nodes": []}
    assert "no nodes have joined" in here("node", "list").stderr


def test_a_node_is_forgotten(gateway: Gateway) -> None:
    gateway.will(Answer(json={"node": "n1", "forgotten": True}))
    assert here("node", "forget", "n1").stdout == "n1 is forgotten\n"
    assert gateway.asked[-1][:2] == ("DELETE", "/api/v1/nodes/n1")
    assert document(here("node", "forget", "n1", "--json")) == {"node": "n1", "forgotten": True}


def test_a_drain_waits_as_long_as_it_is_told_to(gateway: Gateway) -> None:
    node = {
        "node": "n1", "alive": True, "cordoned": True, "draining": True, "age_s": 0.0, "cpu": 2, "free_cpu": 1,
        "memory": 4, "free_memory": 3, "instances": 2,
    }  # fmt: skip
    unheard = node | {"alive": False, "instances": 0}
    gateway.will(Answer(json=node), Answer(json=unheard), Answer(json=node | {"instances": 0}))
    drained = here("node", "drain", "n1")
    assert drained.stdout == "n1 is drained\n", drained.stderr
    gateway.will(Answer(json=node), Answer(json=node | {"cordoned": False, "draining": False}))
    away = Unavailable("no gateway answers")
    gateway.will(Answer(json=node), *[Answer(problem=away)] * 4, Answer(json=node | {"instances": 0}))
    patient = here("node", "drain", "n1")
    assert patient.stdout == "n1 is drained\n", "a gateway that is started anew is waited for"
    gateway.will(Answer(json=node), Answer(json=node | {"cordoned": False, "draining": False}))
    undone = here("node", "drain", "n1")
    assert (undone.returncode, undone.stdout) == (2, "")
    assert "taken into use again" in undone.stderr
    gateway.will(Answer(json=node))
    assert here("node", "drain", "n1", "--no-wait").stdout == "n1 is being drained\n"
    gateway.will(Answer(json=node))
    late = here("node", "drain", "n1", "--timeout", "0")
    assert (late.returncode, late.stdout) == (5, "")
    assert "2 instance(s) still run on n1 after 0 s" in late.stderr


def test_a_drain_that_hears_of_nobody_blames_who_is_silent(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_verbs, "UNHEARD_S", 0.5)
    monkeypatch.setattr(node_verbs, "POLL_S", 0.1)
    node = {
        "node": "n1", "alive": True, "cordoned": True, "draining": True, "age_s": 0.0, "cpu": 2, "free_cpu": 1,
        "memory": 4, "free_memory": 3, "instances": 2,
    }  # fmt: skip
    gateway.will(Answer(json=node), Answer(problem=NoController("no controller leads")))
    away = here("node", "drain", "n1")
    assert (away.returncode, away.stdout) == (5, "")
    assert "no controller leads" in away.stderr
    assert "n1 is not heard" not in away.stderr, "nobody knows that"
    gateway.will(Answer(json=node), Answer(json=node | {"alive": False}))
    assert "node n1 is not heard" in here("node", "drain", "n1").stderr


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({}, "alive"),
        ({"condition": "podman hangs"}, "makes no sandboxes"),
        ({"cordoned": True, "condition": "podman hangs"}, "cordoned"),
        ({"cordoned": True, "draining": True}, "draining"),
        ({"cordoned": True, "alive": False, "age_s": 7.0}, "silent for 7 s"),
        ({"cordoned": True, "alive": False, "left": True, "age_s": 3.0}, "left 3 s ago"),
    ],
)
def test_what_is_decided_of_a_node_is_shown_wherever_it_is(gateway: Gateway, said: dict[str, Any], state: str) -> None:
    node = {
        "node": "n1", "alive": True, "cordoned": False, "draining": False, "age_s": 0.0, "cpu": 2, "free_cpu": 1,
        "memory": 4, "free_memory": 3, **said,
    }  # fmt: skip
    counted = Answer(raw=b"")
    for verb, answers in (
        (("node", "list"), [Answer(json={"nodes": [node]})]),
        (("node", "describe", "n1"), [Answer(json=node)]),
        (("top",), [counted, Answer(json={"nodes": [node]}), counted]),
    ):
        gateway.will(*answers)
        shown = here(*verb).stdout
        assert ["n1", state] in [line.split("\t")[:2] for line in shown.splitlines()], verb
        if verb[-1] == "n1" and state.startswith("silent"):
            assert "NOTHING IS STARTED HERE: it is cordoned" in shown


def test_a_node_says_what_lies_where(gateway: Gateway) -> None:
    digest = "sha256:" + "ab" * 32
    node: dict[str, Any] = {
        "node": "n1", "alive": True, "cordoned": False, "draining": False, "age_s": 0.0, "cpu": 2, "free_cpu": 1,
        "memory": 4, "free_memory": 3, "tiers": {digest: ["dram", "ssd"]}, "labels": {"zone": "a", "gpu": "l4"},
        "here": [{"instance": "chat-1", "function": "chat", "version": 2, "state": "READY", "running": 3}],
        "storage": {
            "dram_used": 2**20, "dram_limit": 2**30, "dram_ready": 2**21, "ssd_used": 0, "ssd_limit": 2**30,
            "disk_free": 2**30, "integrity": False, "devices": [{"device": "fake:0", "limit": 2**21, "used": 0}],
            "paths": [{"path": "disk", "bandwidth": 2.0**30, "queued": 3}],
        },
    }  # fmt: skip
    gateway.will(Answer(json=node))
    assert document(here("node", "describe", "n1", "--json"))["tiers"] == node["tiers"]
    gateway.will(Answer(json=node))
    shown = here("node", "describe", "n1").stdout
    assert "INTEGRITY IS OFF" in shown
    assert "labels: gpu=l4, zone=a\n" in shown
    rows = [line.split("\t") for line in shown.splitlines()]
    assert ["dram", "1.0 MiB", "1.0 GiB", "2.0 MiB ready ahead"] in rows
    assert ["disk", "1.0 GiB/s", "3 B"] in rows
    assert ["abababababab", "dram, ssd"] in rows
    assert ["chat-1", "chat v2", "READY", "3"] in rows
    assert "of which its report has no room to tell" not in shown
    gateway.will(Answer(json=node | {"untold": 7}))
    assert "and 7 more, of which its report has no room to tell" in here("node", "describe", "n1").stdout
    gateway.will(Answer(json=node | {"storage": None, "tiers": {}}))
    assert "loaderd is away" in here("node", "describe", "n1").stdout
    gateway.will(Answer(json=node | {"condition": "podman hangs"}))
    shown = here("node", "describe", "n1").stdout
    assert "NOTHING IS STARTED HERE: podman hangs" in shown
    assert ["n1", "makes no sandboxes"] in [line.split("\t")[:2] for line in shown.splitlines()]
    model = {
        "digest": digest,
        "uri": "/m",
        "bytes": 1,
        "partitions": [1],
        "architecture": "A",
        "tensors": 1,
        "dtype": "f",
    }
    gateway.will(Answer(json={"models": [model]}), Answer(json={"nodes": [node]}), Answer(json=node))
    assert "n1: dram, ssd" in here("model", "list", "--tiers").stdout


def test_a_functions_instances_say_what_they_are(gateway: Gateway) -> None:
    ready = InstanceView(instance="i1", version=1, node="n1", state="READY")
    said = {"fingerprint": "0123456789abcdef", "capabilities": ("engine:ours", "lora", "sleep")}
    gateway.instances += [ready.model_copy(update=said), ready]
    rows = [line.split("\t") for line in here("fn", "describe", "chat").stdout.splitlines()[-3:]]
    assert rows[0] == ["INSTANCE", "VERSION", "NODE", "STATE", "ENGINE", "NUMERICS", "ERROR"]
    assert rows[1][:6] == ["i1", "v1", "n1", "READY", "ours: lora, sleep", "0123456789ab"]
    assert rows[2][4:6] == ["-", "-"]


def test_logs(gateway: Gateway) -> None:
    line = {"at": 0.0, "version": 1, "instance": "i", "node": "n", "stream": "stdout", "text": "hello", "call": CALL}
    gateway.will(Answer((sse(line), ": heartbeat\n", DONE)))
    done = here("fn", "logs", "chat", "--call", CALL)
    assert re.fullmatch(rf"(1970-01-01|1969-12-31) [\d:]+ v1 i {CALL} stdout: hello\n", done.stdout)
    assert document(here("fn", "logs", "chat", "--json"))["text"] == "hello"
    gateway.will(Answer((sse(line), error(FunctionNotFound("no function chat")))))
    assert here("fn", "logs", "chat").returncode == 3


def test_models_and_directories(gateway: Gateway, tmp_path: Path) -> None:
    view = {"digest": "sha256:" + "a" * 64, "uri": "/m", "bytes": 5, "partitions": [5], "architecture": "X"}
    gateway.will(Answer(json={**view, "tensors": 1, "dtype": "float32"}))
    assert document(here("model", "describe", "aaaa", "--json"))["architecture"] == "X"
    assert document(here("model", "validate", "sha256:aaaa", "--json")) == {"model": view["digest"], "valid": True}
    gateway.will(Answer(json={**view, "tensors": 1, "dtype": "float32", "problem": "chunk 3 of rank 0 is wrong"}))
    done = here("model", "validate", "aaaa")
    assert (done.returncode, "chunk 3 of rank 0" in done.stderr) == (2, True)
    goes_on = Answer(problem=DeadlineExceeded("n1: validate goes on; ask again"))
    gateway.will(goes_on, goes_on, Answer(json={**view, "tensors": 1, "dtype": "float32", "nodes": ["n1"]}))
    assert here("model", "validate", "aaaa").stdout == f"{view['digest']}: every byte is right on n1\n"
    gateway.will(Answer(json={**view, "tensors": 1, "dtype": "float32", "problem": "n2 still has it: it is in use"}))
    done = here("model", "delete", "aaaa")
    assert (done.returncode, done.stdout) == (0, "aaaa: deleted\n")
    assert "n2 still has it: it is in use" in done.stderr
    assert refused(here("model", "delete", "../functions/chat", "--json"))["code"] == "model_not_found"
    assert gateway.asked[-1][1].endswith("/models/aaaa"), "no other thing is deleted"
    assert refused(here("model", "describe", "no-such", "--json"))["code"] == "model_not_found"
    assert refused(here("model", "validate", str(tmp_path), "--json"))["code"] == "invalid_checkpoint"


def test_profiles_by_command(gateway: Gateway, home: Path) -> None:
    assert here("profile", "set", "mine").returncode == 0  # what the environment says
    assert document(here("profile", "list", "--json"))["profiles"] == [
        {"name": "mine", "url": gateway.url, "token": True}
    ]
    assert here("--url", "http://127.0.0.1:9", "profile", "set", "gone").returncode == 0
    assert here("--profile", "gone", "fn", "list").returncode == 5  # the flag wins over the environment
    assert here("fn", "list", SLLM_URL="", SLLM_PROFILE="mine").returncode == 0
    assert here("profile", "delete", "gone").returncode == 0
    assert here("profile", "delete", "gone").returncode == 3
    assert [each.name for each in profiles.stored()] == ["mine"]
    assert "no-such" in here("--profile", "no-such", "fn", "list").stderr


def test_sllm_toml_of_the_project(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLLM_URL")
    (tmp_path / "sllm.toml").write_text(f'url = "{gateway.url}"\n')
    done = here("fn", "list", "--json")
    assert (done.returncode, refused(done)["field"]) == (2, "token")
    assert gateway.asked == []
    monkeypatch.delenv("SLLM_TOKEN")
    assert here("fn", "list").returncode == 0
    assert gateway.tokens[-1] is None
    assert here("--url", gateway.url, "--token", TOKEN, "profile", "set", "team").returncode == 0
    assert here("fn", "list").returncode == 0
    assert gateway.tokens[-1] == f"Bearer {TOKEN}"


def test_what_names_a_platform_to_talk_to_is_not_for_up_and_down(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (
        ("--url", "http://h", "up"), ("--token", "t", "up"), ("--url", "http://h", "down"), ("--token", "t", "down"),
        ("--profile", "p", "down"),
    ):  # fmt: skip
        found = refused(here(*words, "--json"))
        assert (found["code"], f"leave {words[0]} out" in found["message"]) == ("invalid_request", True)
    assert "outlived" in refused(here("up", "--detach", "--with-parent", "--json"))["message"]
    asked: list[str] = []
    monkeypatch.setattr(commands, "_detached", lambda options, *_: asked.append(options.profile))
    for profile in (("--profile", "dev"), ()):
        assert here(*profile, "up", "--detach", "--port", "0", SLLM_PROFILE="staging").returncode == 0
    assert asked == ["dev", "staging"]


def test_doctor(tmp_path: Path) -> None:
    path = str(tmp_path)  # no engine there: what one leaves behind is its own affair
    found = document(here("doctor", "--json", PATH=path))
    assert found["healthy"] is True
    assert {"check", "level", "what", "remedy"} == set(found["checks"][0])
    broken = here("doctor", "--json", SLLM_NATS_URL="nats://127.0.0.1:9", PATH=path)
    assert broken.returncode == 1
    assert [each["check"] for each in json.loads(broken.stdout)["checks"] if each["level"] == "failure"] == ["nats"]


def test_doctor_asks_the_platform_that_is_named(gateway: Gateway, tmp_path: Path) -> None:
    gateway.will(Answer(json={"version": "9.9.9", "gateway": "g1", "nodes": 1, "functions": 0, "controller": True}))
    words = ("--url", gateway.url, "doctor", "--json")
    found = document(here(*words, PATH=str(tmp_path), SLLM_URL="http://127.0.0.1:9"))
    asked = next(each for each in found["checks"] if each["check"] == "gateway")
    assert asked["what"].startswith(f"{gateway.url}: version 9.9.9")


def test_retries_are_not_seen(gateway: Gateway) -> None:
    gateway.will(Answer(problem=QueueFull("full")), Answer(PIECES))
    done = here("fn", "invoke", "chat")
    assert (done.returncode, done.stdout, done.stderr) == (0, "def é\n", "")


def test_completion() -> None:
    done = here(_SLLM_COMPLETE="complete_bash", COMP_WORDS="sllm fn de", COMP_CWORD="2")
    assert done.stdout.split() == ["deploy", "describe", "delete"]
    assert "--install-completion" in here("--help").stdout
    assert "--install-completion" not in here("fn", "--help").stdout


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_a_table_and_colours_if_it_wants_them(gateway: Gateway, no_color: str) -> None:
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **({"NO_COLOR": no_color} if no_color else {})}
    leader, follower = pty.openpty()
    try:
        gateway.will(Answer(problem=FunctionNotFound("[red]no[/red]")))
        done = subprocess.run([*SLLM, "fn", "list"], stdout=follower, stderr=follower, env=env, timeout=60, check=False)
        assert done.returncode == 0
        text = os.read(leader, 65536).decode()
        assert "\t" not in text
        assert "\x1b[1m" in text  # bold is no colour
        done = subprocess.run(
            [*SLLM, "fn", "invoke", "chat"], stdout=follower, stderr=follower, env=env, timeout=60, check=False
        )
        text = os.read(leader, 65536).decode()
        assert "[red]no[/red]" in text
        assert ("\x1b[31m" in text) is not bool(no_color)
    finally:
        os.close(leader)
        os.close(follower)


def test_top_is_drawn_again_and_again_with_tokens_of_calls_that_run(gateway: Gateway) -> None:
    node = NodeDetailView(
        node="n1", alive=True, cordoned=False, draining=False, age_s=0, cpu=4, free_cpu=3, memory=2**30,
        free_memory=2**29, dram_limit=2**30, instances=1,
    ).model_dump(mode="json")  # fmt: skip
    ended = 'sllm_tokens_total{function="chat",kind="completion"} 12.0\n'
    for tokens in (5, 5000):
        metrics = Answer(raw=f'{ended}sllm_tokens_open{{function="chat"}} {tokens}.0\n'.encode())
        gateway.answers += [Answer(json={"nodes": [node]}), metrics]
    gateway.answers.append(Answer(hangs=True))
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "NO_COLOR": "1"}
    leader, follower = pty.openpty()
    text = b""
    try:
        with subprocess.Popen([*SLLM, "top", "--every", "0.2"], stdout=follower, env=env) as process:
            while text.count(b"\x1b[2J") < 2 or not text.split(b"\x1b[2J")[2].count(b"chat"):
                text += os.read(leader, 65536)
            assert gateway.reached.wait(GIVE_UP_S)
            process.send_signal(signal.SIGINT)
            assert process.wait(GIVE_UP_S) == 130
    finally:
        os.close(leader)
        os.close(follower)
    first, second = (each.decode() for each in text.split(b"\x1b[2J")[1:3])
    (before,), (now,) = ([row.split() for row in drawn.splitlines() if "chat" in row] for drawn in (first, second))
    assert "-" in before
    assert any(float(word) > 0 for word in now if re.fullmatch(r"\d+\.\d", word)), now


@pytest.mark.parametrize("silent", [1, 2])
def test_top_adds_up_what_all_gateways_of_the_profile_count(
    gateway: Gateway, home: Path, monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    """One of three does not answer."""
    monkeypatch.delenv("SLLM_URL")
    again = gateway.url.replace("127.0.0.1", "localhost")
    urls = [gateway.url, again]
    urls.insert(silent, "http://127.0.0.1:1")
    write_profile(home, "default", gateway.url, "t", tuple(urls))
    queued = [Answer(raw=f'sllm_queue_depth{{function="chat"}} {depth}.0\n'.encode()) for depth in (3, 4)]
    gateway.will(*queued, Answer(json={"nodes": []}), *queued)
    found = document(here("top", "--json", "--once"))
    assert (found["counts"], found["silent"]) == ({"queued chat": 7.0}, [urls[silent]])
    gateway.will(*queued, Answer(json={"nodes": []}), *queued)
    assert f"no answer of {urls[silent]}" in here("top").stderr


def test_top_says_of_how_many_gateways_it_counts_one(gateway: Gateway) -> None:
    counted = Answer(raw=b'sllm_gateways 2.0\nsllm_queue_depth{function="chat"} 1.0\n')
    gateway.will(counted, Answer(json={"nodes": []}), counted)
    assert "of 1 of 2 gateways" in here("top").stderr
    gateway.will(counted, Answer(json={"nodes": []}), counted)
    assert document(here("top", "--json", "--once"))["gateways"] == 2


def test_what_came_is_not_what_a_gateway_ever_counted() -> None:
    """One that did not answer in between, one that was started anew, and one that has just counted its first."""
    before = Look({"a": {"tokens f": 10.0}, "again": {"tokens f": 500.0}, "new": {}}, 1.0, ("b",))
    now = Look(
        {"a": {"tokens f": 30.0}, "b": {"tokens f": 9000.0}, "again": {"tokens f": 4.0}, "new": {"tokens f": 6.0}}, 3.0
    )
    assert now.counts == {"tokens f": 9040.0}
    assert now.since(before) == {"tokens f": 13.0}
    assert now.since(None) == {}


def test_top_has_rates_for_programs_and_goes_on_where_the_controller_does_not_answer(gateway: Gateway) -> None:
    def counted(tokens: int) -> Answer:
        text = f'sllm_tokens_total{{function="chat",kind="completion"}} {tokens}.0\n'
        return Answer(raw=text.encode())

    none, away = Answer(json={"nodes": []}), Answer(problem=NoCapacity("nobody leads"))
    begun = [*[away] * 3, counted(0), none, counted(500)]
    gateway.answers = [*begun, *[away] * 3, none, counted(1500), Answer(hangs=True)]
    env = {**os.environ, "NO_COLOR": "1"}
    with subprocess.Popen(
        [*SLLM, "top", "--json", "--every", "0.2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
        assert process.wait(GIVE_UP_S) == 130
        said = json.loads(process.stderr.readline())
    assert first["rates"]["tokens chat"] > 0
    assert second["rates"]["tokens chat"] > 0
    assert said["error"]["message"] == "nobody leads"


@pytest.mark.parametrize("name", ["../x", "a/b", "a?b", "a\n", "Chat", "", "é", "x" * 5000])
@pytest.mark.parametrize(
    "words", [("invoke", "--"), ("describe", "--"), ("logs", "--"), ("rollback", "--"), ("delete", "--")]
)
def test_what_is_no_function_name_is_never_asked(gateway: Gateway, words: tuple[str, ...], name: str) -> None:
    done = here("fn", *words, name)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is no function's name" in done.stderr
    assert len(done.stderr) < 400
    assert gateway.asked == []


@pytest.mark.parametrize("name", ["", ".", "x/events", "\udcff\udcfe"])
@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("node", "describe"), "node"),
        (("node", "cordon"), "node"),
        (("node", "uncordon"), "node"),
        (("node", "drain"), "node"),
        (("node", "forget"), "node"),
        (("call", "status"), "call"),
        (("call", "cancel"), "call"),
        (("explain",), "function or call"),
        (("migrate",), "instance"),
        (("model", "pull"), "model"),
    ],
)
def test_what_is_no_name_is_never_asked(gateway: Gateway, words: tuple[str, ...], kind: str, name: str) -> None:
    done = here(*words, "--", name)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"names no {kind}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 400
    assert refused(here(*words, "--json", "--", name))["code"] == "invalid_argument"
    assert gateway.asked == []


NAMING = [
    ("events", "--function"),
    ("events", "--call"),
    ("events", "--kind"),
    ("call", "list", "--function"),
    ("call", "list", "--state"),
    ("call", "list", "--after"),
    ("fn", "logs", "chat", "--call"),
    ("migrate", "i1", "--to"),
    ("model", "pull", "aaaa", "--to"),
]
"""Commands that end in an option which names something."""


@pytest.mark.parametrize("name", ["\udcff\udcfe", "a" * 70_000])
@pytest.mark.parametrize("words", NAMING)
def test_what_is_no_name_is_no_question_either(gateway: Gateway, words: tuple[str, ...], name: str) -> None:
    done = here(*words, name)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 400
    assert gateway.asked == []


@pytest.mark.parametrize("word", ["", ".", "..", "../x", "x/events", "a\n", "\x1b[2J", "\udcff", "a" * 70_000])
def test_a_segment_of_a_path_is_a_name(word: str) -> None:
    with pytest.raises(InvalidArgument, match="names no node: what does is printable text") as refused:
        transport.segment(word, "node")
    assert len(str(refused.value)) < 300
    assert transport.segment("a?b#c%2f é", "node") == "a%3Fb%23c%252f%20%C3%A9"


@pytest.mark.parametrize("name", ["", "\udcff", "a/b", "a" * 70_000])
def test_what_is_no_models_name_is_not_there(gateway: Gateway, name: str) -> None:
    for verb in ("describe", "validate", "delete"):
        done = here("model", verb, "--", name)
        assert (done.returncode, done.stdout) == (3, ""), done.stderr
        assert len(done.stderr) < 400
    assert gateway.asked == []


def test_a_place_that_is_no_text_is_no_models(gateway: Gateway) -> None:
    done = here("model", "register", "/tmp/\udcff")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is no UTF-8" in done.stderr
    assert gateway.asked == []


def test_any_name_that_can_be_one_is_asked_for(gateway: Gateway) -> None:
    gateway.will(Answer(problem=NodeNotFound("no")))
    for name in ("n1", "n1.example.org", "...", "é 1", "c%2f", "a" * 255):
        assert here("node", "describe", name).returncode == 3
        assert gateway.asked[-1][1] == f"/api/v1/nodes/{name}"


def test_a_closed_stdout_is_no_error(gateway: Gateway) -> None:
    gateway.will(Answer(PIECES))
    words = ["/bin/sh", "-c", 'exec "$0" -m sllm fn invoke chat >&-', sys.executable]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path for _, path, *_ in gateway.asked] == ["/fn/chat"]


@pytest.mark.parametrize(
    "words",
    [("fn", "invoke", "chat"), ("profile", "list", "--json"), ("--help",), ("fn", "deploy", "--help"), ("--version",)],
)
def test_a_full_stdout_is_said(gateway: Gateway, words: tuple[str, ...]) -> None:
    gateway.will(Answer(PIECES))
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*SLLM, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == InvalidArgument.exit_code
    assert "stdout (No space left on device)" in done.stderr
    assert "invalid_argument" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_full_stderr_keeps_nothing_from_being_done(gateway: Gateway) -> None:
    gateway.will(Answer(PIECES))
    for words, status, out in (
        (("fn", "invoke", "chat", "-v"), 0, "def é\n"),
        (("fn", "invoke", "no name"), InvalidArgument.exit_code, ""),
        (("fn", "nothing"), 2, ""),
    ):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*SLLM, *words], stdout=subprocess.PIPE, stderr=full, encoding="utf-8", timeout=60, check=False
            )
        assert (done.returncode, done.stdout) == (status, out)


def test_a_place_that_cannot_be_written_is_said() -> None:
    for words in (("fn", "init", "/proc/x"), ("--url", "http://h", "profile", "set", "p")):
        done = here(*words, SLLM_HOME="/proc/x")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "/proc/x" in done.stderr
        assert "choose" in done.stderr


def test_a_placement_is_explained(gateway: Gateway) -> None:
    found = ExplainView(
        function="chat", version=2, policy="StartupTime", decision="a start on n1", node="n1", pending="all is in use",
        candidates=(
            CandidateView(node="n1", seconds=0.5),
            CandidateView(node="n2", why="needs 1 x L4", ways=(WayView(by="moving", how="makes room", seconds=2.0),)),
        ),
        starts=(StartView(instance="i", node="n1", state="READY", seconds=0.5, took=0.625),),
        moves=(MoveView(instance="o", node="n2", to="n3", state="DONE", seconds=1.5, took=1.75),),
        outcomes=(OutcomeView(what="evict", instance="i", node="n1", expected=0.75, took=1.5),),
        call="call-1", state="RUNNING", instance="i", timeline="timeline queue=1.0@0.0",
    ).model_dump(mode="json")  # fmt: skip
    gateway.will(Answer(json=found))
    assert document(here("explain", "chat", "--json")) == found
    said = here("explain", "call-1").stdout
    assert "call call-1 is RUNNING on i" in said
    assert "chat v2: one more instance now would be a start on n1 (StartupTime)" in said
    assert "waits: all is in use" in said
    assert "n1 *\t0.50 s" in said
    assert "needs 1 x L4\tmoving: 2.00 s" in said
    assert "makes room: o from n2 to n3, done, expected to take 1.50 s, took 1.75 s" in said
    assert "0.50 s\t0.62 s" in said
    assert "evict\ti\tn1\t0.75 s\t1.50 s" in said


def test_a_call_that_has_ended_is_explained_by_its_start(gateway: Gateway) -> None:
    found = ExplainView(
        function="chat", version=2, policy="StartupTime", decision="a start on n1", node="n1", past=True,
        candidates=(CandidateView(node="n1", seconds=0.5), CandidateView(node="n2", why="it is cordoned")),
        starts=(StartView(instance="i", node="n1", state="STOPPED", seconds=0.5, took=0.625),),
        call="call-1", state="FAILED", instance="i", timeline="timeline queue=1.0@0.0", error="it raised",
    ).model_dump(mode="json")  # fmt: skip
    gateway.will(Answer(json=found))
    said = here("explain", "call-1").stdout
    assert "call call-1 is FAILED on i\nit raised\n" in said
    assert "chat v2: its instance i was a start on n1 (StartupTime)" in said
    assert "NOT THEN, SINCE" in said
    assert "  queue  " in said, "what was asked for"
    nothing = ExplainView(
        function="chat", version=2, policy="", decision="there is no function chat", past=True, call="call-1",
        state="SUCCEEDED",
    ).model_dump(mode="json")  # fmt: skip
    gateway.will(Answer(json=nothing))
    said = here("explain", "call-1").stdout
    assert said.startswith("call call-1 is SUCCEEDED\nchat v2: there is no function chat\n")
    gateway.will(Answer(json=nothing | {"state": None}))  # it waited when its gateway died
    said = here("explain", "call-1").stdout
    assert said.startswith("call call-1 is no longer known to any gateway, nor how it ended\n")
    gateway.will(Answer(json=nothing | {"state": None, "instance": "i"}))
    said = here("explain", "call-1").stdout
    assert said.startswith("call call-1 is no longer known to any gateway, nor how it ended; it was on i\n")


def test_events_are_shown_as_they_come(gateway: Gateway) -> None:
    event = {"kind": "instance.ready", "at": 0.0, "function": "chat", "version": 1, "node": "n1", "message": "in 1 s"}
    gateway.will(Answer((sse(event, event="event"), ": heartbeat\n", sse(event | {"fields": {"a": "b"}}), DONE)))
    first, second = here("events", "-f").stdout.splitlines()
    assert first.endswith("instance.ready        chat n1 v1  in 1 s")
    assert second.endswith("in 1 s  a=b")
    gateway.will(Answer((sse(event, event="event"), DONE)))
    assert document(here("events", "--json", "--kind", "call", "--call", "call-1")) == event
    assert gateway.queries[-1].items() >= {"kind": "call", "call": "call-1"}.items()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no event is kept"),
        (("--function", "nope"), "no event of function nope is kept"),
        (
            ("--call", "nope", "--kind", "call"),
            "no event of call nope and kind call is kept; a call that finds an instance and succeeds leaves none",
        ),
        (("--since", "5"), "no event of the last 5 s is kept"),
        (("--function", "f", "--since", "1"), "no event of function f and the last 1 s is kept"),
    ],
)
def test_where_nothing_happened_that_is_said(gateway: Gateway, words: tuple[str, ...], said: str) -> None:
    gateway.will(Answer((": heartbeat\n", DONE)))
    done = here("events", *words)
    assert (done.returncode, done.stdout) == (0, "")
    assert said in done.stderr
    for more in ("--json", "-f"):
        assert here("events", *words, more).stderr == ""


@pytest.mark.parametrize("words", [("events",), ("fn", "logs", "f")])
def test_the_last_seconds_are_those_of_the_gateways_clock(gateway: Gateway, words: tuple[str, ...]) -> None:
    """This machine's may be wrong by minutes; a gateway of before knows a time by it alone."""
    gateway.will(Answer((": heartbeat\n", DONE)))
    here(*words, "--since", "60")
    query = gateway.queries[-1]
    assert float(query["ago"]) == 60
    assert float(query["since"]) == pytest.approx(time.time() - 60, abs=GIVE_UP_S)


def test_top_looks_once_where_nobody_watches(gateway: Gateway) -> None:
    node = NodeDetailView(
        node="n1", alive=True, cordoned=False, draining=False, age_s=0, cpu=4, free_cpu=3, memory=2**30,
        free_memory=2**29, gpus=(GpuView(index=0, kind="L4", memory=1, used_by="i"),), dram_limit=2**30, instances=1,
        storage=StorageView(
            dram_used=0, dram_limit=0, dram_ready=0, ssd_used=0, ssd_limit=0, disk_free=0,
            devices=(
                DeviceView(device="cuda:0", limit=2**31, used=2**30), DeviceView(device="1", limit=2**31, used=2**29)
            ),
        ),
    ).model_dump(mode="json")  # fmt: skip
    metrics = 'sllm_queue_depth{function="chat"} 3.0\nsllm_tokens_total{function="chat",kind="completion"} 12.0\n'
    counted = Answer(raw=metrics.encode())
    gateway.will(counted, Answer(json={"nodes": [node]}), counted)
    rows = [row.split("\t") for row in here("top").stdout.splitlines()]
    assert rows[1][:6] == ["n1", "alive", "3/4", "512.0 MiB/1.0 GiB", "1/1 used", "1.5 GiB/4.0 GiB"]
    (chat,) = [row for row in rows if row[0] == "chat"]
    assert chat[3:] == ["3", "0.0"]
    assert gateway.queries[-2:] == [{"detail": "true"}, {}]
    gateway.will(counted, Answer(json={"nodes": [node]}), counted)
    assert document(here("top", "--json", "--once"))["counts"] == {"queued chat": 3.0, "tokens chat": 12.0}
    broken = node | {"condition": "podman hangs"}
    gateway.will(counted, Answer(json={"nodes": [broken]}), counted)
    assert "n1\tmakes no sandboxes" in here("top").stdout


def test_calls_are_listed_with_where_they_run_and_where_to_go_on(gateway: Gateway) -> None:
    found = CallListView(
        calls=(
            CallView(
                id="call-1", function="chat", version=2, state="RUNNING", created=1.0, kept=False, instance="i",
                gateway="gw-0", tokens=7,
            ),
        ),
        next="1-call-1",
        silent=("gw-1",),
    ).model_dump(mode="json")  # fmt: skip
    gateway.will(Answer(json=found), Answer(json=found))
    said = here("call", "list", "--after", "2-call-2")
    assert gateway.queries[-1]["after"] == "2-call-2"
    (_, row) = said.stdout.splitlines()
    assert row.startswith("call-1\tchat v2\tRUNNING\ti\tgw-0\t")
    assert row.endswith("\t7\tno")
    assert "--after 1-call-1" in said.stderr
    assert "no answer of gw-1" in said.stderr
    as_json = here("call", "list", "--json")
    assert (document(as_json), as_json.stderr) == (found, "")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"id": CALL}, "is cancelled\n"),  # a gateway of before says no more
        ({"id": CALL, "state": "CANCELLED"}, "is cancelled\n"),
        ({"id": CALL, "state": "SUCCEEDED"}, "had ended before: SUCCEEDED\n"),
        ({"id": CALL, "state": "RUNNING"}, "is cancelled as soon as a gateway goes on with it; now none has it\n"),
    ],
)
def test_a_cancel_says_what_became_of_the_call(gateway: Gateway, answer: dict[str, str], said: str) -> None:
    gateway.will(Answer(json=answer))
    assert here("call", "cancel", CALL).stdout == f"{CALL} {said}"


def test_a_deletion_at_a_gateway_of_before_is_done_when_the_function_is_gone() -> None:
    """That one passes over ``begun``: of what went after its 202 it knows only that there is none."""
    answers = [{"function": "f", "deleted": False, "note": "draining: 1 call"}]

    class Before:
        def request(self, method: str, path: str, **_: Any) -> Any:
            assert (method, path) == ("DELETE", "/api/v1/functions/f")
            if not answers:
                raise FunctionNotFound("there is no function 'f'")
            return answers.pop()

    assert fn._delete(Before(), "f", False)["deleted"] is True
    with pytest.raises(FunctionNotFound):
        fn._delete(Before(), "f", False)


def test_a_rollback_that_may_be_done_says_how_to_ask_for_it_once(gateway: Gateway) -> None:
    gateway.will(Answer(problem=NoController("no controller has answered 'rollback': it may have been done")))
    done = here("fn", "rollback", "chat")
    assert (done.returncode, done.stdout) == (5, "")
    assert "see `sllm fn history chat`, then name a version: `--version N`" in done.stderr
    assert refused(here("fn", "rollback", "chat", "--json"))["retryable"] is False
    assert "--version N" not in here("fn", "rollback", "chat", "--version", "2").stderr


@pytest.mark.parametrize("status", [502, 503, 504])
def test_so_does_one_whose_gateway_dies_behind_a_proxy(gateway: Gateway, status: int) -> None:
    """Whoever sends it again as the error says goes back twice."""
    gateway.will(Answer(front=status))
    told = refused(here("fn", "rollback", "chat", "--json"))
    assert told["retryable"] is False
    assert "see `sllm fn history chat`, then name a version: `--version N`" in told["message"]


def test_what_a_function_raises_here_is_one_object_for_a_program(tmp_path: Path) -> None:
    """Its traceback is for people, as where a command itself breaks."""
    (tmp_path / "function.py").write_text(TEXT.replace("return text", "raise ValueError(text)"))
    run = ("run", str(tmp_path / "function.py"), "text=no")
    assert "raise ValueError(text)" in here(*run).stderr
    assert refused(here(*run, "--json"))["code"] == "function_error"


def test_what_a_function_raises_here_is_shown_from_its_own_first_line_on(tmp_path: Path) -> None:
    (tmp_path / "function.py").write_text(TEXT.replace("return text", "raise ValueError(text)"))
    said = here("run", str(tmp_path / "function.py"), "text=no").stderr
    frames = [line for line in said.splitlines() if line.startswith("  File ")]
    assert len(frames) == 1, said
    assert "function.py" in frames[0]


def test_a_pipe_that_breaks_within_a_function_is_its_error_and_not_our_reader_gone(tmp_path: Path) -> None:
    (tmp_path / "function.py").write_text(TEXT.replace("return text", "raise BrokenPipeError(32, 'Broken pipe')"))
    run = ("run", str(tmp_path / "function.py"), "text=no")
    done = here(*run)
    assert done.returncode == 1
    assert "BrokenPipeError: [Errno 32] Broken pipe  [function_error]" in done.stderr
    assert refused(here(*run, "--json"))["code"] == "function_error"


@pytest.mark.parametrize("words", NAMING)
def test_what_is_empty_is_no_wish_for_everything(gateway: Gateway, words: tuple[str, ...]) -> None:
    """A variable of a script that is not set: ``--call "$CALL"`` asks for one call, ``--to "$NODE"`` names a node."""
    done = here(*words, "")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert gateway.asked == []

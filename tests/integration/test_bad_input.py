"""Bad input to a running platform: each gets its own clear error, and harms nobody else."""

import hashlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.cluster import Cluster
from tests.fixtures.command import here
from tests.fixtures.deployed import deploy, live, wait, wait_cold, worker_of
from tests.fixtures.streams import Stream, parse
from tests.fixtures.waiting import GIVE_UP_S

MIB = 2**20
SLOW_S = 2.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One platform for the module; a slow reader is given 2 s in place of 30."""
    with Cluster(tmp_path_factory.mktemp("platform"), env={"SLLM_SLOW_CONSUMER": str(SLOW_S)}) as running:
        yield running


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> Cluster:
    deploy(cluster, "kinds::plain", name="plain")
    return cluster


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Its error body, checked to have the shape that every error has."""
    error: dict[str, Any] = answer.json()["error"]
    assert {"code", "message", "retryable", "call_id"} <= error.keys()
    assert error["call_id"] == answer.headers.get("sllm-call-id")
    return error


GOOD = {"point": {"x": 1}, "pair": {"left": "l", "right": "r"}, "numbers": [1]}


# --- the request itself ---------------------------------------------------------------------------
def test_unknown_function_and_unknown_version(plain: Cluster) -> None:
    answer = plain.http.post("/fn/nobody", json={})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "function_not_found")
    assert "'nobody'" in error_of(answer)["message"]
    answer = plain.http.post("/fn/plain/v7", json=GOOD)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "version_not_found")
    answer = plain.http.post("/fn/nobody", json={}, headers={"Accept": "text/event-stream"})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "function_not_found")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("body", [b"{", b'{"point": }', b"\xff\xfe", b'{"a": 1} x', b"{'a': 1}", b"nan"])
def test_malformed_json(plain: Cluster, body: bytes) -> None:
    answer = plain.http.post("/fn/plain", content=body)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "malformed_json")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"numbers": None}, "numbers"),
        ({"point": {"x": "one"}}, "point.x"),
        ({"point": {}}, "point.x"),
        ({"point": {"x": 1, "y": []}}, "point.y"),
        ({"numbers": [1, "two"]}, "numbers[1]"),
        ({"pair": {"left": "l"}}, "pair.right"),
        ({"flag": "perhaps"}, "flag"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_wrong_arguments_name_the_field(plain: Cluster, change: dict[str, Any], field: str) -> None:
    answer = plain.http.post("/fn/plain", json={**GOOD, **change})
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["field"]) == (422, "invalid_argument", field)


@pytest.mark.parametrize("missing", sorted(GOOD))
def test_a_missing_argument_is_named(plain: Cluster, missing: str) -> None:
    answer = plain.http.post("/fn/plain", json={key: value for key, value in GOOD.items() if key != missing})
    assert (answer.status_code, error_of(answer)["field"]) == (422, missing)
    assert missing in error_of(answer)["message"]


@pytest.mark.parametrize("body", ["[1]", "3", '"text"'])
def test_a_body_that_is_no_object_of_arguments(plain: Cluster, body: str) -> None:
    answer = plain.http.post("/fn/plain", content=body)
    assert answer.status_code == 422
    assert "object" in error_of(answer)["message"]


def test_wrong_arguments_start_nothing(plain: Cluster) -> None:
    """They are refused by the gateway itself, on a function that holds nothing."""
    deploy(plain, "kinds::plain", name="cold", keep_alive=0)
    wait_cold(plain, "cold")
    assert plain.http.post("/fn/cold", json={}).status_code == 422
    assert plain.http.post("/fn/cold", content=b"{").status_code == 400
    assert live(plain, "cold") == []


def test_extra_arguments_where_the_function_takes_them(cluster: Cluster) -> None:
    deploy(cluster, "kinds::anything", name="anything")
    assert cluster.http.post("/fn/anything", json={"a": None, "more": [1]}).json() == [None, 2, {"more": [1]}]
    assert error_of(cluster.http.post("/fn/anything", json={"more": 1}))["field"] == "a"


def test_method_and_token(plain: Cluster) -> None:
    answer = plain.http.get("/fn/plain")
    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eA=="}):
        answer = httpx.post(f"{plain.url}/fn/plain", json=GOOD, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")


# --- bodies ---------------------------------------------------------------------------------------
def test_a_body_that_says_it_is_too_big_is_refused_before_it_is_read(plain: Cluster) -> None:
    """Not a byte of it is sent: the answer comes all the same."""
    with socket.create_connection(("127.0.0.1", httpx.URL(plain.url).port or 0), timeout=GIVE_UP_S) as connection:
        lines = [
            "POST /fn/plain HTTP/1.1", "Host: x", f"Authorization: Bearer {plain.token}", f"Content-Length: {33 * MIB}",
        ]  # fmt: skip
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
            piece = connection.recv(65536)
            assert piece, answer
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer


def test_a_body_that_does_not_say_it_is_too_big(plain: Cluster) -> None:
    """A chunked one is refused as soon as it is; the client that goes on sending sees the answer."""
    pieces = (b" " * MIB for _ in range(40))
    answer = plain.http.post("/fn/plain", content=pieces)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
    assert plain.http.post("/fn/plain", json=GOOD).status_code == 200


def test_a_body_of_exactly_the_limit_arrives_whole(cluster: Cluster) -> None:
    """In order, with no part lost or repeated: every eight characters of it are others."""
    deploy(cluster, "digest")
    text = "".join(f"{number:08x}" for number in range(4 * MIB))[: 32 * MIB - len('{"text":""}')]
    answer = cluster.http.post("/fn/digest", content=f'{{"text":"{text}"}}')
    assert answer.json() == f"{len(text)} {hashlib.sha256(text.encode()).hexdigest()}"


# --- functions that go wrong ----------------------------------------------------------------------
def test_a_function_that_raises(cluster: Cluster) -> None:
    """Type and message to the caller; the traceback in the log under the call's id, also when the instance is gone."""
    deploy(cluster, "raises", keep_alive=0)
    answer = cluster.http.post("/fn/raises", json={"text": "no such thing"})
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (500, "function_error")
    assert error["message"] == "ValueError: no such thing"
    assert "Traceback" not in answer.text
    wait_cold(cluster, "raises")
    other = cluster.http.post("/fn/raises", json={"text": "another call"})
    logged = here(cluster.env, "fn", "logs", "raises", "--call", error["call_id"])
    assert "Traceback (most recent call last)" in logged.stdout
    assert "raises.py" in logged.stdout
    assert "ValueError: no such thing" in logged.stdout
    assert "another call" not in logged.stdout
    assert "another call" in here(cluster.env, "fn", "logs", "raises", "--call", error_of(other)["call_id"]).stdout


def test_a_generator_that_raises_after_two_values(cluster: Cluster) -> None:
    deploy(cluster, "raises_midstream")
    with Stream(cluster, "raises-midstream") as stream:
        assert list(stream.values()) == [1, 2]
        assert stream.error is not None
        assert stream.error["code"] == "function_error"
        assert stream.error["message"] == "RuntimeError: broke after two"
        assert stream.error["call_id"] == stream.call
        assert not stream.done
    answer = cluster.http.post("/fn/raises-midstream", json={})  # not streamed: nothing was sent yet
    assert (answer.status_code, error_of(answer)["code"]) == (500, "function_error")


def test_an_answer_that_is_no_json(cluster: Cluster) -> None:
    deploy(cluster, "returns_unserialisable")
    answer = cluster.http.post("/fn/returns-unserialisable", json={})
    assert (answer.status_code, error_of(answer)["code"]) == (500, "function_error")
    assert "Secret" in error_of(answer)["message"]


def test_a_function_that_exits_ends_its_call_and_not_its_instance(cluster: Cluster) -> None:
    deploy(cluster, "exits_in_call")
    before = live(cluster, "exits-in-call")
    answer = cluster.http.post("/fn/exits-in-call", json={})
    assert (answer.status_code, error_of(answer)["code"]) == (500, "function_error")
    assert "SystemExit" in error_of(answer)["message"]
    assert cluster.http.post("/fn/exits-in-call", json={}).status_code == 500
    assert live(cluster, "exits-in-call") == before


def test_an_answer_too_large_to_be_sent_whole(tmp_path: Path, cluster: Cluster) -> None:
    deploy(cluster, "big_output")
    answer = cluster.http.post("/fn/big-output", json={"size": 3_000_000, "count": 12})
    assert (answer.status_code, error_of(answer)["code"]) == (500, "output_too_large")
    with Stream(cluster, "big-output", {"size": 3_000_000, "count": 12}) as stream:
        assert [len(value) for value in stream.values()] == [3_000_000] * 12
        assert stream.done


def test_a_function_that_prints_without_end_harms_nobody(cluster: Cluster) -> None:
    deploy(cluster, "prints_a_lot")
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(cluster.http.post, "/fn/prints-a-lot", json={"lines": 20_000}) for _ in range(4)]
        assert [call.result().json() for call in calls] == [20_000] * 4
    logged = here(cluster.env, "fn", "logs", "prints-a-lot", "--limit", "10000", "--json").stdout.splitlines()
    assert 0 < len(logged) <= 10_000
    assert sum(json.loads(line)["dropped"] for line in logged) > 0


# --- time and queues ------------------------------------------------------------------------------
def test_deadlines(cluster: Cluster) -> None:
    deploy(cluster, "slow_stream", name="short", concurrency=2, timeout=2)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool, Stream(cluster, "short", {"count": 1000, "pause": 0.3}) as stream:
        call = pool.submit(cluster.http.post, "/fn/short", json={"count": 1000, "pause": 0.5})
        values = list(stream.values())
        assert values == list(range(len(values)))
        assert stream.error is not None
        assert stream.error["code"] == "deadline_exceeded"
        assert not stream.done
        answer = call.result(GIVE_UP_S)
    assert time.monotonic() - began > 1.9
    assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
    # Their work is cancelled as well: the slots are free.
    wait(lambda: both(cluster, "short") == [[0, 1]] * 2, "two calls are answered")


def both(cluster: Cluster, name: str) -> list[Any]:
    """What two calls at once give."""
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(cluster.http.post, f"/fn/{name}", json={"count": 2, "pause": 0}) for _ in range(2)]
        return [call.result(GIVE_UP_S).json() for call in calls]


def test_silence_between_two_values(cluster: Cluster) -> None:
    for patience in (1, 10, 40):
        deploy(cluster, "slow_stream", name="idle", idle_timeout=patience)
        with Stream(cluster, "idle", {"count": 3, "pause": 60}) as stream:
            values = list(stream.values())
        assert stream.error is not None
        assert stream.error["code"] == "idle_timeout"
        if values:
            break  # where the machine stands still the first value's silence may be too long as well
    assert values == [0]


def test_full_queue(cluster: Cluster) -> None:
    """One runs, two wait, the fourth is refused at once; those that waited get their turn."""
    deploy(cluster, "slow_stream", name="narrow", concurrency=1, max_queue=2)
    with Stream(cluster, "narrow", {"count": 1000, "pause": 0.01}) as running:
        assert next(running.values()) == 0
        with ThreadPoolExecutor(2) as pool:
            arguments = {"count": 2, "pause": 0}
            waiting = [pool.submit(cluster.http.post, "/fn/narrow", json=arguments) for _ in range(2)]
            wait(lambda: queued(cluster, "narrow") == 2, "two calls wait")
            answer = cluster.http.post("/fn/narrow", json=arguments)
            assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_full")
            assert int(answer.headers["Retry-After"]) >= 1
            assert error_of(answer)["retryable"] is True
            running.close()
            assert [call.result(GIVE_UP_S).json() for call in waiting] == [[0, 1], [0, 1]]


def queued(cluster: Cluster, name: str) -> int:
    """Waiting calls, from the gateway's own metrics."""
    text = cluster.http.get("/metrics").text
    for line in text.splitlines():
        if not line.startswith("#") and "queue" in line and f'function="{name}"' in line:
            return int(float(line.rpartition(" ")[2]))
    return 0


def make_room(cluster: Cluster, mib: int) -> None:
    """So much memory is free, which idle instances of other functions have now: a function that waits half a second
    would not wait until one of them has ended."""
    deploy(cluster, "slow_stream", name="roomy", memory=f"{mib}MiB")
    assert cluster.http.delete("/api/v1/functions/roomy", params={"force": "true"}).status_code == 200

    def there() -> bool:
        (node,) = cluster.http.get("/api/v1/nodes").json()["nodes"]
        return bool(node["free_memory"] >= mib * MIB)

    wait(there, f"{mib} MiB are free")


def test_a_call_that_waits_too_long_for_capacity(cluster: Cluster) -> None:
    make_room(cluster, 256)
    deploy(cluster, "slow_stream", name="impatient", concurrency=1, queue_timeout=0.5, memory="256MiB")
    with ExitStack() as stack:

        def begun() -> bool:  # the first, too, waits for no longer
            running = stack.enter_context(Stream(cluster, "impatient", {"count": 100_000}))
            return next(running.values(), None) == 0

        wait(begun, "a call has the only slot")
        answer = cluster.http.post("/fn/impatient", json={"count": 1})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "queue_timeout")
        assert answer.headers["Retry-After"]


# --- callers that misbehave -----------------------------------------------------------------------
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("target", ["slow_stream", "slow_async_stream"])
def test_a_caller_that_goes_away_cancels_its_work(
    cluster: Cluster, tmp_path: Path, target: str, streamed: bool
) -> None:
    """The function itself is ended: its ``finally`` runs, seen from outside by the file it writes."""
    deploy(cluster, target, name=target.replace("_", "-"))
    mark = tmp_path / "closed"
    arguments = {"count": 100_000, "pause": 0.01, "mark": str(mark)}
    if streamed:
        with Stream(cluster, target.replace("_", "-"), arguments) as stream:
            assert next(stream.values()) == 0
    else:
        with socket.create_connection(("127.0.0.1", httpx.URL(cluster.url).port or 0)) as connection:
            connection.sendall(request_of(cluster, target.replace("_", "-"), arguments))
            wait((tmp_path / "closed.begun").exists, "the function runs")
    wait(lambda: mark.exists() and mark.read_text() == "closed", "the function is cancelled")


def test_a_slow_reader_ends_in_slow_consumer_and_harms_nobody(cluster: Cluster) -> None:
    """It reads 1 B/s. Its neighbour streams on to its end; then it is cut off."""
    deploy(cluster, "big_output", name="big", concurrency=4)
    deploy(cluster, "slow_stream", name="paced")
    before = memory(cluster.pid("gateway"))
    reader = SlowReader(cluster, "big", {"size": 100_000, "count": 10_000})  # a gigabyte, if anybody kept it
    try:
        with Stream(cluster, "paced", {"count": 200, "pause": 0.01}) as neighbour:
            assert list(neighbour.values()) == list(range(200))
            assert neighbour.done
        assert cluster.http.post("/fn/big", json={"size": 10, "count": 2}).json() == ["x" * 10] * 2
        text = reader.rest()
    finally:
        reader.close()
    events, error, done = parse(text)
    assert error is not None
    assert error["code"] == "slow_consumer"
    assert not done
    assert len(events) < 1000
    assert memory(cluster.pid("gateway")) - before < 64 * MIB


def test_a_slow_reader_of_empty_values_fills_nobodys_memory(cluster: Cluster, tmp_path: Path) -> None:
    """A value of no bytes is an object in every process on its way: the generator is paused all the same."""
    count, mark = 3_000_000, tmp_path / "mark"
    deploy(cluster, "tiny_output", name="tiny")
    assert cluster.http.post("/fn/tiny", json={"count": 2}).json() == ["", ""]
    pids = [cluster.pid("gateway"), cluster.pid("invoker"), worker_of(cluster, "tiny")]
    before = [memory(pid) for pid in pids]
    reader = SlowReader(cluster, "tiny", {"count": count, "mark": str(mark)})
    try:
        most = list(before)

        def closed() -> bool:
            most[:] = [max(pair) for pair in zip(most, map(memory, pids), strict=True)]
            return mark.exists()

        wait(closed, "the function is cancelled")
        text = reader.rest()
    finally:
        reader.close()
    events, error, done = parse(text)
    assert error is not None
    assert error["code"] == "slow_consumer"
    assert not done
    assert int(mark.read_text()) < count / 2, "the generator was paused"
    assert len(events) <= int(mark.read_text())
    assert [now - then < 24 * MIB for now, then in zip(most, before, strict=True)] == [True] * 3, (before, most)


def request_of(cluster: Cluster, name: str, arguments: dict[str, Any], *head: str) -> bytes:
    """A call as bytes, with more lines in its head."""
    body = json.dumps(arguments).encode()
    lines = [
        f"POST /fn/{name} HTTP/1.1", "Host: x", f"Authorization: Bearer {cluster.token}",
        f"Content-Length: {len(body)}", "Connection: close", *head,
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode() + body


class SlowReader:
    """Reads one byte a second of a stream, in a thread, until ``rest`` reads all that is still there."""

    def __init__(self, cluster: Cluster, name: str, arguments: dict[str, Any]) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(GIVE_UP_S)
        self._socket.connect(("127.0.0.1", httpx.URL(cluster.url).port or 0))
        self._socket.sendall(request_of(cluster, name, arguments, "Accept: text/event-stream"))
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._read = b""
        self._thread = threading.Thread(target=self._crawl)
        self._thread.start()

    def _crawl(self) -> None:
        while not self._stop.wait(1.0):
            self._read += self._socket.recv(1)

    def rest(self) -> str:
        """Everything, once its time is certainly over."""
        self._stop.wait(max(0.0, self._began + 2 * SLOW_S + 1 - time.monotonic()))
        self._stop.set()
        self._thread.join()
        # Three megabytes through a window of four kilobytes are 750 chances to wait for a probe of TCP's (0.2 s each).
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        until = time.monotonic() + GIVE_UP_S
        while piece := self._socket.recv(1 << 20):
            self._read += piece
            assert time.monotonic() < until, "the stream goes on and on"
        return self._read.partition(b"\r\n\r\n")[2].decode()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


# --- deploying garbage ----------------------------------------------------------------------------
GARBAGE = {
    "number.py": ("fn = 42\n", ["describes no function", "number.py"]),
    "broken.py": ("def fn(:\n", ["broken.py", "SyntaxError"]),
    "fails.py": ("x = 1\nimport nothing_of_this_name\n", ["fails.py:2", "nothing_of_this_name"]),
    "no_model.py": (
        "from sllm import model_function\n@model_function(model='weights/there')\ndef fn(model) -> int: return 1\n",
        ["weights/there", "not there"],
    ),
    "bad_option.py": (
        "from sllm import model_function\n@model_function(concurrency=0)\ndef fn() -> int:\n    return 1\n",
        ["concurrency"],
    ),
    "inside.py": (
        "from sllm import model_function\ndef make():\n    @model_function\n    def fn() -> int:\n        return 1\n"
        "    return fn\nfn = make()\n",
        ["inside.py:3", "inside another function"],
    ),
}


def state(cluster: Cluster) -> tuple[Any, ...]:
    """All that a deployment could leave half-registered."""
    functions = cluster.http.get("/api/v1/functions").json()["functions"]
    models = cluster.http.get("/api/v1/models").json()["models"]
    versions = [(f["name"], f["active"], [v["version"] for v in f["versions"]]) for f in functions]
    return versions, [m["digest"] for m in models], sorted(cluster.http.get("/v1/models").json()["data"], key=str)


@pytest.mark.parametrize("name", sorted(GARBAGE))
def test_deploying_garbage_says_what_and_where(cluster: Cluster, tmp_path: Path, name: str) -> None:
    text, says = GARBAGE[name]
    (tmp_path / name).write_text(text)
    before = state(cluster)
    done = here(cluster.env, "fn", "deploy", str(tmp_path / name), "--json", expect=2)
    assert done.stdout == ""
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    for words in says:
        assert words in error["message"]
    assert state(cluster) == before


def test_deploying_what_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    done = here(cluster.env, "fn", "deploy", str(tmp_path / "missing.py"), expect=2)
    assert "missing.py" in done.stderr
    (tmp_path / "some.py").write_text("from sllm import model_function\n@model_function\ndef fn() -> int: return 1\n")
    done = here(cluster.env, "fn", "deploy", f"{tmp_path}/some.py::other", expect=2)
    assert "other" in done.stderr
    assert "there: fn" in done.stderr


def test_deploying_a_closure_that_cannot_be_pickled(cluster: Cluster, tmp_path: Path) -> None:
    """A function of ``__main__`` is pickled; what it captures and cannot leave the process is named."""
    script = tmp_path / "main.py"
    script.write_text(
        "import threading\nfrom sllm import model_function\nfrom sllm.client import Client\n"
        "from sllm.deployment import deploy\nlock = threading.Lock()\n"
        "@model_function\ndef holds() -> bool:\n    return lock.locked()\n"
        f"with Client({cluster.url!r}, {cluster.token!r}) as client:\n    deploy(holds, client)\n"
    )
    before = state(cluster)
    done = subprocess.run([sys.executable, str(script)], env=cluster.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "InvalidBundle" in done.stderr
    assert "'lock'" in done.stderr
    assert "lock" in done.stderr
    assert state(cluster) == before


def test_bundles_that_are_not_what_they_say(cluster: Cluster) -> None:
    """A bundle that breaks off, has another digest, or is no archive; each leaves nothing."""
    before = state(cluster)
    digest = "ab" * 32
    answer = cluster.http.put(f"/api/v1/bundles/{digest}", content=b"something else")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "digest_mismatch")
    assert cluster.http.head(f"/api/v1/bundles/{digest}").status_code == 404
    answer = cluster.http.put("/api/v1/bundles/nonsense", content=b"x")
    assert answer.status_code == 400
    manifest = {"name": "garbage", "handler": {"entry": "a:b", "kind": "function", "streams": False}}
    asked = {"manifest": manifest, "bundle": f"sha256:{digest}", "bundle_bytes": 3}
    answer = cluster.http.post("/api/v1/functions", json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_bundle")
    assert state(cluster) == before


def test_an_archive_that_is_none(cluster: Cluster) -> None:
    data = b"this is no zip file"
    digest = hashlib.sha256(data).hexdigest()
    before = state(cluster)
    assert cluster.http.put(f"/api/v1/bundles/{digest}", content=data).status_code < 300
    manifest = {"name": "garbage", "handler": {"entry": "a:b", "kind": "function", "streams": False}}
    asked = {"manifest": manifest, "bundle": f"sha256:{digest}", "bundle_bytes": len(data)}
    answer = cluster.http.post("/api/v1/functions", json=asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["stage"]) == (503, "start_failed", "import")
    assert "bundle" in error["message"]
    assert state(cluster) == before
    assert cluster.http.head(f"/api/v1/bundles/{digest}").status_code == 404


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "Not A Name"}, "manifest.name"),
        ({"handler": {"entry": "a:b"}}, "manifest.handler.kind"),
        ({"concurrency": -1}, "manifest.concurrency"),
        ({"memory": "lots"}, "manifest.memory"),
    ],
)
def test_manifests_that_are_wrong(cluster: Cluster, change: dict[str, Any], field: str) -> None:
    manifest = {"name": "garbage", "handler": {"entry": "a:b", "kind": "function", "streams": False}, **change}
    asked = {"manifest": manifest, "bundle": f"sha256:{'ab' * 32}", "bundle_bytes": 3}
    answer = cluster.http.post("/api/v1/functions", json=asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "invalid_manifest")
    assert error["field"].startswith(field)


def test_what_no_node_can_ever_satisfy(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "huge.py"
    file.write_text(
        "from sllm import model_function\n@model_function(memory='900TiB')\ndef fn() -> int:\n    return 1\n"
    )
    before = state(cluster)
    done = here(cluster.env, "fn", "deploy", str(file), "--json", expect=2)
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["code"] == "unsatisfiable"
    assert "n1" in error["message"]
    assert state(cluster) == before


def test_after_all_this_the_platform_is_well(plain: Cluster) -> None:
    assert plain.http.post("/fn/plain", json=GOOD).json()["sum"] == 1.5
    assert worker_of(plain, "plain")
    assert "Traceback" not in (plain.data / "logs" / "gateway-g1.log").read_text()
    assert "Traceback" not in (plain.data / "logs" / "controller.log").read_text()

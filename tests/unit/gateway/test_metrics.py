"""What a worker says of a call is counted and kept in bounds."""

import asyncio
import json
import logging
import math
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from nats.js.api import ClusterInfo, PeerInfo, StreamConfig, StreamInfo, StreamState
from nats.js.errors import ServiceUnavailableError
from prometheus_client import generate_latest

from sllm_gateway import leader, lives
from sllm_gateway.headroom import Headroom
from sllm_gateway.metrics import GONE, OTHER, Metrics
from sllm_gateway.routes.health import MetricsRoute
from sllm_runtime.platform.certificates import first_expires
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ErrorBody, SllmError, Unavailable
from sllm_runtime.protocol.events import Kind
from sllm_runtime.protocol.frames import End, FrameKind, Usage
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.limits import KIB, LOST_AFTER_S, MIB
from sllm_runtime.protocol.node import Storage
from sllm_runtime.protocol.records import Term
from sllm_runtime.protocol.states import InstanceState, MigrationState, VersionState
from sllm_runtime.protocol.subjects import BODIES_STREAM, GATEWAYS_SEE, KEYS_STREAM, LEADER
from sllm_runtime.protocol.timeline import Span
from tests.fixtures.certificates import make_certificates
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, entry, hang, manifest, world
from tests.unit.gateway.test_function_route import echo
from tests.unit.gateway.test_kept_calls import ASYNC
from tests.unit.gateway.test_succession import a_call


def test_what_a_worker_makes_up_is_no_series() -> None:
    metrics = Metrics()
    for number in range(3):
        call = a_call(number)
        call.error = ErrorBody(code=f"made_up_{number}", message="no").to_error()
        metrics.ended(call, 1.0)
    assert f'sllm_calls_total{{code="{OTHER}",function="tokens"}} 3.0' in metrics.text().decode()
    assert b"made_up" not in metrics.text()


def test_tokens_are_no_less_than_none() -> None:
    metrics, call = Metrics(), a_call(1)
    call.end = End(usage=Usage(prompt=-5, completion=7, cached=-1))
    metrics.ended(call, 1.0)
    text = metrics.text().decode()
    assert 'sllm_tokens_total{function="tokens",kind="completion"} 7.0' in text
    assert 'sllm_tokens_total{function="tokens",kind="prompt"} 0.0' in text


async def test_functions_that_have_gone_are_no_series_for_ever(nats: Nats) -> None:
    """A preview of each change has a name of its own: what a scrape takes must not grow with all that ever were."""
    async with world(nats) as w:
        await w.deploy(manifest("stays"), entry("i"), script=echo)
        assert (await w.http.post("/fn/stays")).status_code == 200
        for number in range(150):
            name = f"preview-{number}"
            await w.deploy(manifest(name), entry(name), script=echo)
            assert (await w.http.post(f"/fn/{name}")).status_code == 200
            await w.controller.unroute(name)
        text = (await w.http.get("/metrics")).text
    functions = {line.split('function="')[1].split('"')[0] for line in text.splitlines() if 'function="' in line}
    assert "stays" in functions
    assert "preview-149" in functions
    assert len(functions) <= 102


async def test_of_a_call_that_has_ended_little_is_kept_and_told(nats: Nats) -> None:
    async def talks(run: Run) -> None:
        error = ErrorBody(code="x" * 60 * KIB, message="y" * 60 * KIB, detail="z" * 10 * KIB)
        spans = tuple(Span(f"{number}" * 10 * KIB, 0.0, 1.0) for number in range(8)) + (Span("s", 0.0, 1.0),) * 1000
        run.outbox.push(FrameKind.END, codec.pack(End(error=error, spans=spans)))
        run.node.flush(run)

    async with world(nats) as w:
        await w.deploy(manifest("f"), entry(), script=talks)
        answer = await w.http.post("/fn/f")
        call = answer.headers["sllm-call-id"]
        await until(lambda: len(w.gateway.calls) == 0)
        known = w.gateway._recent._ended[call]
        assert known.end is not None
        assert isinstance(known.error, SllmError)
        assert len(codec.pack(known.end)) + len(msgspec.json.encode(known.error.body())) < 32 * KIB
        await until(lambda: w.told(call), what="it failed")
        text = (await w.http.get(f"{API}/events", params={"call": call})).text
        (told,) = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert len(told["fields"]["code"]) <= 200


@pytest.mark.parametrize(("headers", "code"), [(ASYNC, "store_full"), (ASYNC, "draining"), ({}, "draining")])
async def test_whatever_refuses_a_request_to_a_function_is_counted(
    nats: Nats, headers: dict[str, str], code: str
) -> None:
    """There is no event of it, and no call: only this says that callers are turned away."""
    async with world(nats) as w:
        await w.deploy(manifest("f"), entry(), script=hang)
        if code == "store_full":
            bus = w.controller.bus
            config = (await bus.jetstream.stream_info(BODIES_STREAM)).config
            await bus.jetstream.update_stream(config.evolve(max_bytes=MIB))
        else:
            w.gateway.calls._draining = True
        answer = await w.http.post("/fn/f", json={"text": "x" * MIB}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        text = (await w.http.get("/metrics")).text
        assert [line for line in text.splitlines() if line.startswith("sllm_calls_total")] == [
            f'sllm_calls_total{{code="{code}",function="f"}} 1.0'
        ]


async def test_whatever_refuses_a_request_with_a_key_is_counted_too(nats: Nats) -> None:
    """Its body is read, and its key looked up, before its version is."""
    async with world(nats, max_body=1000) as w:
        await w.deploy(manifest("f"), entry(), script=echo)
        key = {"Idempotency-Key": "k"}
        assert (await w.http.post("/fn/f", json={"a": 1}, headers=key)).status_code == 200
        other = await w.http.post("/fn/f", json={"a": 2}, headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "invalid_argument")
        large = await w.http.post("/fn/f", json={"a": "x" * 1000}, headers={"Idempotency-Key": "l"})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        nobody = await w.http.post("/fn/nobody", json={"a": "x" * 1000}, headers={"Idempotency-Key": "l"})
        assert nobody.status_code == 413
        text = (await w.http.get("/metrics")).text
    assert sorted(line for line in text.splitlines() if line.startswith("sllm_calls_total")) == [
        'sllm_calls_total{code="body_too_large",function="f"} 1.0',
        'sllm_calls_total{code="invalid_argument",function="f"} 1.0',
        'sllm_calls_total{code="ok",function="f"} 1.0',
    ]


def test_series_of_many_that_have_gone_do_not_hold_the_loop() -> None:
    looked = 0

    class Names(dict[Any, Any]):
        def keys(self) -> Any:
            nonlocal looked
            looked += len(self)
            return super().keys()

    gone: set[str] = set()
    metrics = Metrics(lambda each: each not in gone)
    for metric in vars(metrics).values():
        if hasattr(metric, "_metrics"):
            metric._metrics = Names()
    names = [f"f{number}" for number in range(1000)]
    for name in names:
        metrics._count(name, "ok")
        metrics._count(name, "invalid_argument")
        metrics.seconds.labels(name).observe(1)
        metrics.cold.labels(name).inc()
        for kind in ("prompt", "completion", "cached"):
            metrics.tokens.labels(name, kind).inc()
    gone.update(names)
    looked = 0
    metrics._count("new", "ok")
    assert looked < 100_000, f"{looked} series were looked at in one turn of the loop"
    lines = [line for line in metrics.text().decode().splitlines() if 'function="' in line]
    assert {line.split('function="')[1].split('"')[0] for line in lines} == {*names[-GONE:], "new"}


async def test_a_scrape_of_many_functions_holds_the_loop_for_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may ask, and each stream of this gateway would stand still meanwhile."""
    many = Metrics()
    for number in range(300):
        many._count(f"f{number}", "ok")
        many.seconds.labels(f"f{number}").observe(1)
        many.ttft.labels(f"f{number}").observe(1)
    turns = 0
    sent: list[dict[str, Any]] = []
    written: list[object] = []

    def counted(registry: Any) -> bytes:
        written.append(registry)
        return generate_latest(registry)

    monkeypatch.setattr("sllm_gateway.metrics.generate_latest", counted)

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    async def send(message: Any) -> None:
        sent.append(message)

    turning = asyncio.create_task(turn())
    await asyncio.sleep(0)
    route = MetricsRoute(many)
    await asyncio.gather(*(route({"type": "http", "method": "GET"}, None, send) for _ in range(8)))  # type: ignore
    turning.cancel()
    assert turns >= 5, f"the loop turned {turns} times while eight scrapes were written"
    pages = [message["body"] for message in sent if message.get("body")]
    assert len(pages) == 8
    assert pages[0].count(b"sllm_call_seconds_count") == 300
    assert written.count(many.registry) == 1


async def test_what_a_full_queue_refuses_is_no_call_that_took_no_time(nats: Nats) -> None:
    """Else calls seem the faster the fewer of them find room."""
    async with world(nats) as w:
        described = manifest("f", concurrency=1, max_queue=0, max_instances=1)
        await w.deploy(described, entry(concurrency=1), script=hang)
        async with w.http.stream("POST", "/fn/f", headers={"Accept": "text/event-stream"}) as first:
            assert first.status_code == 200
            for _ in range(3):
                assert (await w.http.post("/fn/f")).status_code == 429
            text = (await w.http.get("/metrics")).text
    assert 'sllm_calls_total{code="queue_full",function="f"} 3.0' in text
    assert 'sllm_call_seconds_count{function="f"}' not in text


async def test_a_call_took_as_long_as_its_caller_waited(nats: Nats) -> None:
    """Not until its node has said that it has ended: a function that is deaf to that is given 5 s."""

    async def deaf(run: Run) -> None:
        await run.cancelled.wait()
        await asyncio.sleep(2.0)
        run.end()

    async with world(nats) as w:
        await w.deploy(manifest("f", timeout=0.5), entry(), script=deaf)
        assert (await w.http.post("/fn/f")).status_code == 504
        await until(lambda: len(w.gateway.calls) == 0)
        text = (await w.http.get("/metrics")).text
    (took,) = [float(line.split()[1]) for line in text.splitlines() if line.startswith("sllm_call_seconds_sum")]
    assert took < 2.0


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/fn/f/v9", {}, "version_not_found"),
        ("/fn/f/latest", {}, "version_not_found"),
        ("/fn/f", {"Idempotency-Key": "k" * 300}, "invalid_request"),
        ("/fn/f", {}, "unavailable"),
    ],
)
async def test_what_refuses_a_request_before_its_body_is_read_is_counted(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, path: str, headers: dict[str, str], code: str
) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("f"), entry(), script=echo)
        if code == "unavailable":  # it may have been declared dead, and JetStream takes no beat of it
            monkeypatch.setattr(lives, "ELECTION_S", 0.01)

            async def unsure(self: object, event: object) -> None:
                raise Unavailable("this gateway begins a new life")

            monkeypatch.setattr(lives.Lives, "_beat_of", unsure)
        answer = await w.http.post(path, headers=headers)
        assert answer.json()["error"]["code"] == code
        text = (await w.http.get("/metrics")).text
    assert [line for line in text.splitlines() if line.startswith("sllm_calls_total")] == [
        f'sllm_calls_total{{code="{code}",function="f"}} 1.0'
    ]


async def test_a_name_of_nothing_is_no_series(nats: Nats) -> None:
    async with world(nats) as w:
        for headers in ({}, {"Idempotency-Key": "k" * 300}):
            await w.http.post("/fn/made-up", headers=headers)
        assert "made-up" not in (await w.http.get("/metrics")).text


async def test_who_follows_events_is_no_error_of_a_gateway_that_stops(
    nats: Nats, caplog: pytest.LogCaptureFixture
) -> None:
    """Each restart of a gateway that anybody watches would look like a bug of it."""
    caplog.set_level(logging.WARNING)
    begun = asyncio.Event()

    async def follow(url: str) -> None:
        query = {"follow": "true"}
        async with (
            httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client,
            client.stream("GET", f"{API}/events", params=query) as answer,
        ):
            async for _ in answer.aiter_raw():
                begun.set()

    async with world(nats) as w:
        following = asyncio.create_task(follow(w.url))
        await begun.wait()
    with pytest.raises(httpx.RemoteProtocolError):  # no end: it reads on at another one
        await following
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert any("broke off" in record.getMessage() for record in caplog.records)


async def test_whether_a_controller_leads_and_which_nodes_report(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(nats) as w:

        async def said() -> dict[str, float]:
            text = (await w.http.get("/metrics")).text
            names = ("sllm_nodes", "sllm_controller_leads", "sllm_ready")
            return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith(names)}

        assert await said() == {"sllm_nodes": 0.0, "sllm_controller_leads": 0.0, "sllm_ready": 1.0}
        w.node.report()
        w.controller.bus.publish_now(LEADER, Term(term=7, controller="c"))
        await w.controller.bus.flush()
        await until(lambda: w.gateway._leader.leads and w.gateway._starts.nodes(w.gateway.calls._clock()) == 1)
        assert await said() == {"sllm_nodes": 1.0, "sllm_controller_leads": 1.0, "sllm_ready": 1.0}
        later = w.gateway._leader._clock() + max(LOST_AFTER_S, leader.LEADS_S)
        assert w.gateway._starts.nodes(later) == 0
        monkeypatch.setattr(w.gateway._leader, "_clock", lambda: later)
        w.controller.bus.publish_now(LEADER, Term(term=6, controller="b"))  # of one that was deposed, and woke up
        await w.controller.bus.flush()
        await asyncio.sleep(0.1)
        assert (await said())["sllm_controller_leads"] == 0.0
        await w.nats.kill()
        await until(lambda: "NATS" in w.gateway.problem())
        assert (await said())["sllm_ready"] == 0.0
        await w.nats.start()


async def test_how_full_disks_and_streams_are(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operator can mend before anybody is refused."""
    monkeypatch.setattr("sllm_gateway.headroom.WAIT_S", GIVE_UP_S)
    monkeypatch.setattr("sllm_gateway.headroom.LOOK_S", 1e9)
    async with world(nats) as w:
        headroom, jetstream = w.gateway._headroom, w.gateway._bus.jetstream
        asked, stream_info = list[str](), jetstream.stream_info

        async def counted(name: str, **how: Any) -> Any:
            asked.append(name)
            return await stream_info(name, **how)

        monkeypatch.setattr(jetstream, "stream_info", counted)

        async def said(about: str) -> dict[str, float]:
            answer = await w.http.get("/metrics")
            assert answer.status_code == 200
            return {
                name.partition(about)[2]: float(value)
                for name, _, value in (line.rpartition(" ") for line in answer.text.splitlines())
                if name.startswith(about)
            }

        assert await said("sllm_node_") == {}
        w.node.report(storage=Storage(disk_free=5, ssd_used=3, ssd_limit=4))
        await until(lambda: w.gateway._starts.nodes(w.gateway.calls._clock()) == 1, what="it was heard")
        labels = '{node="n1"}'
        assert await said("sllm_node_") == {
            f"disk_free_bytes{labels}": 5.0,
            f"ssd_used_bytes{labels}": 3.0,
            f"ssd_limit_bytes{labels}": 4.0,
        }
        assert w.gateway._starts.storage(w.gateway.calls._clock() + LOST_AFTER_S) == {}
        headroom._looked, asked[:] = -math.inf, []
        used, *others = await asyncio.gather(*(said("sllm_stream_bytes") for _ in range(4)))
        assert sorted(asked) == sorted(GATEWAYS_SEE), "once for all who ask"
        assert others == [used] * 3
        assert used.keys() == {f'{{stream="{name}"}}' for name in GATEWAYS_SEE}
        assert used['{stream="KV_sllm_state"}'] > 0
        assert (await said("sllm_stream_limit_bytes"))['{stream="KV_sllm_state"}'] == 256 * MIB
        assert set((await said("sllm_stream_copies_behind")).values()) == {0.0}
        assert await said("sllm_certificate_expiry_timestamp_seconds{") == {}
        await w.nats.kill()
        await until(lambda: "NATS" in w.gateway.problem())
        headroom._looked = -math.inf
        assert await said("sllm_stream_bytes{") == {}
        await w.nats.start()


async def test_copies_that_are_behind_and_streams_that_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sllm_gateway.headroom.WAIT_S", 0.01)

    async def stream_info(name: str) -> StreamInfo:
        if name == BODIES_STREAM:
            await asyncio.Event().wait()
        if name == KEYS_STREAM:
            raise ServiceUnavailableError
        copies = [
            PeerInfo(name="a", current=True, offline=False),
            PeerInfo(name="b", current=False, offline=False),
            PeerInfo(name="c", current=True, offline=True),
        ]
        state = StreamState(messages=1, bytes=7, first_seq=1, last_seq=1, consumer_count=0)
        return StreamInfo(StreamConfig(name=name, max_bytes=-1), state, cluster=ClusterInfo(replicas=copies))

    bus: Any = SimpleNamespace(
        connected=True, jetstream=SimpleNamespace(stream_info=stream_info), server_certificate=b"none"
    )
    given = Settings.load({"SLLM_NATS_CA": str(tmp_path / "ca.pem")})
    headroom, metrics = Headroom(bus, given, dict, lambda: 0.0), Metrics()
    metrics.read(headroom)
    await headroom.look()
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith("sllm_stream_")]
    there = sorted({*GATEWAYS_SEE} - {BODIES_STREAM, KEYS_STREAM})
    assert sorted(lines) == [
        *(f'sllm_stream_bytes{{stream="{name}"}} 7.0' for name in there),
        *(f'sllm_stream_copies_behind{{stream="{name}"}} 2.0' for name in there),
    ]
    assert "sllm_certificate_expiry_timestamp_seconds{" not in metrics.text().decode()
    made = make_certificates(tmp_path)
    (told,) = [line for line in metrics.text().decode().splitlines() if line.startswith("sllm_certificate_")]
    name, _, at = told.rpartition(" ")
    assert name == 'sllm_certificate_expiry_timestamp_seconds{certificate="ca"}'
    assert float(at) == first_expires(made / "ca.pem")


async def test_the_docs_name_every_series_with_its_labels(nats: Nats) -> None:
    docs = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    rows = re.findall(r"^\| (`sllm_\w+`(?:, `sllm_\w+`)*) \| (.*?) \|", docs, re.MULTILINE)
    said: dict[str, set[str]] = {}
    for names, labels in rows:
        found = re.findall(r"`(\w+)`", names)
        each = labels.split(", ") if len(found) > 1 and ("none" in labels) else [labels] * len(found)
        for name, label in zip(found, each, strict=True):
            said[name] = set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", label)))
    async with world(nats) as w:
        await w.deploy(manifest("f"), entry(), script=echo)
        assert (await w.http.post("/fn/f")).status_code == 200
        all_of = w.gateway.metrics
        for counter in (all_of.inherited, all_of.cold, all_of.resumed, all_of.moved):
            counter.labels("f")
        for kind in ("prompt", "completion", "cached"):
            all_of.tokens.labels("f", kind)
        text = (await w.http.get("/metrics")).text
    text = re.sub(r".*_created\b.*\n", "", text)  # the daemon has none
    there = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    assert there == said.keys()
    for name, labels in re.findall(r"^(\w+?)(?:_bucket|_sum|_count)?\{(.*)\} ", text, re.MULTILINE):
        assert set(re.findall(r'(\w+)="', labels)) - {"le"} == said[name], name
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in re.findall(r"# TYPE (\w+) (\w+)", text))


def test_the_docs_name_every_kind_of_event() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    section = docs.split("### Events")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?:controller|gateway|node|`sllm up`) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 4
    said: set[str] = set()
    for row in rows:
        first = ""
        for name in re.findall(r"`(\w*\.(?:\w+|<state>))`", row):
            first = name.partition(".")[0] or first
            said.add(f"{first}.{name.partition('.')[2]}")
    states = {"instance": InstanceState, "version": VersionState, "migration": MigrationState}
    by_state = {f"{of}.{state.lower()}" for of, table in states.items() for state in table}
    assert {each for each in said if each.endswith("<state>")} == {f"{of}.<state>" for of in states}
    assert {each for each in said if not each.endswith("<state>")} == set(Kind) - by_state


async def test_a_scrape_does_not_wait_behind_bodies_that_are_checked() -> None:
    """Large ones are, beside the loop: a queue of them is when what is counted is looked at."""
    over = threading.Event()
    bodies = [asyncio.get_running_loop().run_in_executor(None, over.wait) for _ in range(64)]
    try:
        async with asyncio.timeout(2):
            assert b"sllm_http_requests" in await Metrics().page()
    finally:
        over.set()
        await asyncio.gather(*bodies)


async def test_tokens_of_a_call_that_ends_while_they_are_written_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the sum of the two, which `sllm top` shows, has them twice, and less the next time."""
    metrics, drawn = Metrics(), {"f": 1000}
    metrics.watch(dict, lambda: 1, lambda: dict(drawn), lambda: 1, lambda: 1, lambda: True, lambda: True)
    begun, ended = threading.Event(), threading.Event()

    def slow(registry: Any) -> bytes:
        begun.set()
        ended.wait(10)
        return generate_latest(registry)

    monkeypatch.setattr("sllm_gateway.metrics.generate_latest", slow)
    page = asyncio.create_task(metrics.page())
    await until(begun.is_set)
    drawn.clear()
    call: Any = SimpleNamespace(
        version=SimpleNamespace(function="f"),
        order=SimpleNamespace(accepted=0.0),
        marks=SimpleNamespace(failed=None, first=None, started=None),
        error=None,
        end=End(usage=Usage(prompt=0, completion=1000, cached=0)),
    )
    metrics.ended(call, 1.0)
    ended.set()
    for text in (await page, await metrics.page()):
        lines = text.decode().splitlines()
        told = [
            float(line.split()[1]) for line in lines if line.startswith(("sllm_tokens_total{", "sllm_tokens_open{"))
        ]
        assert sum(told) == 1000

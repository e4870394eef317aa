"""What a worker says of a call is counted and kept in bounds."""

import json
from typing import Any

import msgspec
import pytest

from sllm_gateway.metrics import GONE, OTHER, Metrics
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ErrorBody, SllmError
from sllm_runtime.protocol.frames import End, FrameKind, Usage
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.limits import KIB, MIB
from sllm_runtime.protocol.subjects import BODIES_STREAM
from sllm_runtime.protocol.timeline import Span
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
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

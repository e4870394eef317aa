"""``exact: false`` is said where the same tokens are not promised to come again, and nowhere else."""

import asyncio
from typing import Any

import openai
import pytest

from sllm_runtime.protocol.ctl import Acquire, Acquired
from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.protocol.frames import Usage
from tests.fixtures.nats import Nats
from tests.unit.gateway.peer import Run, World, entry, manifest, world

SSE = {"accept": "text/event-stream"}
MESSAGES: Any = [{"role": "user", "content": "hi"}]
SAID = {"sllm": {"exact": False}}


def client(w: World) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="none", max_retries=0)


async def text(run: Run) -> None:
    run.delta("def")
    run.delta(" f", finish="stop")
    run.end(usage=Usage(prompt=1, completion=2))


async def values(run: Run) -> None:
    run.out("a")
    run.out("b")
    run.end()


async def engine(w: World, script: Any, *entries: Any, **fields: Any) -> None:
    await w.deploy(manifest("coder", engine=True, model="/m", **fields), *entries, script=script)


@pytest.mark.parametrize("exact", [False, True])
async def test_openais_answers_say_it_in_a_field_of_our_own(nats: Nats, exact: bool) -> None:
    """The official client hands it on; whole and streamed, in every chunk."""
    asked: Any = {"model": "coder"}
    extra: dict[str, Any] = {} if exact else SAID
    header = None if exact else "false"
    async with world(nats) as w, client(w) as api:
        await engine(w, text, entry(exact=exact))
        for create, said in (
            (api.chat.completions, {**asked, "messages": MESSAGES}),
            (api.completions, {**asked, "prompt": "x"}),
        ):
            made: Any = create
            raw = await made.with_raw_response.create(**said)
            assert raw.headers.get("sllm-exact") == header
            assert (raw.parse().model_extra or {}) == extra
            stream = await made.create(**said, stream=True, stream_options={"include_usage": True})
            assert stream.response.headers.get("sllm-exact") == header
            chunks = [chunk async for chunk in stream]
            assert len(chunks) >= 3
            assert [(chunk.model_extra or {}) for chunk in chunks] == [extra] * len(chunks)


@pytest.mark.parametrize("exact", [False, True])
async def test_a_function_says_it_beside_its_values(nats: Nats, exact: bool) -> None:
    async with world(nats) as w:
        await engine(w, values, entry(exact=exact))
        whole = await w.http.post("/fn/coder", json={})
        stream = await w.http.post("/fn/coder", json={}, headers=SSE)
    assert whole.json() == ["a", "b"]
    for answer in (whole, stream):
        assert answer.headers.get("sllm-exact") == (None if exact else "false")
    comment = "" if exact else ": exact=false\n"
    assert stream.text.startswith(f'{comment}id: 0\ndata: "a"\n\nid: 1\ndata: "b"\n\n: timeline ')


async def test_a_stream_whose_headers_are_out_says_it_before_its_first_value(nats: Nats) -> None:
    """A start that takes long: which instance answers is not known when the headers have to go."""
    begun = asyncio.Event()

    async def acquire(request: Acquire) -> Acquired:
        await begun.wait()
        return Acquired(route=await w.controller.route(manifest("coder", engine=True, model="/m"), entry(exact=False)))

    async with world(nats, headers_wait=0.01) as w:
        w.controller.on_acquire = acquire
        await engine(w, values)
        async with w.http.stream("POST", "/fn/coder", json={}, headers=SSE) as answer:
            assert "sllm-exact" not in answer.headers
            begun.set()
            lines = [line async for line in answer.aiter_lines()]
    first = lines.index("id: 0")
    assert lines[first - 1] == ": exact=false"
    assert lines.count(": exact=false") == 1


async def test_the_instance_that_answers_counts(nats: Nats) -> None:
    """What came of one that died is thrown away where the call begins again, and stands where it goes on."""

    async def dies_first(run: Run) -> None:
        if run.head.instance.startswith("rough"):
            run.end(InstanceLost("it has died"))
        else:
            await text(run)

    async def dies_midway(run: Run) -> None:
        if run.head.instance.startswith("rough"):
            run.delta("def")
            run.end(InstanceLost("it has died"))
        else:
            run.delta(" f", finish="stop")
            run.end()

    async with world(nats) as w, client(w) as api:
        cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
            (dies_first, {"resumable": False, "retries": 1}, {}),
            (dies_midway, {"resumable": True}, SAID),
        ]
        for number, (script, fields, extra) in enumerate(cases):
            w.controller.on_acquire = _then(w, f"smooth-{number}", fields)
            await engine(w, script, entry(f"rough-{number}", exact=False), **fields)
            answer = await api.completions.create(model="coder", prompt="x")
            assert answer.choices[0].text == "def f"
            assert (answer.model_extra or {}) == extra


def _then(w: World, instance: str, fields: dict[str, Any]) -> Any:
    async def acquire(request: Acquire) -> Acquired:
        described = manifest("coder", engine=True, model="/m", **fields)
        return Acquired(route=await w.controller.route(described, entry(instance)))

    return acquire


async def test_kept_calls_say_it_again(nats: Nats) -> None:
    """Whole, streamed and by their id, of an OpenAI route and of a function."""

    async def either(run: Run) -> None:
        await (values if run.head.kind == "fn" else text)(run)

    async with world(nats) as w:
        await engine(w, either, entry(exact=False))
        body = {"model": "coder", "prompt": "x"}
        for route, asked in (("/v1/completions", body), ("/fn/coder", {})):
            key = {"idempotency-key": route.replace("/", "-")}
            for _ in range(2):  # the first makes it, the second reads it
                whole = await w.http.post(route, json=asked, headers=key)
                assert (whole.status_code, whole.headers.get("sllm-exact")) == (200, "false"), whole.text
            call = whole.headers["sllm-call-id"]
            view = await w.http.get(f"/v1/calls/{call}")
            assert view.headers["sllm-exact"] == "false"
            assert view.json()["result"] == whole.json()
            stream = (await w.http.get(f"/v1/calls/{call}/events")).text
            if route == "/fn/coder":
                assert stream.startswith(": exact=false\nid: 0\n")
            else:
                assert whole.json()["sllm"] == {"exact": False}
                assert stream.count('"sllm":{"exact":false}') == stream.count("id: ") > 1
            assert w.node.opened[-1].head.kind == ("fn" if route == "/fn/coder" else "completion")


async def test_kept_calls_of_an_exact_engine_say_nothing(nats: Nats) -> None:
    async with world(nats) as w:
        await engine(w, text, entry())
        asked = {"model": "coder", "prompt": "x"}
        whole = await w.http.post("/v1/completions", json=asked, headers={"idempotency-key": "k"})
        view = await w.http.get(f"/v1/calls/{whole.headers['sllm-call-id']}")
    assert "sllm" not in whole.json()
    assert "sllm-exact" not in whole.headers
    assert "sllm-exact" not in view.headers

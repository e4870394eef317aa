"""The official OpenAI client against the real platform, used as its documentation says and without a workaround."""

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import deploy, wait_cold
from tests.fixtures.lora import adapter

CODER = Path(__file__).parents[2] / "functions" / "coder"
PROMPT = "import os\n\n\ndef "
ASK: dict[str, Any] = {"model": "coder", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
MESSAGES: Any = [{"role": "system", "content": "import os\n\n\n"}, {"role": "user", "content": "def "}]
TALK: dict[str, Any] = {"model": "coder", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}


def with_tools(directory: Path) -> Path:
    """The demo model with a chat template that tells it of tools."""
    shutil.copytree(CODER / "model", directory)
    file = directory / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}# <tool_call>\n{% endif %}"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return directory


@pytest.fixture(scope="module")
def cluster(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("openai")) as started:
        homes = {name: str(adapter(started.home / name, seed)) for seed, name in enumerate(("loud", "wide"))}
        deploy(started, str(coder / "function.py"), name="coder", keep_alive=1, adapters=homes)
        deploy(started, "kinds::awaited", name="awaited", keep_alive=1)
        deploy(
            started,
            str(coder / "function.py"),
            name="caller",
            keep_alive=1,
            model=str(with_tools(started.home / "caller")),
        )
        deploy(started, "inexact", name="inexact", keep_alive=1, model=str(coder / "model"))
        yield started


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=cluster.token) as made:
        yield made


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> str:
    """What the function itself answers to the same prompt."""
    answer = cluster.http.post("/fn/coder", json={"prompt": PROMPT, "max_tokens": 24})
    return "".join(answer.json())


def test_a_completion(client: openai.OpenAI, expected: str) -> None:
    answer = client.completions.create(**ASK)
    assert (answer.object, answer.model) == ("text_completion", "coder")
    (choice,) = answer.choices
    assert (choice.text, choice.index, choice.finish_reason) == (expected, 0, "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens > 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_streamed_completion_that_began_cold(cluster: Cluster, client: openai.OpenAI, expected: str) -> None:
    wait_cold(cluster, "coder")
    chunks = list(client.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert len(pieces) > 5, "it comes in pieces"
    assert "".join(chunk.choices[0].text for chunk in pieces) == expected
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat(client: openai.OpenAI, expected: str) -> None:
    answer = client.chat.completions.create(**TALK)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_a_streamed_chat(client: openai.OpenAI, expected: str) -> None:
    chunks = list(client.chat.completions.create(**TALK, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


def test_an_engine_that_promises_no_exactness_says_so(cluster: Cluster, client: openai.OpenAI) -> None:
    """Its self-test has found no level that holds; the model and its text are those of the one that has."""
    asked = {**ASK, "model": "inexact"}
    chunks = list(client.completions.create(**asked, stream=True))
    assert [(chunk.model_extra or {}).get("sllm") for chunk in chunks] == [{"exact": False}] * len(chunks)
    answer = client.completions.create(**asked)
    assert (answer.model_extra or {})["sllm"] == {"exact": False}
    assert cluster.http.post("/fn/inexact", json={}).headers["sllm-exact"] == "false"
    sure = client.completions.with_raw_response.create(**ASK)
    assert "sllm-exact" not in sure.headers
    assert "sllm" not in (sure.parse().model_extra or {})


def test_a_stop_string_ends_it_and_is_not_in_it(client: openai.OpenAI, expected: str) -> None:
    stop = expected[len(expected) // 2 :][:3]
    answer = client.completions.create(**ASK, stop=[stop, "never that"])
    assert answer.choices[0].text == expected.partition(stop)[0]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.completions.create(**ASK, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.partition(stop)[0]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_seed_repeats_and_several_choices_differ(client: openai.OpenAI) -> None:
    given = {**ASK, "temperature": 1.0, "n": 2, "seed": 5}
    first, second = (client.completions.create(**given) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert len(set(texts)) == 2


def test_logprobs(client: openai.OpenAI, expected: str) -> None:
    logprobs = client.completions.create(**ASK, logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == expected
    assert all(value <= 0 for value in logprobs.token_logprobs or [])
    assert len(logprobs.token_logprobs or []) == 24


def test_the_log_probabilities_of_a_prompt(client: openai.OpenAI, expected: str) -> None:
    """What a benchmark of language models asks for: how likely a text is, nothing generated."""
    said = client.completions.create(**{**ASK, "prompt": PROMPT}, logprobs=1, echo=True)
    scored = client.completions.create(**{**ASK, "prompt": PROMPT + expected, "max_tokens": 0}, logprobs=1, echo=True)
    first, again = said.choices[0], scored.choices[0]
    assert first.text == again.text == PROMPT + expected
    assert first.logprobs is not None
    assert again.logprobs is not None
    assert "".join(again.logprobs.tokens or []) == PROMPT + expected
    assert (again.logprobs.token_logprobs or [])[0] is None
    if first.logprobs.tokens == again.logprobs.tokens:  # a text may be cut otherwise than it was generated
        assert first.logprobs.token_logprobs == again.logprobs.token_logprobs
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_models_are_the_functions_with_an_engine(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["caller", "coder", "coder:loud", "coder:wide", "inexact"]
    assert client.models.retrieve("coder").id == "coder"


@pytest.mark.parametrize("model", ["awaited", "nobody", "coder:nobody", "coder:v1:nobody", "coder:a:b:c"])
def test_what_has_no_engine_is_no_model(client: openai.OpenAI, model: str) -> None:
    for ask in (
        lambda: client.completions.create(model=model, prompt="a"),
        lambda: client.chat.completions.create(model=model, messages=MESSAGES),
        lambda: client.models.retrieve(model),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            ask()
        assert isinstance(raised.value.body, dict)
        assert set(raised.value.body) == {"message", "type", "param", "code"}
        assert model.rpartition(":")[2] in raised.value.body["message"]


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    wrong: Any = {"temperature": "hot"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{**ASK, **wrong})
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(**{**TALK, "max_tokens": 0})
    assert empty.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(**{**ASK, "prompt": "import os\n" * 3000})
    assert long.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=client.base_url, api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_long_prompt_is_scored_whole(client: openai.OpenAI) -> None:
    """More log probabilities than one frame takes."""
    scored = client.completions.create(**{**ASK, "prompt": [100] * 1500, "max_tokens": 0}, echo=True, logprobs=20)
    found = scored.choices[0].logprobs
    assert found is not None
    assert len(found.tokens or []) == len(found.top_logprobs or []) == 1500


def test_limits_of_max_tokens(client: openai.OpenAI) -> None:
    nothing = client.completions.create(**{**ASK, "max_tokens": 0})
    assert nothing.choices[0].text == ""
    short = client.completions.create(**{**ASK, "prompt": [100] * 2040, "max_tokens": 10**6})
    assert short.usage is not None
    assert (short.usage.total_tokens, short.choices[0].finish_reason) == (2048, "length")


async def test_many_at_once_by_the_async_client(cluster: Cluster, expected: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=cluster.token) as client:

        async def one() -> str:
            stream = await client.completions.create(**ASK, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*(one() for _ in range(12))) == [expected] * 12


async def test_a_load_of_all_kinds_changes_no_answer(cluster: Cluster) -> None:
    """Chat and completions, streamed and not, several choices, shapes, scored prompts, adapters, callers that leave."""
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=cluster.token, max_retries=0) as client:

        async def whole(**more: Any) -> list[str]:
            answer = await client.completions.create(**{**ASK, **more})
            return [f"{choice.text} {choice.logprobs}" for choice in answer.choices]

        async def streamed(**more: Any) -> list[str]:
            parts = [""] * more.get("n", 1)
            async for chunk in await client.chat.completions.create(**{**TALK, **more}, stream=True):
                parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            return parts

        async def left(**more: Any) -> list[str]:
            async with await client.completions.create(**{**ASK, **more}, stream=True) as stream:
                return [(await anext(aiter(stream))).choices[0].text]

        kinds: list[tuple[Any, dict[str, Any]]] = [
            (whole, {"n": 2, "temperature": 1.0, "seed": 7}),
            (whole, {"echo": True, "logprobs": 1, "max_tokens": 5}),
            (whole, {"model": "coder:loud", "max_tokens": 40}),
            (whole, {"extra_body": {"regex": "[a-z]{3,8}"}}),
            (whole, {"prompt": PROMPT * 20, "max_tokens": 3}),
            (streamed, {"n": 3, "temperature": 0.9, "seed": 1}),
            (streamed, {"stop": "("}),
            (left, {"max_tokens": 1500}),
        ]
        alone = [await ask(**more) for ask, more in kinds]
        together = await asyncio.gather(*(ask(**more) for ask, more in kinds * 4))
    assert together == alone * 4


TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["place", "days"], "additionalProperties": False}}}]  # fmt: skip


def test_calls_of_functions(client: openai.OpenAI) -> None:
    asked = {**TALK, "model": "caller", "tools": TOOLS, "max_tokens": 300, "seed": 2, "temperature": 1.0,
             "tool_choice": "required", "parallel_tool_calls": False}  # fmt: skip
    (choice,) = client.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert call.type == "function"
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"place", "days"}
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    (again,) = final.choices[0].message.tool_calls or []
    assert (again.function.name, again.function.arguments) == ("weather", call.function.arguments)
    history: Any = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    plain = client.chat.completions.create(**{**TALK, "model": "caller", "messages": history, "tools": TOOLS})
    assert plain.choices[0].message.content


async def test_adapters_are_chosen_by_each_request(cluster: Cluster, expected: str) -> None:
    """Several at once in one instance, beside the model itself: each has the text it has alone."""
    models = ["coder", "coder:loud", "coder:wide", "coder:v1:loud"]
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=cluster.token) as client:

        async def one(model: str) -> str:
            answer = await client.completions.create(**{**ASK, "model": model})
            assert answer.model == model
            return str(answer.choices[0].text)

        alone = {model: await one(model) for model in models}
        together = await asyncio.gather(*(one(model) for model in models * 3))
    assert together == list(alone.values()) * 3
    assert alone["coder"] == expected
    assert alone["coder:loud"] == alone["coder:v1:loud"]
    assert len(set(alone.values())) == 3


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_an_answer_has_the_shape_that_was_asked_for(client: openai.OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    asked = {**TALK, "max_tokens": 100, "temperature": 1.0, "seed": 3, "response_format": shape}
    whole = client.chat.completions.create(**asked, n=3)
    texts = [choice.message.content or "" for choice in whole.choices]
    for text in texts:
        assert set(json.loads(text)) == {"name", "age"}
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    parts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, n=3, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert parts == texts
    pattern = r"[a-z]{3,8} = [0-9]{1,4}"
    answer = client.completions.create(**ASK, extra_body={"regex": pattern})
    assert re.fullmatch(pattern, answer.choices[0].text)


def test_bad_words_biases_and_cached_tokens(client: openai.OpenAI, expected: str) -> None:
    word = expected.split()[0][:4]
    without = client.completions.create(**ASK, extra_body={"bad_words": [word]})
    assert word in expected
    assert word not in without.choices[0].text
    (first,) = client.completions.create(**ASK, logprobs=0).choices
    assert first.logprobs is not None
    assert [list(each) for each in first.logprobs.top_logprobs or []] == [[t] for t in first.logprobs.tokens or []]
    long = {**ASK, "prompt": PROMPT * 40, "max_tokens": 1}
    used = [client.completions.create(**long).usage for _ in range(2)][1]
    assert used is not None
    assert used.prompt_tokens_details is not None
    assert used.prompt_tokens_details.cached_tokens == used.prompt_tokens // 128 * 128


DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("best_of", {"best_of": 2}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("regex", {"extra_body": {"regex": "("}}),
        ("response_format", {"extra_body": {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "wobble"}}}}}),
        ("response_format.type", {"extra_body": {"response_format": {"type": "xml"}}}),
        ("bad_words", {"extra_body": {"bad_words": ["x"] * 65}}),
        ("bad_words", {"extra_body": {"bad_words": ["x" * 257]}}),
        ("logit_bias", {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}),
        ("logit_bias", {"logit_bias": {"4096": 1}}),
        ("stop_ids", {"extra_body": {"stop_ids": [1] * 100_000}}),
        ("n", {"prompt": ["x"] * 5, "n": 103}),
        ("prompt", {"prompt": ["x"] * 129}),
        ("prompt", {"prompt": [2**70]}),
        ("seed", {"seed": 2**64}),
        ("response_format", {"extra_body": {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": DEEP}}}}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_400_by_name(client: openai.OpenAI, param: str, body: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{**ASK, **body})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("tool_choice", {"tool_choice": "auto"}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("modalities", {"modalities": ["audio"]}),
    ],
)
def test_what_the_model_cannot_do_is_not_ignored(client: openai.OpenAI, param: str, body: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**TALK, **body})
    assert refused.value.param == param

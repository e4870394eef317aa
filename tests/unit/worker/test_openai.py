"""OpenAI-shaped calls and ``generate`` in one real worker with a tiny model."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sllm_gateway.binding import Binding
from sllm_gateway.move import Move
from sllm_gateway.resumption import Resumption
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.frames import Frame, FrameKind
from sllm_runtime.protocol.worker import FeedCall
from sllm_runtime.worker.prompts import options, sampling_of
from tests.unit.gateway.peer import entry
from tests.unit.worker.harness import Answer, Worker, Zygote, bundle_of, manifest

SOURCE = """
from sllm_runtime.protocol.errors import SllmError

def fn(model, prompt="def f", mode="text", **options):
    if mode == "swallow":
        for _ in range(10_000):
            try:
                yield from model.generate(prompt, **options)
            except Exception:
                pass
    elif mode == "twice":
        yield "".join(model.generate(prompt, **options))
        yield "".join(model.generate(prompt, **options))
    elif mode == "facts":
        yield [model.config["model_type"], str(model.device), (model.path / "config.json").exists(),
               type(model.module).__name__, model.tokenizer.decode([5])]
    else:
        yield from model.generate(prompt, **options)
"""
CODER = Path(__file__).parents[3] / "functions" / "coder"
CONTEXT = 2048
"""Long enough that no answer is over before a test could cancel it."""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def served(
    zygote: Zygote, loader: Any, models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    home = tmp_path_factory.mktemp("openai")
    shutil.copytree(models("llama"), home / "model")
    amend(home / "model" / "tokenizer_config.json", chat_template=TEMPLATE)
    amend(home / "model" / "config.json", max_position_embeddings=CONTEXT)
    with serving(zygote, loader.grant(home / "model"), home / "w") as worker:
        yield worker


@contextmanager
def serving(zygote: Zygote, session: Any, workdir: Path) -> Iterator[Worker]:
    worker = zygote.spawn()
    made = manifest(kind="generator", streams=True, model="m", engine=True)
    worker.start(made, bundle_of({"user.py": SOURCE}), workdir=workdir, session=session)
    yield worker
    worker.close()
    zygote.exited(zygote.count)


def amend(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def completion(worker: Worker, **body: Any) -> Answer:
    return worker.run({"model": "m", "prompt": "def f", "temperature": 0, **body}, kind="completion")


def text(answer: Answer, choice: int = 0) -> str:
    assert answer.end is not None
    assert answer.end.error is None, answer.end.error
    return "".join(delta.text for delta in answer.deltas if delta.choice == choice)


def test_a_completion(served: Worker) -> None:
    answer = completion(served)
    assert answer.end is not None
    assert answer.end.usage is not None
    assert (answer.end.usage.prompt, answer.end.usage.completion) == (5, 16)
    assert [delta.finish for delta in answer.deltas if delta.finish] == ["length"]
    assert answer.deltas[-1].finish == "length"
    assert [span.name for span in answer.end.spans] == ["first_token", "tokens"]
    assert sum(len(ids.ids) for ids in answer.ids) == 16


def test_prompts_in_every_form(served: Worker) -> None:
    whole = text(completion(served))
    ids = [72, 73, 74, 4, 74]
    assert text(completion(served, prompt=ids)) == whole
    answer = completion(served, prompt=["def f", "x"], n=2, echo=True, ignore_eos=True)
    assert sorted({delta.choice for delta in answer.deltas}) == [0, 1, 2, 3]
    assert text(answer, 0).startswith("def f")
    assert text(answer, 0) == text(answer, 1)
    assert text(answer, 3).startswith("x")
    assert answer.end is not None
    assert answer.end.usage is not None
    assert (answer.end.usage.prompt, answer.end.usage.completion) == (6, 64)
    many = completion(served, prompt=[ids, ids[:2]])
    assert text(many, 0) == whole


def test_choices_differ_and_seeds_repeat(served: Worker) -> None:
    hot = {"temperature": 1.5, "seed": 5, "n": 3}
    first, second = completion(served, **hot), completion(served, **hot)
    assert [text(first, i) for i in range(3)] == [text(second, i) for i in range(3)]
    assert len({text(first, i) for i in range(3)}) == 3
    assert text(completion(served, temperature=1.5)) == text(completion(served, temperature=1.5)), "the call's seed"


def test_stop_logprobs_and_limits(served: Worker) -> None:
    whole = text(completion(served, repetition_penalty=1.5))
    stop = whole[8:11]
    stopped = completion(served, repetition_penalty=1.5, stop=stop)
    assert text(stopped) == whole[: whole.index(stop)]
    assert stopped.deltas[-1].finish == "stop"
    logged = completion(served, logprobs=2, max_tokens=3)
    found = [item for delta in logged.deltas for item in delta.logprobs]
    assert len(found) == 3
    assert all((item.logprob or 0) <= 0 and len(item.top) == 2 and item.top[0][0] == item.token for item in found)
    assert text(completion(served, max_tokens=0)) == ""
    assert text(completion(served, max_tokens=0, echo=True)) == "def f"
    cut = completion(served, prompt="x" * (CONTEXT - 100), max_tokens=100_000)
    assert cut.end is not None
    assert cut.end.usage is not None
    assert cut.end.usage.completion <= 100


def test_a_least_number_of_tokens_is_cut_with_the_most(served: Worker) -> None:
    """Who wants so many and no other number says it of both."""
    both = {"max_tokens": 200, "min_tokens": 200}
    cut = completion(served, prompt="x" * (CONTEXT - 100), **both)
    assert cut.end is not None
    assert cut.end.error is None, cut.end.error
    assert cut.end.usage is not None
    assert cut.end.usage.completion == 100
    said = served.run({"prompt": "x" * (CONTEXT - 100), **both})
    assert said.end is not None
    assert said.end.error is None, said.end.error
    wrong = completion(served, prompt="x" * (CONTEXT - 100), max_tokens=200, min_tokens=201)
    assert wrong.error.field == "min_tokens"


def test_the_log_probabilities_of_a_prompt(served: Worker) -> None:
    """As those of a completion that says the same: however much of a text is prompt, its tokens are as likely."""
    whole = completion(served, logprobs=2, max_tokens=12, echo=True)
    first, *rest = [item for delta in whole.deltas for item in delta.logprobs]
    assert (first.token, first.logprob, first.top) == ("d", None, ())
    assert [item.token for item in rest[:4]] == ["e", "f", " ", "f"]
    assert len(rest) == 4 + 12
    assert text(whole) == "def f" + text(completion(served, max_tokens=12))
    ids = [72, 73, 74, 4, 74, *(number for part in completion(served, max_tokens=12).ids for number in part.ids)]
    scored = completion(served, prompt=ids, logprobs=2, max_tokens=0, echo=True, n=2)
    for choice in (0, 1):
        (delta,) = [delta for delta in scored.deltas if delta.choice == choice]
        assert delta.text.replace(" ", "") == text(whole).replace(" ", ""), "this tokenizer puts spaces between ids"
        assert (delta.finish, delta.logprobs) == ("length", (first, *rest))
    assert scored.end is not None
    assert scored.end.usage is not None
    assert (scored.end.usage.prompt, scored.end.usage.completion) == (17, 0)
    (one,) = completion(served, prompt="d", logprobs=0, max_tokens=0, echo=True).deltas
    assert (one.text, one.logprobs) == ("d", (first,))
    many = completion(served, prompt=[72, 73] * 60, logprobs=20, max_tokens=0, echo=True).deltas
    assert [(len(each.logprobs), each.finish) for each in many] == [(24, None)] * 4 + [(24, "length")], "a frame each"
    assert [bool(each.text) for each in many] == [False] * 4 + [True]


def chat(worker: Worker, **body: Any) -> Answer:
    messages = [{"role": "user", "content": "hi"}]
    return worker.run({"model": "m", "messages": messages, "temperature": 0, "max_tokens": 4, **body}, kind="chat")


def test_chat_renders_the_models_template(served: Worker) -> None:
    answer = chat(served)
    assert answer.end is not None
    assert answer.end.usage is not None
    assert answer.end.usage.prompt == len("<s>u:hi;a:") - 3 + 1
    parts = chat(served, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
    assert text(parts) == text(answer)
    assert text(chat(served, max_completion_tokens=2)) != text(answer)
    assert [len(d.logprobs) for d in chat(served, logprobs=True, top_logprobs=1).deltas if d.text] == [1] * 4


@pytest.mark.parametrize(
    ("kind", "body", "code", "field"),
    [
        ("completion", {"prompt": ""}, "invalid_request", "prompt"),
        ("completion", {"prompt": [999]}, "invalid_request", "prompt"),
        ("completion", {"prompt": {"a": 1}}, "invalid_argument", "prompt"),
        ("completion", {"prompt": "x" * CONTEXT * 2}, "context_length_exceeded", "prompt"),
        ("completion", {"prompt": "x", "temperature": 3}, "invalid_argument", "temperature"),
        ("completion", {"prompt": "x", "temperature": "hot"}, "invalid_argument", "temperature"),
        ("completion", {"prompt": "x", "max_tokens": -1}, "invalid_argument", "max_tokens"),
        ("completion", {"prompt": "x", "n": 0}, "invalid_argument", "n"),
        ("completion", {"prompt": "x", "logit_bias": {"a": 1}}, "invalid_argument", "logit_bias"),
        ("completion", {"prompt": "x", "logit_bias": {"500": 1}}, "invalid_request", "logit_bias"),
        ("completion", {"prompt": "x", "suffix": "y"}, "invalid_argument", "suffix"),
        ("completion", {"prompt": "x", "stop": ["a"] * 20}, "invalid_argument", "stop"),
        ("completion", {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "invalid_argument",
         "logit_bias"),
        ("completion", {"prompt": "x", "stop_ids": [5] * 1025}, "invalid_argument", "stop_ids"),
        ("completion", {"prompt": "x", "bad_words": ["a" * 257]}, "invalid_argument", "bad_words"),
        ("completion", {"prompt": ["x"] * 129}, "invalid_argument", "prompt"),
        ("completion", {"prompt": ["x"] * 5, "n": 103}, "invalid_argument", "n"),
        ("completion", {}, "invalid_argument", "prompt"),
        ("completion", {"prompt": [-1], "echo": True}, "invalid_request", "prompt"),
        ("completion", {"prompt": [5, 2**32], "echo": True}, "invalid_request", "prompt"),
        ("completion", {"prompt": "x" * CONTEXT * 1000}, "context_length_exceeded", "prompt"),
        ("chat", {"messages": [{"role": "user", "content": "x" * CONTEXT * 1000}]}, "context_length_exceeded",
         "messages"),
        ("chat", {}, "invalid_argument", "messages"),
        ("chat", {"messages": []}, "invalid_argument", "messages"),
        ("chat", {"messages": [{"role": "user", "content": "x" * CONTEXT * 2}]}, "context_length_exceeded", "messages"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "invalid_argument", "max_tokens"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_request", "messages"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
         "invalid_request", "response_format"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_named(served: Worker, kind: str, body: dict[str, Any], code: str, field: str) -> None:
    error = served.run(body, kind=kind).error
    assert error.code == code
    assert error.field is not None
    assert error.field.split(".")[0] == field


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        ("completion", {"best_of": 3}, "best_of"),
        ("completion", {"n": 2, "best_of": 3}, "best_of"),
        ("completion", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("completion", {"bad_words": [""]}, "bad_words"),
        ("completion", {"bad_words": ["x"]}, "bad_words"),  # this tokenizer is not one of bytes
        ("completion", {"min_tokens": 30, "max_tokens": 20}, "min_tokens"),
        ("completion", {"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ("completion", {"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ("completion", {"response_format": {"type": "xml"}}, "response_format"),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"functions": []}, "functions"),
        ("chat", {"function_call": "auto"}, "function_call"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities"),
        ("chat", {"audio": {"voice": "alloy"}}, "audio"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("chat", {"tools": [{"type": "code"}]}, "tools[0]"),
        ("chat", {"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ("chat", {"tool_choice": "auto"}, "tool_choice"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "maybe"}, "tool_choice"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}],
                  "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ("chat", {"chat_template_kwargs": {"wobble": 1}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_unsaid_is_refused(
    served: Worker, kind: str, body: dict[str, Any], field: str
) -> None:
    base = {"messages": [{"role": "user", "content": "x"}]} if kind == "chat" else {"prompt": "x"}
    error = served.run({**base, **body}, kind=kind).error
    assert error.code in ("invalid_argument", "invalid_request")
    assert error.field is not None
    assert error.field.split(".")[0] == field


def test_what_is_the_same_as_nothing_is_taken(served: Worker) -> None:
    plain = text(completion(served))
    nothing = {"n": None, "stop": None, "stop_ids": None, "min_tokens": None, "ignore_eos": None, "bad_words": None}
    assert text(completion(served, **nothing, response_format={"type": "text"}, best_of=1)) == plain
    plain = text(chat(served))
    assert text(chat(served, tools=[], tool_choice="none", modalities=["text"], top_logprobs=0)) == plain


def test_stop_ids(served: Worker) -> None:
    whole = text(completion(served, repetition_penalty=1.5)).split(" ")
    stopped = completion(served, repetition_penalty=1.5, stop_ids=[4 + ord(whole[5]) - 32])
    assert text(stopped).split(" ") == whole[: whole.index(whole[5])]
    assert stopped.deltas[-1].finish == "stop"


def test_cached_tokens_are_counted_once(served: Worker) -> None:
    prompt = "what is long is computed once, " * 10
    first = completion(served, prompt=prompt, max_tokens=2)
    again = completion(served, prompt=prompt, max_tokens=2, n=3)
    for answer, cached in ((first, 0), (again, 256)):
        assert answer.end is not None
        assert answer.end.usage is not None
        assert (answer.end.usage.prompt, answer.end.usage.cached) == (310, cached)


def test_cached_tokens_are_those_of_where_the_call_was_first(served: Worker) -> None:
    """The instance that goes on with it has the pages that this one had to compute, or the other way round."""
    asked: dict[str, Any] = {"prompt": "another one, as long as the one before it was, " * 8, "max_tokens": 4}
    first = completion(served, **asked)
    told = tuple(ids.cached for ids in first.ids)
    drawn = tuple(number for ids in first.ids for number in ids.ids)
    assert told[0] == 0
    assert set(told[1:]) <= {None}, "it is told once"
    for cached in (0, 128, None):
        head: dict[str, Any] = {} if cached is None else {"cached": (cached,)}
        body = {"model": "m", "temperature": 0, **asked}
        resumed = served.run(body, kind="completion", recorded=(drawn[:2],), **head)
        assert resumed.end is not None
        assert resumed.end.usage is not None
        own = resumed.end.usage.cached
        assert (own == cached) if cached is not None else own > 128, (own, cached)
        assert resumed.ids[0].cached in (own, cached), "and goes on from here by the same, if it is known"


def moved(worker: Worker, first: Answer, before: int, **asked: Any) -> Answer:
    """The call of ``first`` on its way here, as its gateway has it moved: when that begins the ids of ``before``
    generations are known of where it comes from."""
    known = [ids for ids in first.ids if not ids.first]  # what follows is drawn here
    frames = [Frame(0, FrameKind.IDS, codec.pack(ids)) for ids in known]
    early = [frame for frame, ids in zip(frames, known, strict=True) if ids.generation < before]
    kept = Resumption()
    kept.take(early)
    head: dict[str, Any] = {"recorded": kept.recorded, "cached": kept.cached, "ended": kept.ended}
    number = worker.call({"temperature": 0, **asked}, kind="completion", held=True, follow=True, **head)
    move = Move(Binding("c", 2, entry("i2"), b"", 1 << 20, 0.0), kept)
    move.opened(True, 0.0)
    kept.take([frame for frame in frames if frame not in early])
    for feed in move.let_draw():
        worker.send(FeedCall(number, *msgspec.structs.astuple(feed)[2:]))
    return worker.finish(number)


def test_cached_tokens_of_what_began_while_the_call_moved_are_those_of_where_it_came_from(served: Worker) -> None:
    """Of each prompt: the second one's ids come when its destination is open already, which knows both by now."""
    prompts = [f"the {which} of two prompts which are long enough for pages, " * 6 for which in ("first", "second")]
    first = completion(served, prompt=prompts, max_tokens=24)
    went = moved(served, first, before=1, prompt=prompts, max_tokens=24)
    assert first.end is not None
    assert went.end is not None
    assert "".join(delta.text for delta in went.deltas) == "".join(delta.text for delta in first.deltas)
    assert went.end.usage == first.end.usage


def test_cached_tokens_of_what_ended_with_no_token_are_known_too(served: Worker) -> None:
    """An answer may be nothing: its prompt was computed all the same."""
    prompt = "a prompt that is long enough, and is answered with nothing at all, " * 6
    stop = completion(served, prompt="(" + prompt, max_tokens=1).ids[0].ids[0]
    first = completion(served, prompt=prompt, max_tokens=4, stop_ids=[stop])
    assert not any(ids.ids for ids in first.ids), first.ids
    went = moved(served, first, before=1, prompt=prompt, max_tokens=4, stop_ids=[stop])
    assert first.end is not None
    assert went.end is not None
    assert went.end.usage == first.end.usage


def resume(
    worker: Worker, deltas: list[Any], delivered: int, recorded: tuple[tuple[int, ...], ...], **asked: Any
) -> Answer:
    """Of a call that had drawn ``recorded`` and told ``deltas``, of which its reader has so many."""
    said = b"".join(codec.pack(delta) for delta in deltas[:delivered])
    resumed = worker.run(
        {"model": "m", "prompt": "def f", "temperature": 0, **asked}, kind="completion", recorded=recorded,
        delivered=delivered, delivered_hash=hashlib.blake2b(said, digest_size=16).digest(),
    )  # fmt: skip
    assert resumed.end is not None
    assert resumed.end.error is None
    return resumed


SCORED = pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"logprobs": 1, "echo": True}], ids=str)


def test_a_stream_goes_on_inside_a_character(zygote: Zygote, loader: Any, tmp_path: Path) -> None:
    """What a killed worker had drawn ends anywhere, so also after one byte of three."""
    asked = {"regex": "[\u4f60\u597d\u00e9]{8}", "max_tokens": 40}
    with serving(zygote, loader.grant(CODER / "model"), tmp_path / "w") as worker:
        whole = completion(worker, **asked)
        ids = tuple(token for part in whole.ids for token in part.ids)
        assert len(ids) >= 2 * len(text(whole)) == 16, "a character is of several tokens"
        for known in range(len(ids) + 1):
            for delivered in (0, 1, len(whole.deltas) - 1, len(whole.deltas)):
                resumed = resume(worker, whole.deltas, delivered, (ids[:known],), **asked)
                assert resumed.deltas == whole.deltas[delivered:], (known, delivered)


@SCORED
@pytest.mark.parametrize("count", [1, 3])
def test_a_stream_goes_on_where_its_reader_has_it(served: Worker, count: int, more: dict[str, Any]) -> None:
    """A resume makes the same deltas as the first time: those delivered are compared by hash and left out."""
    asked = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, "n": count, **more}
    whole = completion(served, **asked)
    drawn: dict[int, tuple[int, ...]] = {}
    for part in whole.ids:
        drawn[part.generation] = drawn.get(part.generation, ()) + part.ids
    assert [len(ids) for ids in drawn.values()] == [12] * count
    for delivered, known in ((1, 0), (1, 3), (5, 12), (6 * count, 6), (len(whole.deltas), 12)):
        recorded = tuple(drawn[number][:known] for number in range(count))
        resumed = resume(served, whole.deltas, delivered, recorded, **asked)
        assert resumed.deltas == whole.deltas[delivered:]


@SCORED
@pytest.mark.parametrize("count", [1, 3])
def test_a_running_call_takes_ids_that_it_had_elsewhere(served: Worker, count: int, more: dict[str, Any]) -> None:
    """Whenever they come, in any order: its text, its log probabilities, its finish and its usage are the same, and its
    ids are told once."""
    asked = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True, "n": count, "stop": ["zzzz"], **more}
    whole = completion(served, **asked)
    drawn: dict[int, tuple[int, ...]] = {}
    for part in whole.ids:
        drawn[part.generation] = drawn.get(part.generation, ()) + part.ids
    number = served.call({"model": "m", "prompt": "def f", **asked}, kind="completion", follow=True)
    for first, upto in ((0, 5), (9, 12), (3, 20), (3, 20), (0, 60), (50, 60)):
        for generation, ids in drawn.items():
            served.send(FeedCall(number, generation, first, ids[first:upto]))
    fed = served.finish(number)
    assert fed.deltas == whole.deltas
    told: dict[int, tuple[int, ...]] = {}
    for part in fed.ids:
        assert part.first == len(told.get(part.generation, ()))
        told[part.generation] = told.get(part.generation, ()) + part.ids
    assert told == drawn
    assert fed.end is not None
    assert whole.end is not None
    assert fed.end.usage == whole.end.usage


@SCORED
@pytest.mark.parametrize("count", [1, 3])
def test_a_call_that_is_held_draws_when_it_may(served: Worker, count: int, more: dict[str, Any]) -> None:
    """From nothing or from some ids: what it was told is told, and then the rest, all as if it had drawn it."""
    asked = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "n": count, "stop": ["zzzz"], **more}
    whole = completion(served, **asked)
    drawn: dict[int, tuple[int, ...]] = {}
    for part in whole.ids:
        drawn[part.generation] = drawn.get(part.generation, ()) + part.ids
    for known in (0, 9):
        recorded = tuple(drawn[number][:known] for number in range(count)) if known else ()
        body = {"model": "m", "prompt": "def f", **asked}
        number = served.call(body, kind="completion", follow=True, held=True, recorded=recorded)
        for generation, ids in drawn.items():
            served.send(FeedCall(number, generation, known, ids[known:15], True))
        for generation, ids in drawn.items():
            served.send(FeedCall(number, generation, 15, ids[15:20], generation < count - 1))
        answer = served.finish(number)
        assert answer.deltas == whole.deltas
        assert answer.end is not None
        assert whole.end is not None
        assert answer.end.usage == whole.end.usage


def test_more_choices_than_are_told_at_once(served: Worker) -> None:
    answer = completion(served, n=40, max_tokens=3, ignore_eos=True, echo=True)
    assert [text(answer, choice) for choice in range(40)] == [text(answer)] * 40
    assert [delta.finish for delta in answer.deltas].count("length") == 40


def test_unknown_fields_are_ignored_and_logged(served: Worker) -> None:
    assert text(completion(served, wobble=1)) == text(completion(served))
    assert any("wobble" in log.text for log in served.logs)
    completion(served, **{f"wabble{number:03}" + "\n" * 10_000: 1 for number in range(50)})
    (many,) = [log.text for log in served.logs if "wabble" in log.text]
    assert "50 field(s)" in many
    assert many.count("wabble") == 20
    assert len(many) < 10_000


def test_a_cancel_takes_a_token(served: Worker) -> None:
    for kind, body in (
        ("completion", {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}),
        ("fn", {"max_tokens": 2000, "ignore_eos": True}),
        ("fn", {"mode": "swallow", "max_tokens": 2000, "ignore_eos": True}),
    ):
        number = served.call(body, kind=kind)
        answer = served.answers[number]
        served.until(lambda answer=answer: bool(answer.deltas or answer.outputs))  # type: ignore[misc]
        served.cancel(number)
        assert served.finish(number).error.code == "cancelled"
        assert len(answer.deltas or answer.outputs) < 2000
    assert text(completion(served))


@pytest.mark.parametrize("nbytes", [140_000, 300_000])
def test_a_name_of_any_length_costs_nobody_else_his_answer(served: Worker, nbytes: int) -> None:
    other = served.call({"max_tokens": 16})
    error = chat(served, chat_template_kwargs={"x" * nbytes: 1}).error
    assert (error.code, error.field) == ("invalid_request", f"chat_template_kwargs.{'x' * 179}")
    assert served.finish(other).text


def test_generate(served: Worker) -> None:
    whole = served.run({"max_tokens": 16})
    assert whole.text == text(completion(served))
    twice = served.run({"mode": "twice", "max_tokens": 4, "temperature": 1.0})
    assert {ids.generation for ids in twice.ids} == {0, 1}
    assert len(twice.outputs) == 2
    chatty = served.run({"prompt": [{"role": "user", "content": "hi"}], "max_tokens": 4})
    assert chatty.text == text(chat(served))
    facts = served.run({"mode": "facts"}).outputs[0]
    assert facts[:4] == ["llama", "cpu", True, "LlamaForCausalLM"]
    error = served.run({"temperature": 5}).error
    assert (error.code, error.field) == ("invalid_argument", "temperature")
    assert served.run({"wobble": 5}).error.field == "wobble"
    assert served.run({"prompt": "x" * CONTEXT * 2}).error.code == "context_length_exceeded"


def test_a_resume_replays_recorded_ids(served: Worker) -> None:
    import msgspec

    whole = served.run({"max_tokens": 16, "temperature": 1.0})
    ids = tuple(number for part in whole.ids for number in part.ids)
    delivered = b"".join(msgspec.json.encode(value) for value in whole.outputs[:1])
    resumed = served.run({"max_tokens": 16, "temperature": 1.0}, recorded=(ids[:9],))
    assert resumed.text == whole.text
    assert resumed.end is not None
    assert resumed.end.usage is not None
    assert resumed.end.usage.completion == 16
    again = served.run(
        {"max_tokens": 16, "temperature": 1.0},
        delivered=1,
        delivered_hash=hashlib.blake2b(delivered, digest_size=16).digest(),
    )
    assert again.outputs == whole.outputs[1:]


def test_many_at_once_share_messages(served: Worker) -> None:
    before = len(served.batches)
    numbers = [
        served.call({"prompt": "def f"[: i % 5 + 1], "max_tokens": 32, "ignore_eos": True}, kind="completion")
        for i in range(8)
    ]
    answers = [served.finish(number) for number in numbers]
    frames = sum(len(answer.indexes) for answer in answers)
    assert len(served.batches) - before < frames
    for number, answer in zip(numbers, answers, strict=True):
        alone = served.run(
            {"prompt": "def f"[: (number - numbers[0]) % 5 + 1], "max_tokens": 32, "ignore_eos": True},
            kind="completion",
        )
        assert text(alone) == text(answer)


def test_sampling_of_generate() -> None:
    made = sampling_of(options({"stop": "a", "logit_bias": {3: 1.5}, "top_k": -1, "seed": None}), 5, temperature=0.0)
    assert (made.stop, made.logit_bias, made.top_k, made.seed, made.temperature) == (("a",), {3: 1.5}, 0, None, 0.0)


def test_lists_of_generate_may_be_of_any_kind() -> None:
    made = sampling_of(options({"stop": ("a",), "stop_ids": {7}, "bad_words": iter(["b"])}), 5, temperature=0.0)
    assert (made.stop, made.stop_ids) == (("a",), (7,))

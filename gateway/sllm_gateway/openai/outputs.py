"""OpenAI's answers from ``Delta`` frames: chunks of a stream, or one body."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sllm_gateway import sse
from sllm_gateway.errors import openai_view
from sllm_gateway.outputs import progress_text
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.frames import Delta, End, Frame, FrameKind, TokenLogprob, ToolDelta, Usage
from sllm_runtime.protocol.node import Progress

_json = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Header:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str

    def fields(self, kind: str, *, exact: bool) -> dict[str, Any]:
        """What stands before the choices. OpenAI has no field for exactness, so there is one of ours where it lacks."""
        own = {} if exact else {"sllm": {"exact": False}}
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **own}

    def start(self, kind: str, *, exact: bool = True) -> bytes:
        """The beginning of the JSON object, up to the choices."""
        return _json(self.fields(kind, exact=exact))[:-1] + b',"choices":['


def usage_view(usage: Usage | None) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    usage = usage or Usage()
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def deltas(frames: list[Frame]) -> Iterable[Delta]:
    """What the engine said in these frames."""
    for frame in frames:
        if frame.kind is FrameKind.DELTA:
            yield codec.unpack(Delta, frame.data)


def chat_logprobs(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    def one(token: str, logprob: float | None, raw: bytes) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(raw)}

    content = []
    for entry in entries:
        tokens = ((entry.token, entry.logprob), *entry.top)
        raws = entry.raw or tuple(token.encode() for token, _ in tokens)
        first, *others = [one(*token, raw) for token, raw in zip(tokens, raws, strict=True)]
        content.append({**first, "top_logprobs": others})
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Iterable[TokenLogprob], offset: int) -> dict[str, Any]:
    """``offset``: characters of this choice before the first token. A prompt's first token has no probabilities."""
    view: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        view["tokens"].append(entry.token)
        view["token_logprobs"].append(entry.logprob)
        likeliest = None if entry.logprob is None else _by_text((*entry.top, (entry.token, entry.logprob)))
        view["top_logprobs"].append(likeliest)
        view["text_offset"].append(offset)
        offset += _characters(entry)
    return view


def _characters(entry: TokenLogprob) -> int:
    """Of the text that begin with it: a part of one is shown as U+FFFD, and counts where its first byte is."""
    return sum(byte & 0xC0 != 0x80 for byte in entry.raw[0]) if entry.raw else len(entry.token)


def _by_text(tokens: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The chosen token is among them, as OpenAI promises. Of tokens with one text the likeliest is shown."""
    found: dict[str, float] = {}
    for text, logprob in tokens:
        found.setdefault(text, logprob)
    return found


def _call_view(call: ToolDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_part(part: ToolDelta) -> dict[str, Any]:
    """In a stream: what the call is comes with its first part."""
    view = _call_view(part) if part.name else {"function": {"arguments": part.arguments}}
    return {"index": part.index, **view}


class _Chunks:
    """What both streams share: ids, the usage chunk, errors."""

    kind = ""
    inside = False

    def __init__(self, header: Header, *, usage: bool) -> None:
        self._header = header
        self._start = header.start(self.kind)
        self._usage = usage
        self._tail = b'],"usage":null}' if usage else b"]}"
        self._next = 0

    def _chunk(self, choice: bytes) -> bytes:
        number = self._next
        self._next += 1
        return b"id: %d\ndata: %s%s%s\n\n" % (number, self._start, choice, self._tail)

    def inexact(self) -> None:
        self._start = self._header.start(self.kind, exact=False)

    def end(self, end: End) -> bytes:
        if not self._usage:
            return b""
        self._tail = b'],"usage":' + _json(usage_view(end.usage)) + b"}"
        return self._chunk(b"")

    def error(self, error: SllmError) -> bytes:
        return sse.event(_json(openai_view(error)))

    def progress(self, progress: Progress) -> bytes:
        return sse.comment(progress_text(progress))


class CompletionStream(_Chunks):
    """``/v1/completions`` with ``stream``."""

    kind = "text_completion"

    def __init__(self, header: Header, *, usage: bool) -> None:
        super().__init__(header, usage=usage)
        self._offsets: dict[int, int] = {}

    def frames(self, frames: list[Frame]) -> bytes:
        return b"".join([self._chunk(self._choice(delta)) for delta in deltas(frames)])

    def _choice(self, delta: Delta) -> bytes:
        logprobs = b"null"
        if delta.logprobs:
            offset = self._offsets.get(delta.choice, 0)
            logprobs = _json(completion_logprobs(delta.logprobs, offset))
            self._offsets[delta.choice] = offset + sum(map(_characters, delta.logprobs))
        finish = _json(delta.finish)
        return b'{"text":%s,"index":%d,"logprobs":%s,"finish_reason":%s}' % (
            _json(delta.text), delta.choice, logprobs, finish,
        )  # fmt: skip


class ChatStream(_Chunks):
    """``/v1/chat/completions`` with ``stream``: the role, the text, the reason of the end, each its own chunk."""

    kind = "chat.completion.chunk"

    def __init__(self, header: Header, *, usage: bool) -> None:
        super().__init__(header, usage=usage)
        self._begun: set[int] = set()

    def frames(self, frames: list[Frame]) -> bytes:
        out: list[bytes] = []
        for delta in deltas(frames):
            if delta.choice not in self._begun:
                self._begun.add(delta.choice)
                out.append(self._piece(delta.choice, b'{"role":"assistant","content":""}'))
            if delta.text or delta.logprobs:
                logprobs = _json(chat_logprobs(delta.logprobs)) if delta.logprobs else b"null"
                out.append(self._piece(delta.choice, b'{"content":%s}' % _json(delta.text), logprobs=logprobs))
            if delta.tool_calls:
                calls = [_call_part(part) for part in delta.tool_calls]
                out.append(self._piece(delta.choice, b'{"tool_calls":%s}' % _json(calls)))
            if delta.finish is not None:
                out.append(self._piece(delta.choice, b"{}", finish=_json(delta.finish)))
        return b"".join(out)

    def _piece(self, choice: int, delta: bytes, *, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return self._chunk(
            b'{"index":%d,"delta":%s,"logprobs":%s,"finish_reason":%s}' % (choice, delta, logprobs, finish)
        )


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: dict[int, ToolDelta] = field(default_factory=dict)

    def called(self, parts: Iterable[ToolDelta]) -> None:
        """More of its calls of functions."""
        for part in parts:
            old = self.calls.get(part.index)
            whole = part if old is None else msgspec.structs.replace(old, arguments=old.arguments + part.arguments)
            self.calls[part.index] = whole


class WholeAnswer:
    """Either route without ``stream``. ``choices``: as many as were asked for, also where nothing was generated."""

    def __init__(self, header: Header, *, chat: bool, choices: int) -> None:
        self._header, self._chat, self._count = header, chat, choices
        self._exact = True

    def inexact(self) -> None:
        self._exact = False

    def body(self, frames: list[Frame], end: End) -> bytes:
        choices = {index: _Choice() for index in range(self._count)}
        for delta in deltas(frames):
            choice = choices.setdefault(delta.choice, _Choice())
            choice.text.append(delta.text)
            choice.logprobs += delta.logprobs
            choice.called(delta.tool_calls)
            choice.finish = delta.finish or choice.finish
        view = self._chat_choice if self._chat else self._completion_choice
        return _json(
            {
                **self._header.fields("chat.completion" if self._chat else "text_completion", exact=self._exact),
                "choices": [view(index, choice) for index, choice in sorted(choices.items())],
                "usage": usage_view(end.usage),
            }
        )

    @staticmethod
    def _chat_choice(index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [_call_view(call) for _, call in sorted(choice.calls.items())]
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs) if choice.logprobs else None,
            "finish_reason": choice.finish or "stop",
        }

    @staticmethod
    def _completion_choice(index: int, choice: _Choice) -> dict[str, Any]:
        return {
            "text": "".join(choice.text),
            "index": index,
            "logprobs": completion_logprobs(choice.logprobs, 0) if choice.logprobs else None,
            "finish_reason": choice.finish or "stop",
        }

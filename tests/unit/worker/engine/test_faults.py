"""Bad requests in the middle of a batch: each has a typed error of its own, the others the tokens they have alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from sllm_runtime.protocol.errors import (
    ContextLengthExceeded,
    FunctionError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    SllmError,
)
from sllm_runtime.worker.engine.base import Engine, Event, Mask, Request, Sampling
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.transformers_engine import TransformersEngine
from tests.fixtures.models import BUILDERS
from tests.unit.worker.engine.driver import MIB, ids

VOCABULARY, CONTEXT, BROKEN = 101, 256, 99
"""The row of token 99 is NaN."""
NO_ROW = frozenset({VOCABULARY})
"""What no engine is given (``end_ids``): choosing a token breaks where ends are forbidden."""


@cache
def module() -> Any:
    torch.manual_seed(0)
    made = BUILDERS["llama"](max_position_embeddings=CONTEXT).eval()
    with torch.no_grad():
        made.model.embed_tokens.weight[BROKEN] = float("nan")
    return made


def core(kind: str, kv: int = 4 * MIB) -> Engine:
    if kind == "transformers":
        return TransformersEngine(module(), NO_ROW, CONTEXT, VOCABULARY)
    made = build("LlamaForCausalLM", module().config, module().state_dict(), torch.float32, EXACT.rows)
    return OurEngine(made, NO_ROW, EXACT, kv)


class Rule:
    """Forbids the broken token; at its third token it does what ``then`` does."""

    field = "regex"

    def __init__(self, then: Callable[[Mask], Mask] = lambda mask: mask) -> None:
        self._then = then

    def allowed(self, output: Sequence[int]) -> Mask:
        mask: Mask = np.ones(VOCABULARY, np.bool_)
        mask[BROKEN] = False
        return self._then(mask) if len(output) == 2 else mask

    def forget(self) -> None:
        """It keeps nothing."""


def _raises(error: Exception) -> Callable[[Mask], Mask]:
    def then(_mask: Mask) -> Mask:
        raise error

    return then


def asked(number: int, prompt: Sequence[int] = range(5, 40), *, then: Any = None, **fields: Any) -> Request:
    sampling = Sampling(**{"max_tokens": 16, "temperature": 0.8, "seed": number, **fields.pop("sampling", {})})
    rule = Rule() if then is None else Rule(then)
    return Request(id=number, prompt=tuple(prompt), sampling=sampling, constraints=(rule,), **fields)


def _nothing(mask: Mask) -> Mask:
    return np.zeros_like(mask)


FAULTS: dict[str, tuple[Request, type[SllmError], str | None]] = {
    "empty prompt": (asked(9, ()), InvalidRequest, "prompt"),
    "an id out of range": (asked(9, (5, VOCABULARY)), InvalidRequest, "prompt"),
    "a resumed id out of range": (asked(9, emitted=(-1,)), InvalidRequest, "emitted"),
    "too long a prompt": (asked(9, [7] * CONTEXT), ContextLengthExceeded, "prompt"),
    "contradictory sampling": (asked(9, sampling={"min_tokens": 17}), InvalidRequest, "min_tokens"),
    "no number": (asked(9, sampling={"temperature": float("nan")}), InvalidRequest, "temperature"),
    "an unknown adapter": (asked(9, lora="nobody"), ModelNotFound, "model"),
    "NaN": (asked(9, (5, BROKEN, 6)), FunctionError, None),
    "NaN in a prompt that is scored": (
        asked(9, (5, BROKEN, 6), sampling={"prompt_logprobs": 1, "max_tokens": 0}), FunctionError, None),
    "a rule that leaves nothing": (asked(9, then=_nothing), InvalidRequest, "regex"),
    "a rule that costs too much": (asked(9, then=_raises(InvalidRequest("states", field="regex"))), InvalidRequest,
                                   "regex"),
    "a bug in a rule": (asked(9, then=_raises(ZeroDivisionError("x"))), InternalError, None),
    "a bug where a token is chosen": (asked(9, sampling={"min_tokens": 1}), InternalError, None),
    "a rule that cannot be read": (asked(9, then=_raises(OverflowError("x"))), InternalError, None),
}  # fmt: skip


def good(number: int) -> Request:
    return asked(number, range(5 + number, 60), sampling={"repetition_penalty": 1.1})


@cache
def alone(kind: str, number: int) -> tuple[int, ...]:
    one = core(kind)
    one.add(good(number))
    return ids(finished(one)[number])


def finished(one: Engine, events: dict[int, list[Event]] | None = None) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = events or {}
    while one.busy:
        for event in one.step():
            found.setdefault(event.request, []).append(event)
    return found


def error_of(one: Engine, wrong: Request, events: dict[int, list[Event]]) -> SllmError | None:
    """What becomes of ``wrong`` while others run."""
    try:
        one.add(wrong)
    except SllmError as error:
        return error
    return finished(one, events)[wrong.id][-1].error


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_a_fault_is_its_own_callers_alone(kind: str, name: str) -> None:
    wrong, error, field = FAULTS[name]
    if kind == "transformers" and error is ModelNotFound:
        error = InvalidRequest  # it runs no adapters at all
    one, events = core(kind), dict[int, list[Event]]()
    for number in (0, 1):
        one.add(good(number))
    for event in (event for _ in range(3) for event in one.step()):
        events.setdefault(event.request, []).append(event)
    one.add(good(2))
    found = error_of(one, wrong, events)
    assert type(found) is error
    assert found.field == field
    finished(one, events)
    assert {number: ids(events[number]) for number in range(3)} == {number: alone(kind, number) for number in range(3)}


def test_memory_too_small_for_one_request_is_said_to_it() -> None:
    made = build("LlamaForCausalLM", module().config, module().state_dict(), torch.float32, EXACT.rows)
    page = OurEngine(made, frozenset(), EXACT, 1)  # one page at least
    assert page.max_context == 128
    page.add(good(0))
    with pytest.raises(ContextLengthExceeded, match="KV memory of this instance holds 128"):
        page.add(asked(9, [7] * 128))
    assert ids(finished(page)[0]) == alone("ours", 0)

"""Arguments of calls that would take the place of what no caller gives."""

from __future__ import annotations

import json
from datetime import datetime
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict

from sllm_runtime.protocol.errors import InvalidArgument
from sllm_runtime.worker.arguments import Arguments
from sllm_runtime.worker.handler import bind


def with_model(model: Any, **more: Any) -> Any:
    return more


def without(**more: Any) -> Any:
    return more


def dated(**more: datetime) -> Any:
    return more


class Called:
    def __call__(this, **more: Any) -> Any:
        return more


class CalledWithModel:
    def __call__(self, model: Any, **more: Any) -> Any:
        return more


def test_further_ones_are_of_the_type_that_is_hinted() -> None:
    parse = Arguments(dated).parse
    assert parse(b'{"a": "2026-01-02T03:04:05"}') == {"a": datetime(2026, 1, 2, 3, 4, 5)}
    with pytest.raises(InvalidArgument) as caught:
        parse(b'{"a": "2026-01-02", "b": "soon"}')
    assert caught.value.field == "b"


@pytest.mark.parametrize(
    ("function", "wrong"),
    [(with_model, "model"), (Called().__call__, "this"), (CalledWithModel().__call__, "self"),
     (CalledWithModel().__call__, "model")],
)  # fmt: skip
def test_there_is_no_such_argument(function: Any, wrong: str) -> None:
    parse = bind(function, object()).arguments.parse
    with pytest.raises(InvalidArgument, match=f"there is no argument '{wrong}'") as refused:
        parse(b'{"a": 1, "%b": 2}' % wrong.encode())
    assert refused.value.field == wrong
    assert parse(b'{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(("function", "name"), [(without, "model"), (without, "self"), (Called().__call__, "self")])
def test_they_are_names_like_others_where_nothing_has_them(function: Any, name: str) -> None:
    bound = bind(function, None)
    assert bound.call(**bound.arguments.convert({name: 1})) == {name: 1}


class Meeting(BaseModel):
    at: datetime


def unions(
    when: datetime | int = 0, ids: dict[str, UUID | int] | None = None, whom: list[Meeting | int] | None = None
) -> None: ...


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"when": "soon"}, "when"),
        ({"when": {}}, "when"),
        ({"ids": {"a": "b"}}, "ids.a"),
        ({"whom": [1, {"at": "soon"}]}, "whom.1.at"),
        ({"whom": [{}]}, "whom.0.at"),
        ({"what": 1}, "what"),
    ],
)
def test_a_wrong_argument_is_named_as_its_caller_gave_it(given: dict[str, Any], field: str) -> None:
    """Of what a gateway cannot tell: JSON Schema's formats."""
    with pytest.raises(InvalidArgument) as refused:
        bind(unions, None).arguments.parse(json.dumps(given).encode())
    assert refused.value.field == field


class Kind(Enum):
    LONG = "long"


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    when: datetime
    id: UUID
    kind: Kind
    pair: tuple[int, int]


def strictly(record: Strict) -> Any:
    return record


def test_what_is_strict_takes_what_json_has_for_its_values() -> None:
    """JSON has no dates: by another rule nothing that a caller can send would do."""
    given = Strict(when=datetime(2026, 1, 2), id=UUID(int=1), kind=Kind.LONG, pair=(1, 2))
    parse = Arguments(strictly).parse
    body = b'{"record": %b}' % given.model_dump_json().encode()
    assert parse(body) == {"record": given}
    with pytest.raises(InvalidArgument) as refused:
        parse(body.replace(b"[1,2]", b'["1",2]'))
    assert refused.value.field == "record.pair.0"


def test_deep_bodies_are_refused_by_their_own_fault() -> None:
    def fn(n: int, m: int = 0, deep: Any = None) -> None: ...

    body = b'{"n": "x", "m": "y", "deep": %b}' % (b"[" * 210 + b"]" * 210)
    with pytest.raises(InvalidArgument) as refused:
        Arguments(fn).parse(body)
    assert refused.value.field == "n", refused.value.message

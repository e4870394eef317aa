"""OpenAI's requests as the gateway reads them: what is wrong is refused before anything is started."""

from __future__ import annotations

from typing import Final, TypeVar

from pydantic import ValidationError

from sllm_gateway.arguments import parse, path_text
from sllm_gateway.errors import quoted
from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.openai import check
from sllm_runtime.protocol.openai_requests import ChatRequest, OpenAIRequest, first_wrong

_NAMED: Final = 20
R = TypeVar("R", bound=OpenAIRequest)


def read(type_: type[R], body: bytes) -> R:
    """The request in ``body``. Raises ``MalformedJson``; ``InvalidRequest`` or ``InvalidArgument`` naming the field."""
    value = parse(body)
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        request = type_.model_validate(value)
    except ValidationError as error:
        told, place = first_wrong(error)
        param = path_text(place)
        raise InvalidRequest(f"'{param}': {told['msg'][:300]}", field=param) from error
    check(value, chat=type_ is ChatRequest)
    return request


def warnings(request: OpenAIRequest) -> list[str]:
    """Fields that mean nothing here, for the log: the first _NAMED by name. A caller names as many as it likes."""
    unknown = request.unknown
    named = [f"unknown field {quoted(name)} is ignored" for name in unknown[:_NAMED]]
    return [*named, f"and {len(unknown) - _NAMED} more"] if len(unknown) > _NAMED else named

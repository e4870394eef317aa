"""One deployment: what was asked, how far it is, how it ended, and whether it was called back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from sllm_runtime.platform.owned import end
from sllm_runtime.protocol.ctl import Deploy, Deployed
from sllm_runtime.protocol.errors import Cancelled, ErrorBody, InternalError, UnsupportedModel
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.records import ModelRecord

T = TypeVar("T")

CALLED_BACK: Final = "the deployment was called back before its version was active; nothing of it is left"


@dataclass(frozen=True, slots=True)
class Needed:
    """What a version needs beside its bundle."""

    model: ModelRecord | None = None
    adapters: Mapping[str, ModelRecord] = field(default_factory=dict)


def needed_of(found: Mapping[str, ModelRecord]) -> Needed:
    """Of models by name, the base's empty. Raises ``UnsupportedModel`` for a base or an adapter that is none."""
    for name, record in found.items():
        if name and not record.adapter:
            text = f"adapter {name!r}: {record.uri} is a model of its own, no LoRA adapter"
            raise UnsupportedModel(text, field="adapters", stage="model")
        if not name and record.adapter:
            text = (
                f"model: {record.uri} is a LoRA adapter of {record.adapter}; deploy that, with adapters={{name: place}}"
            )
            raise UnsupportedModel(text, field="model", stage="model")
    return Needed(found.get(""), {name: record for name, record in found.items() if name})


class Deployment:
    """One request's deployment, running or done."""

    def __init__(self, request: Deploy) -> None:
        self.request = request
        self.done = asyncio.Event()
        self.withdrawn = asyncio.Event()
        self.active: int | None = None
        """The version that got the route: from then on it cannot be called back."""
        self.ended = 0.0
        self.task: asyncio.Task[None] | None = None
        self.outcome: Deployed | None = None
        self.error: ErrorBody | None = None
        self.tell: Callable[[], Progress] = lambda: Progress(stage="check")

    def result(self) -> Deployed:
        """Raises what ended it. Valid when ``done``."""
        if self.error is not None:
            raise self.error.to_error()
        if self.outcome is None:
            raise InternalError(f"deployment {self.request.request} has no outcome; deploy again")
        return self.outcome


async def unless(withdrawn: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` brings; ended with ``Cancelled`` once ``withdrawn`` is set, if that comes first."""
    working = asyncio.create_task(work, name="deployment")
    called_back = asyncio.create_task(withdrawn.wait(), name="withdrawn")
    try:
        await asyncio.wait([working, called_back], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled(CALLED_BACK)
        return working.result()
    finally:
        await end([working, called_back])

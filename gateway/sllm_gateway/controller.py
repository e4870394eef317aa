"""What ``/api/v1`` asks of the controller: single questions, and long polls as streams of progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar, cast

import msgspec

from sllm_gateway.leader import Leader
from sllm_runtime.platform.requests import Unserved
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import DeadlineExceeded, NoController
from sllm_runtime.protocol.limits import CONTROLLER_WAIT_S, LONG_POLL_S, RPC_TIMEOUT_S, TOLD_AFTER_S
from sllm_runtime.protocol.node import Progress

R = TypeVar("R", bound=msgspec.Struct)
L = TypeVar("L", ctl.FunctionList, ctl.FunctionInfo, ctl.ModelList, ctl.NodeList, ctl.SecretList)

ANSWER_S = CONTROLLER_WAIT_S + RPC_TIMEOUT_S
"""For one question: a controller that leads is waited for, or what keeps it from answering, and then it answers."""
AGAIN_S = 0.25
AWAITED = Progress(stage="controller", message="waits for a controller that leads")


class Controller:
    """The leading controller, by its verbs."""

    def __init__(self, leader: Leader, clock: Callable[[], float] = time.monotonic) -> None:
        self._leader = leader
        self._clock = clock

    async def ask(
        self,
        verb: str,
        request: msgspec.Struct,
        reply: type[R],
        *,
        timeout_s: float = ANSWER_S,
        wait_s: float | None = None,
    ) -> R:
        """One answer. Raises what the controller raises; ``NoController`` where none leads for ``wait_s`` seconds
        (CONTROLLER_WAIT_S), or has not answered after ``timeout_s``. What is asked again changes nothing twice."""
        assert ctl.VERBS[verb] == (type(request), reply)
        wait_s = CONTROLLER_WAIT_S if wait_s is None else wait_s
        try:
            return await self._leader.ask(verb, request, reply, timeout_s=timeout_s, wait_s=wait_s)
        except Unserved as error:
            raise NoController(
                f"no controller leads: {verb!r} was not done; see that one runs, then ask again",
                retry_after_s=CONTROLLER_WAIT_S,
            ) from error
        except DeadlineExceeded as error:
            raise NoController(
                f"no controller has answered {verb!r} ({error.message}): it may have been done, {_again(request)}",
                retry_after_s=CONTROLLER_WAIT_S,
            ) from error

    # --- lists: all pages of them -------------------------------------------------------------------
    async def functions(self) -> tuple[ctl.FunctionInfo, ...]:
        """All functions by name, each with its active and its newest version."""
        pages = [page async for page in self._pages("functions", ctl.Listing(), ctl.FunctionList)]
        return ctl.joined(info for page in pages for info in page.functions)

    async def function(self, name: str) -> ctl.FunctionInfo:
        """One function with all its versions. Raises ``FunctionNotFound``."""
        pieces = [page async for page in self._pages("function", ctl.FunctionRef(function=name), ctl.FunctionInfo)]
        (info,) = ctl.joined(pieces)
        return info

    async def models(self) -> tuple[ctl.ModelInfo, ...]:
        """All models, the first registered first."""
        pages = [page async for page in self._pages("models", ctl.Listing(), ctl.ModelList)]
        return tuple(info for page in pages for info in page.models)

    async def nodes(self, timeout_s: float = ANSWER_S, wait_s: float | None = None) -> tuple[ctl.NodeInfo, ...]:
        """All nodes by name."""
        pages = [page async for page in self._pages("nodes", ctl.Listing(), ctl.NodeList, timeout_s, wait_s)]
        return tuple(info for page in pages for info in page.nodes)

    async def secrets(self) -> tuple[ctl.SecretInfo, ...]:
        """All secrets by name, without their values."""
        pages = [page async for page in self._pages("secrets", ctl.Listing(), ctl.SecretList)]
        return tuple(info for page in pages for info in page.secrets)

    async def _pages(
        self,
        verb: str,
        request: ctl.Listing,
        reply: type[L],
        timeout_s: float = ANSWER_S,
        wait_s: float | None = None,
    ) -> AsyncGenerator[L, None]:
        while True:
            page = await self.ask(verb, request, reply, timeout_s=timeout_s, wait_s=wait_s)
            yield page
            if page.next <= request.after:
                return
            request = msgspec.structs.replace(request, after=page.next)

    # --- long polls ---------------------------------------------------------------------------------
    async def poll(
        self, verb: str, request: msgspec.Struct, reply: type[R], over: Callable[[R], bool]
    ) -> AsyncGenerator[Progress | R, None]:
        """Ask again and again: progress, whenever it has changed, and at last the answer that is ``over``. A controller
        that leads is waited for as in ``ask``, which is progress too."""
        shown: Progress | None = None
        patience = self._clock() + CONTROLLER_WAIT_S
        while True:
            began = self._clock()
            try:
                answer = await self.ask(
                    verb, request, reply, timeout_s=LONG_POLL_S + RPC_TIMEOUT_S, wait_s=TOLD_AFTER_S
                )
            except NoController:
                if self._clock() > patience:
                    raise
                if shown != AWAITED:
                    shown = AWAITED
                    yield shown
                continue
            patience = self._clock() + CONTROLLER_WAIT_S
            if over(answer):
                yield answer
                return
            progress = cast(Any, answer).progress
            if progress is not None and progress != shown:
                shown = progress
                yield shown
            if self._clock() - began < AGAIN_S:
                await asyncio.sleep(AGAIN_S)


def _again(request: msgspec.Struct) -> str:
    """What becomes of it when it is asked again."""
    if isinstance(request, ctl.Rollback) and request.version is None:
        return "and asked again under another name it goes one version further back"
    return "and asked again it is done once"

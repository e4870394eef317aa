"""``AsyncClient``: a gateway over HTTP, for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import httpx

from sllm import answers, transport
from sllm.answers import Observe, Trace
from sllm.connection import ABREAST, LIMITS, Connection
from sllm.following import CANCEL_S, Following
from sllm.gateways import Asking
from sllm.sse import Event, Parser
from sllm_runtime.protocol.errors import SllmError, Unavailable


class AsyncClient(Connection[httpx.AsyncClient]):
    """``Client`` for asyncio; ``async with AsyncClient() as client``."""

    @staticmethod
    def _pool(options: Mapping[str, Any], ways: Mapping[str, str | None]) -> httpx.AsyncClient:
        wire = partial(httpx.AsyncHTTPTransport, verify=options["verify"], limits=LIMITS)
        mounts = {at: wire(proxy=way) if way else None for at, way in ways.items()}
        return httpx.AsyncClient(**options, transport=wire(), mounts=mounts)

    @staticmethod
    def _whose() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    @staticmethod
    def _lives(owner: asyncio.AbstractEventLoop) -> bool:
        return not owner.is_closed()  # one that rests goes on with its next call

    @staticmethod
    def _rests(owner: asyncio.AbstractEventLoop) -> bool:
        return not owner.is_running()

    @staticmethod
    def _gate() -> asyncio.Semaphore:
        return asyncio.Semaphore(ABREAST)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Repeatable."""
        await self._http.aclose()

    # --- calls ------------------------------------------------------------------------------------
    async def call(
        self, name: str, arguments: Mapping[str, Any], *, version: int | None = None, trace: Trace | None = None
    ) -> Any:
        """As ``Client.call``."""
        options = self._whole(arguments)
        path, seen = transport.function_path(name, version), trace or Trace()
        async with self._own().calls:
            return await self._again(lambda: self._once("POST", path, seen, options), repeatable=False)

    async def stream(
        self, name: str, arguments: Mapping[str, Any], *, version: int | None = None, trace: Trace | None = None
    ) -> AsyncGenerator[Any, None]:
        """As ``Client.stream``; wrap it in ``contextlib.aclosing`` to leave the loop early."""
        attempt, trace, body = 1, trace or Trace(), transport.encoded(arguments)
        while True:
            begun = False
            try:
                async with aclosing(self._values(transport.function_path(name, version), body, trace)) as values:
                    async for value in values:
                        begun = True
                        yield value
                return
            except SllmError as error:
                wait = None if begun else self._again_in(attempt, error, repeatable=False)
                if wait is None:
                    raise
                await asyncio.sleep(wait)
                attempt += 1

    async def _values(self, path: str, body: bytes, trace: Trace) -> AsyncGenerator[Any, None]:
        reading = self.events("POST", path, trace=trace, content=body, headers=transport.JSON)
        async with aclosing(self._followed(reading, Following(self._gateways), trace)) as events:
            async for event in events:
                found, value = answers.value_of(event, trace)
                if found:
                    yield value

    async def _followed(
        self, reading: AsyncGenerator[Event, None], following: Following, trace: Trace
    ) -> AsyncGenerator[Event, None]:
        """The events of ``reading``, also where they come from several gateways, one after the other."""
        try:
            while True:
                try:
                    async with aclosing(reading) as events:
                        async for event in events:
                            if following.is_no_end(event):
                                raise answers.problem_of(event)
                            following.seen(event)
                            yield event
                    return
                except SllmError as error:
                    wait = following.broke(error, trace, time.monotonic())
                await asyncio.sleep(wait)
                reading = self.events("GET", following.path, trace=trace, headers=following.headers)
        except (GeneratorExit, asyncio.CancelledError):
            if following.call is not None:
                await self._cancel(following, trace)
            raise

    async def _cancel(self, following: Following, trace: Trace) -> None:
        try:
            await self.request("POST", following.cancel, within_s=CANCEL_S)
        except (SllmError, RuntimeError):  # RuntimeError: the client is closed
            trace.cancelled = False

    # --- /api/v1 ----------------------------------------------------------------------------------
    async def request(self, method: str, path: str, *, within_s: float | None = None, **options: Any) -> Any:
        """As ``Client.request``."""
        if within_s is not None:
            return await self._once(method, path, None, {**options, "within_s": within_s})
        repeatable = method in ("GET", "HEAD")
        async with self._own().requests:
            return await self._again(lambda: self._once(method, path, None, options), repeatable=repeatable)

    async def operation(self, path: str, body: Mapping[str, Any], observe: Observe = answers.ignore) -> str:
        """As ``Client.operation``."""
        async with aclosing(self.events("POST", path, json=dict(body))) as events:
            async for event in events:
                result = answers.result_of(event, observe)
                if result is not None:
                    return result
        raise Unavailable(f"{path} ended without a result; ask again")

    async def events(
        self, method: str, path: str, *, trace: Trace | None = None, **options: Any
    ) -> AsyncGenerator[Event, None]:
        """As ``Client.events``."""
        trace = trace or Trace()
        trace.broken = False
        options["headers"] = {**transport.SSE, **options.get("headers", {})}
        try:
            async with aclosing(await self._sent(method, path, trace, stream=True, **options)) as response:
                trace.call = answers.call_id(response.headers)
                if not answers.good(response.status_code):
                    raise answers.error_from(response.status_code, response.headers, await response.aread())
                parser = Parser()
                async for chunk in response.aiter_bytes():
                    for event in parser.feed(chunk):
                        yield event
                        if event.done or event.event == "error":
                            return
        except httpx.HTTPError as error:
            raise answers.broken_off(trace, transport.reason(error)) from error
        raise answers.broken_off(trace)

    async def follow(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[Event, None]:
        """As ``Client.follow``."""
        following, trace = Following(self._gateways, f"{path}?{urlencode(params)}"), Trace()
        reading = self.events("GET", following.path, trace=trace)
        async with aclosing(self._followed(reading, following, trace)) as events:
            async for event in events:
                yield event

    async def _sent(
        self,
        method: str,
        path: str,
        trace: Trace | None,
        *,
        stream: bool = False,
        within_s: float | None = None,
        **options: Any,
    ) -> httpx.Response:
        """The answer of the first gateway that takes the connection. Raises the typed error."""
        asking = Asking(self._gateways, path, within_s)
        options["extensions"] = {"trace": transport.keeps_alive_async}
        while True:
            request, began = self._http.build_request(method, asking.url, **options, **asking.bounds), time.monotonic()
            try:
                response = await self._http.send(request, stream=stream)
            except httpx.HTTPError as error:
                asking.failed(error, trace, time.monotonic() - began)
            else:
                asking.answered(trace)
                return response

    async def _once(self, method: str, path: str, trace: Trace | None, options: Mapping[str, Any]) -> Any:
        response = await self._sent(method, path, None, **options)
        if trace is not None:
            trace.call = answers.call_id(response.headers)
        return answers.document(response.status_code, response.headers, response.content)

    async def _again(self, once: Callable[[], Awaitable[Any]], *, repeatable: bool) -> Any:
        attempt = 1
        while True:
            try:
                return await once()
            except SllmError as error:
                wait = self._again_in(attempt, error, repeatable=repeatable)
                if wait is None:
                    raise
                await asyncio.sleep(wait)
                attempt += 1

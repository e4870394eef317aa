"""``Client``: a gateway over HTTP, blocking. Raises one exception per wire code. ``AsyncClient`` is its twin."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import httpx

from sllm import answers, transport
from sllm.answers import Observe, Trace
from sllm.async_client import AsyncClient
from sllm.connection import ABREAST, LIMITS, Connection
from sllm.following import CANCEL_S, Following, Losing
from sllm.gateways import Asking
from sllm.sse import Event, Parser
from sllm_runtime.protocol.errors import SllmError, Unavailable

__all__ = ["AsyncClient", "Client"]


class Client(Connection[httpx.Client]):
    """A connection pool to a platform. Use as a context manager, or ``close`` it."""

    @staticmethod
    def _pool(options: Mapping[str, Any], ways: Mapping[str, str | None]) -> httpx.Client:
        wire = partial(httpx.HTTPTransport, verify=options["verify"], limits=LIMITS)
        mounts = {at: wire(proxy=way) if way else None for at, way in ways.items()}
        return httpx.Client(**options, transport=wire(), mounts=mounts)

    @staticmethod
    def _whose() -> int:
        return os.getpid()

    @staticmethod
    def _lives(owner: int) -> bool:
        return owner == os.getpid()

    @staticmethod
    def _gate() -> threading.Semaphore:
        return threading.Semaphore(ABREAST)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Repeatable."""
        self._http.close()

    # --- calls ------------------------------------------------------------------------------------
    def call(
        self, name: str, arguments: Mapping[str, Any], *, version: int | None = None, trace: Trace | None = None
    ) -> Any:
        """Call a function; its whole answer. Sent again only where it certainly did not run."""
        options = self._whole(arguments)
        path, seen = transport.function_path(name, version), trace or Trace()
        with self._own().calls:
            return self._again(lambda: self._once("POST", path, seen, options), repeatable=False)

    def stream(
        self, name: str, arguments: Mapping[str, Any], *, version: int | None = None, trace: Trace | None = None
    ) -> Generator[Any, None, None]:
        """Call a function; its values as they come. Leaving the loop early cancels the call.

        Sent again only where it certainly did not run.
        """
        attempt, trace, body = 1, trace or Trace(), transport.encoded(arguments)
        while True:
            begun = False
            try:
                with closing(self._values(transport.function_path(name, version), body, trace)) as values:
                    for value in values:
                        begun = True
                        yield value
                return
            except SllmError as error:
                wait = None if begun else self._again_in(attempt, error, repeatable=False)
                if wait is None:
                    raise
                time.sleep(wait)
                attempt += 1

    def _values(self, path: str, body: bytes, trace: Trace) -> Generator[Any, None, None]:
        reading = self.events("POST", path, trace=trace, content=body, headers=transport.JSON)
        with closing(self._followed(reading, Following(self._gateways), trace)) as events:
            for event in events:
                found, value = answers.value_of(event, trace)
                if found:
                    yield value

    def _followed(
        self, reading: Generator[Event, None, None], following: Following, trace: Trace
    ) -> Generator[Event, None, None]:
        """The events of ``reading``, also where they come from several gateways, one after the other."""
        try:
            while True:
                try:
                    with closing(reading) as events:
                        for event in events:
                            if following.is_no_end(event):
                                raise answers.problem_of(event)
                            following.seen(event)
                            yield event
                    return
                except SllmError as error:
                    wait = following.broke(error, trace, time.monotonic())
                time.sleep(wait)
                reading = self.events("GET", following.path, trace=trace, headers=following.headers)
        except (GeneratorExit, KeyboardInterrupt):
            if following.call is not None:
                self._cancel(following, trace)
            raise

    def _cancel(self, following: Following, trace: Trace) -> None:
        try:
            self.request("POST", following.cancel, within_s=CANCEL_S)
        except (SllmError, RuntimeError):  # RuntimeError: the client is closed
            trace.cancelled = False

    # --- /api/v1 ----------------------------------------------------------------------------------
    def request(self, method: str, path: str, *, within_s: float | None = None, **options: Any) -> Any:
        """One request of ``/api/v1``; its JSON. What only reads is sent again; nothing is with ``within_s``: so long is
        waited for a gateway that takes it, all of them together, and for its answer. Raises the typed error."""
        if within_s is not None:
            return self._once(method, path, None, {**options, "within_s": within_s})
        with self._own().requests:
            return self._again(lambda: self._once(method, path, None, options), repeatable=method in ("GET", "HEAD"))

    def text(self, path: str, *, within_s: float | None = None) -> str:
        """What stands at ``path``, as it is; ``within_s`` as in ``request``. Raises the typed error."""
        if within_s is not None:
            return self._text(path, within_s=within_s)
        return str(self._again(lambda: self._text(path), repeatable=True))

    def _text(self, path: str, **options: Any) -> str:
        response = self._sent("GET", path, None, **options)
        if not answers.good(response.status_code):
            raise answers.error_from(response.status_code, response.headers, response.content)
        return response.text

    def operation(
        self, path: str, body: Mapping[str, Any], observe: Observe = answers.ignore, *, again_s: float = 0.0
    ) -> str:
        """A long operation (deployment, registration): the JSON of its result; ``observe`` sees its progress.

        ``again_s``: so long it is sent again where its gateway dies or none answers: one whose ``body`` has a name of
        its own is the same then, wherever it is sent to.
        """
        losing = Losing(self._gateways, again_s)
        while True:
            trace, began = Trace(), time.monotonic()
            try:
                return self._result(path, body, observe, trace)
            except SllmError as error:
                wait = losing.wait(error, trace, began, time.monotonic())
            time.sleep(wait)

    def _result(self, path: str, body: Mapping[str, Any], observe: Observe, trace: Trace) -> str:
        with closing(self.events("POST", path, trace=trace, json=dict(body))) as events:
            for event in events:
                result = answers.result_of(event, observe)
                if result is not None:
                    return result
        raise Unavailable(f"{path} ended without a result; ask again")

    def events(
        self, method: str, path: str, *, trace: Trace | None = None, **options: Any
    ) -> Generator[Event, None, None]:
        """The events of one SSE response up to and with its ``[DONE]``. Raises the typed error of a refused request,
        and ``InstanceLost`` where it broke off (an ``error`` event is an end)."""
        trace = trace or Trace()
        trace.broken = False
        options["headers"] = {**transport.SSE, **options.get("headers", {})}
        try:
            with closing(self._sent(method, path, trace, stream=True, **options)) as response:
                trace.call = answers.call_id(response.headers)
                if not answers.good(response.status_code):
                    raise answers.error_from(response.status_code, response.headers, response.read())
                parser = Parser()
                for chunk in response.iter_bytes():
                    for event in parser.feed(chunk):
                        yield event
                        if event.done or event.event == "error":
                            return
        except httpx.HTTPError as error:
            raise answers.broken_off(trace, transport.reason(error)) from error
        raise answers.broken_off(trace)

    def follow(self, path: str, params: Mapping[str, str]) -> Generator[Event, None, None]:
        """As ``events`` of what has no end (logs, what happens): where it breaks off it is read on from the last event
        that came, at another gateway."""
        following, trace = Following(self._gateways, f"{path}?{urlencode(params)}"), Trace()
        reading = self.events("GET", following.path, trace=trace)
        with closing(self._followed(reading, following, trace)) as events:
            yield from events

    def _sent(
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
        options["extensions"] = {"trace": transport.keeps_alive}
        while True:
            request, began = self._http.build_request(method, asking.url, **options, **asking.bounds), time.monotonic()
            try:
                response = self._http.send(request, stream=stream)
            except httpx.HTTPError as error:
                asking.failed(error, trace, time.monotonic() - began)
            else:
                asking.answered(trace)
                return response

    def _once(self, method: str, path: str, trace: Trace | None, options: Mapping[str, Any]) -> Any:
        response = self._sent(method, path, None, **options)
        if trace is not None:
            trace.call = answers.call_id(response.headers)
        return answers.document(response.status_code, response.headers, response.content)

    def _again(self, once: Callable[[], Any], *, repeatable: bool) -> Any:
        attempt = 1
        while True:
            try:
                return once()
            except SllmError as error:
                wait = self._again_in(attempt, error, repeatable=repeatable)
                if wait is None:
                    raise
                time.sleep(wait)
                attempt += 1

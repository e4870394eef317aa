"""A deployed function, by name: ``Function.lookup("chat").stream(prompt="…")``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, asynccontextmanager, closing
from typing import Any

from sllm import transport
from sllm.client import AsyncClient, Client
from sllm_runtime.protocol.errors import VersionNotFound
from sllm_runtime.protocol.http import FunctionView


class Remote:
    """Calls one function (``version`` None: the active one). Holds no connection between calls unless given one."""

    def __init__(self, name: str, *, version: int | None = None, client: Client | None = None) -> None:
        self.name = name
        self.version = version
        self._client = client

    @property
    def aio(self) -> AsyncRemote:
        """The same function for asyncio, on the same platform."""
        return AsyncRemote(self.name, version=self.version, beside=self._client)

    def remote(self, /, **arguments: Any) -> Any:
        """Its whole answer: the value, or the list of what it yielded."""
        if self._client is not None:
            return self._client.call(self.name, arguments, version=self.version)
        with Client() as client:
            return client.call(self.name, arguments, version=self.version)

    def stream(self, /, **arguments: Any) -> Generator[Any, None, None]:
        """Its values as they come. Leaving the loop early cancels the call."""
        if self._client is not None:
            yield from self._client.stream(self.name, arguments, version=self.version)
            return
        with Client() as client, closing(client.stream(self.name, arguments, version=self.version)) as values:
            yield from values


class AsyncRemote:
    """``Remote`` for asyncio. ``beside``: a blocking client whose platform is meant."""

    def __init__(
        self,
        name: str,
        *,
        version: int | None = None,
        client: AsyncClient | None = None,
        beside: Client | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self._client = client
        self._beside = beside

    async def remote(self, /, **arguments: Any) -> Any:
        """As ``Remote.remote``."""
        async with self._connected() as client:
            return await client.call(self.name, arguments, version=self.version)

    async def stream(self, /, **arguments: Any) -> AsyncGenerator[Any, None]:
        """As ``Remote.stream``; wrap it in ``contextlib.aclosing`` to leave the loop early."""
        async with (
            self._connected() as client,
            aclosing(client.stream(self.name, arguments, version=self.version)) as values,
        ):
            async for value in values:
                yield value

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncClient]:
        if self._client is not None:
            yield self._client
            return
        async with AsyncClient(profile=self._beside.profile if self._beside is not None else None) as client:
            yield client


class Function(Remote):
    """A deployed function that was looked up: it exists, and ``view`` says what it is."""

    def __init__(self, view: FunctionView, *, version: int | None = None, client: Client | None = None) -> None:
        super().__init__(view.name, version=version, client=client)
        self.view = view

    @classmethod
    def lookup(cls, name: str, *, version: int | None = None, client: Client | None = None) -> Function:
        """The function deployed as ``name``. Raises ``FunctionNotFound``, ``VersionNotFound``."""
        if client is not None:
            found = client.request("GET", transport.about(name))
        else:
            with Client() as own:
                found = own.request("GET", transport.about(name))
        return cls(_exists(found, version), version=version, client=client)


class AsyncFunction(AsyncRemote):
    """``Function`` for asyncio: ``(await AsyncFunction.lookup("chat")).stream(prompt="…")``."""

    def __init__(self, view: FunctionView, *, version: int | None = None, client: AsyncClient | None = None) -> None:
        super().__init__(view.name, version=version, client=client)
        self.view = view

    @classmethod
    async def lookup(cls, name: str, *, version: int | None = None, client: AsyncClient | None = None) -> AsyncFunction:
        """As ``Function.lookup``."""
        if client is not None:
            found = await client.request("GET", transport.about(name))
        else:
            async with AsyncClient() as own:
                found = await own.request("GET", transport.about(name))
        return cls(_exists(found, version), version=version, client=client)


def _exists(found: Any, version: int | None) -> FunctionView:
    view = FunctionView.model_validate(found)
    there = [each.version for each in view.versions]
    if version is not None and version not in there:
        raise VersionNotFound(f"{view.name} has no version {version}; there: {', '.join(map(str, there)) or 'none'}")
    return view

"""``/api/v1/secrets``: stored, named, deleted. A value goes to the controller and comes from nowhere."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from sllm_gateway.controller import Controller
from sllm_gateway.errors import quoted
from sllm_gateway.routes.api import body_of, shown
from sllm_gateway.settings import GatewaySettings
from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import InvalidArgument, SecretNotFound
from sllm_runtime.protocol.http import API, SecretDeletedView, SecretListView, SecretRequest, SecretView
from sllm_runtime.protocol.node import Ok
from sllm_runtime.protocol.secrets import SECRET_NAME, secret_name


class Secrets:
    """Each one question to the controller."""

    def __init__(self, controller: Controller, settings: GatewaySettings) -> None:
        self._controller = controller
        self._settings = settings

    def routes(self) -> list[BaseRoute]:
        one = f"{API}/secrets/{{name}}"
        return [
            Route(f"{API}/secrets", self.all, methods=["GET"]),
            Route(one, self.put, methods=["PUT"]),
            Route(one, self.delete, methods=["DELETE"]),
        ]

    async def all(self, request: Request) -> Response:
        found = await self._controller.secrets()
        return shown(SecretListView(secrets=tuple(map(_view, found))))

    async def put(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        try:
            secret_name(name)
        except ValueError as error:
            raise InvalidArgument(str(error), field="name") from error
        wanted = await body_of(request, SecretRequest, self._settings.body_timeout)
        stored = await self._controller.ask("put_secret", ctl.PutSecret(name=name, value=wanted.value), ctl.SecretInfo)
        return shown(_view(stored))

    async def delete(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        if not SECRET_NAME.match(name):
            raise SecretNotFound(f"no secret is named {quoted(name)}")
        await self._controller.ask("delete_secret", ctl.SecretRef(name=name), Ok)
        return shown(SecretDeletedView(name=name))


def _view(info: ctl.SecretInfo) -> SecretView:
    return SecretView.model_validate(msgspec.to_builtins(info))

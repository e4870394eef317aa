"""From a described function to a version that has the route."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from sllm import bundle, transport
from sllm.answers import Observe, ignore, of_a_proxy
from sllm.bundle import Bundle
from sllm.client import Client
from sllm.function import ModelFunction
from sllm.transport import Unreached
from sllm_runtime.protocol.errors import InstanceLost, NotFound, SllmError, StoreFull
from sllm_runtime.protocol.http import API, DeployRequest, DeployResult, ProgressView, WithdrawnView
from sllm_runtime.protocol.limits import CONTROLLER_WAIT_S

_PIECE = 256 * 1024
_AGAIN_S: Final = 0.5
WITHDRAW_S: Final = 1.5


def deploy(function: ModelFunction[Any, Any, Any], client: Client, observe: Observe = ignore) -> DeployResult:
    """Bundle, upload (unless the platform has that bundle), deploy; ``observe`` sees each progress.

    Raises ``InvalidBundle``, ``InvalidManifest`` before anything is sent; then whatever the platform answers.
    """
    return deploy_bundle(bundle.build(function), client, observe)


def deploy_bundle(built: Bundle, client: Client, observe: Observe = ignore) -> DeployResult:
    """``deploy`` of what is bundled already."""
    upload(built, client, observe)
    return deploy_stored(built, client, observe)


def deploy_stored(built: Bundle, client: Client, observe: Observe = ignore, request: str | None = None) -> DeployResult:
    """``deploy`` of what is uploaded already. ``request``: 32 random hex digits by which ``withdraw`` undoes it, and by
    which it is the same deployment at every gateway."""
    name, named = built.manifest.name, request or uuid4().hex
    wanted = DeployRequest(manifest=built.manifest, bundle=built.digest, bundle_bytes=len(built.data), request=named)
    try:
        result = client.operation(
            f"{API}/functions", wanted.model_dump(mode="json"), observe, again_s=CONTROLLER_WAIT_S
        )
    except SllmError as error:
        if isinstance(error, InstanceLost | Unreached) or of_a_proxy(error):
            error.message += f"; `sllm fn describe {name}` says whether it is deployed"
            error.args = (error.message,)
        raise
    return DeployResult.model_validate_json(result)


def withdraw(client: Client, request: str) -> WithdrawnView:
    """Undo a deployment that goes on, also one that has not reached the platform yet. Asked for once: who calls it back
    waits for that, for no controller."""
    path = f"{API}/deployments/{transport.segment(request, 'deployment')}"
    return WithdrawnView.model_validate(client.request("DELETE", path, within_s=WITHDRAW_S))


def upload(built: Bundle, client: Client, observe: Observe = ignore) -> bool:
    """Stream the bundle under its digest, which the gateway checks; whether it was not there before."""
    path = f"{API}/bundles/{built.digest.removeprefix('sha256:')}"
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(built.data))}

    def send() -> bool:
        try:
            client.request("HEAD", path)
        except NotFound:
            client.request("PUT", path, content=_Pieces(built.data, observe), headers=headers)
            return True
        return False

    return _patiently(send, observe)


def _patiently(send: Callable[[], bool], observe: Observe) -> bool:
    """What can be sent twice, for as long as the servers of a cluster take to elect a leader of what they store: until
    then they take nothing. And where its gateway dies as it is sent, for as long, as of a deployment."""
    deadline, lost = time.monotonic() + CONTROLLER_WAIT_S, False
    while True:
        try:
            return send()
        except SllmError as error:
            if (isinstance(error, InstanceLost) or of_a_proxy(error)) and not lost:
                deadline, lost = time.monotonic() + CONTROLLER_WAIT_S, True
            silent = isinstance(error, InstanceLost | Unreached) or of_a_proxy(error)
            answered = error.status == 503 and not isinstance(error, StoreFull | Unreached)
            if not (answered or (lost and silent)) or time.monotonic() > deadline:
                raise
            if answered:
                told = f"waits for the platform's store ({error.message})"
                observe(ProgressView(stage="store", message=told))
        time.sleep(_AGAIN_S)


@dataclass(frozen=True)
class _Pieces:
    """The body of an upload; from its beginning each time that it is sent again."""

    data: bytes
    observe: Observe

    def __iter__(self) -> Iterator[bytes]:
        total = len(self.data)
        for start in range(0, total, _PIECE):
            yield self.data[start : start + _PIECE]
            self.observe(ProgressView(stage="upload", done=min(total, start + _PIECE), total=total))

"""From a described function to a version that has the route."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sllm import bundle
from sllm.answers import Observe, ignore
from sllm.bundle import Bundle
from sllm.client import Client
from sllm.function import ModelFunction
from sllm_runtime.protocol.errors import NotFound
from sllm_runtime.protocol.http import API, DeployRequest, DeployResult, ProgressView, WithdrawnView

_PIECE = 256 * 1024


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
    """``deploy`` of what is uploaded already. ``request``: 32 random hex digits by which ``withdraw`` undoes it."""
    wanted = DeployRequest(manifest=built.manifest, bundle=built.digest, bundle_bytes=len(built.data), request=request)
    result = client.operation(f"{API}/functions", wanted.model_dump(mode="json"), observe)
    return DeployResult.model_validate_json(result)


def withdraw(client: Client, request: str) -> WithdrawnView:
    """Undo a deployment that goes on, also one that has not reached the platform yet."""
    return WithdrawnView.model_validate(client.request("DELETE", f"{API}/deployments/{request}"))


def upload(built: Bundle, client: Client, observe: Observe = ignore) -> bool:
    """Stream the bundle under its digest, which the gateway checks; whether it was not there before."""
    path = f"{API}/bundles/{built.digest.removeprefix('sha256:')}"
    try:
        client.request("HEAD", path)
    except NotFound:
        pass
    else:
        return False
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(built.data))}
    client.request("PUT", path, content=_Pieces(built.data, observe), headers=headers)
    return True


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

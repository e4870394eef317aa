"""``/api/v1/secrets`` with a scripted controller: what is stored goes there and is shown to nobody."""

import base64
from typing import Any

import pytest

from sllm_runtime.protocol import ctl
from sllm_runtime.protocol.errors import Conflict
from sllm_runtime.protocol.http import API, SecretRequest
from sllm_runtime.protocol.node import Ok
from tests.fixtures.nats import Nats
from tests.unit.gateway.peer import world

INFO = ctl.SecretInfo(name="token", stored=12.5, functions=("chat",))
SHOWN = {"name": "token", "stored": 12.5, "functions": ["chat"]}


def test_the_lines_that_base64_writes_are_read() -> None:
    value = bytes(range(256))
    assert SecretRequest.model_validate({"value": base64.encodebytes(value).decode()}).value == value


async def test_stored_listed_and_deleted(nats: Nats) -> None:
    asked: list[Any] = []

    async def put(request: ctl.PutSecret) -> ctl.SecretInfo:
        asked.append(request)
        return INFO

    async def pages(request: ctl.Listing) -> ctl.SecretList:
        more = "" if request.after else "token"
        return ctl.SecretList(secrets=(INFO if more else ctl.SecretInfo(name="z", stored=1.0),), next=more)

    async def delete(request: ctl.SecretRef) -> Ok:
        asked.append(request)
        if request.name == "token":
            raise Conflict("secret token is needed by chat")
        return Ok()

    async with world(nats) as w:
        await w.controller.serve("put_secret", ctl.PutSecret, put)
        await w.controller.serve("secrets", ctl.Listing, pages)
        await w.controller.serve("delete_secret", ctl.SecretRef, delete)
        value = base64.b64encode(b"hunter2\xff").decode()
        stored = await w.http.put(f"{API}/secrets/token", json={"value": value})
        listed = await w.http.get(f"{API}/secrets")
        kept = await w.http.delete(f"{API}/secrets/token")
        deleted = await w.http.delete(f"{API}/secrets/z")

    assert (stored.status_code, stored.json()) == (200, SHOWN)
    assert listed.json()["secrets"] == [SHOWN, {"name": "z", "stored": 1.0, "functions": []}]
    assert (kept.status_code, kept.json()["error"]["code"]) == (409, "conflict")
    assert deleted.json() == {"name": "z", "deleted": True}
    assert asked == [
        ctl.PutSecret(name="token", value=b"hunter2\xff"), ctl.SecretRef(name="token"), ctl.SecretRef(name="z")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "body", "status", "code"),
    [
        ("to%20ken", {"value": "eA=="}, 422, "invalid_argument"),
        ("token", {"value": "hunter2 hunter2"}, 400, "invalid_request"),
        ("token", {"value": "my-hunter2-pass_wor!"}, 400, "invalid_request"),
        ("token", {"value": base64.urlsafe_b64encode(b"\xfb\xef\xbe" + b"a key").decode()}, 400, "invalid_request"),
        ("token", {}, 400, "invalid_request"),
    ],
)
async def test_what_is_no_secret_is_refused_and_not_repeated(
    nats: Nats, name: str, body: dict[str, str], status: int, code: str
) -> None:
    async with world(nats) as w:
        answer = await w.http.put(f"{API}/secrets/{name}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "hunter2" not in answer.text

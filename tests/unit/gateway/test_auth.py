"""Which routes want a token."""

import asyncio
from pathlib import Path

import pytest

from sllm_gateway import auth
from sllm_gateway.auth import Auth
from sllm_gateway.settings import GatewaySettings
from sllm_runtime.protocol.errors import InvalidRequest, Unauthorized
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import world


async def test_what_is_open_is_open_in_one_spelling(nats: Nats, tmp_path: Path) -> None:
    """A load balancer that keeps it from its clients knows no other."""
    (tmp_path / "token").write_text("secret\n")
    async with world(nats, token_file=tmp_path / "token") as w:
        for path, status in (("/metrics", 200), ("/metrics?x", 200), ("/%6detrics", 401), ("/metrics/", 401)):
            assert (await w.http.get(f"{w.url}{path}")).status_code == status, path
        for token, status in (("secret", 200), ("another", 401)):
            answer = await w.http.get("/metrics", headers={"authorization": f"Bearer {token}"})
            assert answer.status_code == status, "a load balancer lets any pass"


def test_a_token_is_replaced_while_both_are_good(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("new\n\n old \n")
    auth = Auth(GatewaySettings(token_file=tmp_path / "token").token())

    def shown(token: bytes) -> None:
        auth.check({"raw_path": b"/fn/x", "headers": [(b"authorization", b"Bearer " + token)]})

    for good in (b"new", b"old"):
        shown(good)
    for wrong in (b"", b"new old", b"ne"):
        with pytest.raises(Unauthorized):
            shown(wrong)


async def test_a_token_that_was_taken_out_of_the_file_is_refused_without_a_restart(nats: Nats, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")

    def replaced(text: str) -> None:
        (tmp_path / "next").write_text(text)
        (tmp_path / "next").replace(file)

    async with world(nats, token_file=file) as w:

        async def status(token: str) -> int:
            return (await w.http.get("/v1/models", headers={"authorization": f"Bearer {token}"})).status_code

        async def becomes(token: str, wanted: int) -> None:
            async def so() -> bool:
                return await status(token) == wanted

            await until(so, 10, what=f"{token} is answered with {wanted}")

        assert await status("old") == 200
        replaced("old\nnew\n")
        await becomes("new", 200)
        assert await status("old") == 200
        replaced("new\n")
        await becomes("old", 401)
        for broken in ("", " \n"):  # as of somebody who is just writing it: nobody is let in by it, nor shut out
            replaced(broken)
            await asyncio.sleep(1.1)
            assert (await status("new"), await status("old")) == (200, 401)
        file.unlink()
        await asyncio.sleep(1.1)
        assert (await status("new"), await status("old")) == (200, 401)


def test_a_file_that_cannot_be_read_just_now_is_read_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root puts it there, and gives it to the gateway's user a moment later (or there was no descriptor left): neither
    owner nor rights are of its stamp. What was taken out of it would be let in for ever."""
    monkeypatch.setattr(auth, "LOOKS_S", 0.0)
    file, allowed = tmp_path / "token", True
    file.write_text("old\n")

    def read() -> str:
        if not allowed:
            raise InvalidRequest(f"SLLM_TOKEN_FILE: cannot read {file}: Permission denied")
        return file.read_text()

    checks = Auth(read(), file, read)

    def shown(token: bytes) -> None:
        checks.check({"raw_path": b"/v1/models", "headers": [(b"authorization", b"Bearer " + token)]})

    (tmp_path / "next").write_text("new\n")
    (tmp_path / "next").replace(file)
    allowed = False
    shown(b"old")  # those of before stay
    allowed = True  # chown: the same number, time and size
    shown(b"new")
    with pytest.raises(Unauthorized):
        shown(b"old")

"""A server that says 403 of what it has not: S3 and CloudFront do, to whom may read objects and not list them."""

from pathlib import Path
from typing import Any

import pytest

from sllm_loaderd.convert import convert_directory
from sllm_loaderd.convert.child import bring
from sllm_runtime.protocol.errors import Forbidden, ModelNotFound
from tests.fixtures.loaderd import numbers_model
from tests.fixtures.range_server import RangeServer, range_server
from tests.unit.loaderd.test_origins import store

XML = b"<Error><Code>InvalidRange</Code><ActualObjectSize>0</ActualObjectSize></Error>"


@pytest.mark.parametrize("converted", [False, True])
def test_a_server_that_refuses_what_is_not_there(
    tmp_path: Path, converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers_model(tmp_path / "source")
    served = tmp_path / "served" / "m"
    if converted:
        served.parent.mkdir()
        convert_directory(tmp_path / "source", served)
    else:
        numbers_model(served)
    with store(tmp_path / "store") as models, range_server(tmp_path / "served") as server:
        deny_what_is_missing(server, monkeypatch)
        with models.staging() as staging:
            assert bring(f"{server.url}/m", staging, models.cache, "").digest
        with models.staging() as staging, pytest.raises(Forbidden, match="refused with 403"):
            bring(f"{server.url}/elsewhere", staging, models.cache, "")


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja"])
def test_a_file_that_is_there_and_refused_is_not_left_out(
    tmp_path: Path, name: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was copied with mode 0600, or refused for a moment: without it the model would speak otherwise, unsaid."""
    numbers_model(tmp_path / "served" / "m")
    (tmp_path / "served" / "m" / name).write_text("{}")
    with store(tmp_path / "store") as models, range_server(tmp_path / "served") as server:
        handler = server.RequestHandlerClass
        serve = handler._file  # type: ignore[attr-defined]

        def file(self: Any, *, body: bool, word: str | None) -> None:
            if self.path.endswith(name):
                self.answer(status, b"", {}, body=body)
            else:
                serve(self, body=body, word=word)

        with monkeypatch.context() as refused:
            refused.setattr(handler, "_file", file)
            with models.staging() as staging, pytest.raises(Forbidden, match=f"{name} is refused with {status}"):
                bring(f"{server.url}/m", staging, models.cache, "")
        with models.staging() as staging:
            assert bring(f"{server.url}/m", staging, models.cache, "").digest


def test_a_file_is_not_left_out_where_all_is_refused_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what counts requests, or while rights are renewed: what says that the file may be absent is refused with it.
    But it has said 404 of others before."""
    numbers_model(tmp_path / "served" / "m")
    (tmp_path / "served" / "m" / "generation_config.json").write_text("{}")
    with store(tmp_path / "store") as models, range_server(tmp_path / "served") as server:
        handler, left = server.RequestHandlerClass, [-1]
        serve = handler._file  # type: ignore[attr-defined]

        def file(self: Any, *, body: bool, word: str | None) -> None:
            if self.path.endswith("generation_config.json") and left[0] < 0:
                left[0] = 4
            if left[0] > 0:
                left[0] -= 1
                self.answer(403, b"", {}, body=body)
            else:
                serve(self, body=body, word=word)

        monkeypatch.setattr(handler, "_file", file)
        with models.staging() as staging, pytest.raises(Forbidden, match=r"generation_config.json is refused with 403"):
            bring(f"{server.url}/m", staging, models.cache, "")


@pytest.mark.parametrize("status", [403, 405, 501])
def test_a_server_that_answers_no_head(tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it sends us to is signed for GET, or GET is all that it has."""
    numbers_model(tmp_path / "served" / "m")
    with store(tmp_path / "store") as models, range_server(tmp_path / "served") as server:
        with models.staging() as staging:
            known = bring(f"{server.url}/m", staging, models.cache, "")
        refuses = lambda self: self.answer(status, b"", {}, body=False)  # noqa: E731
        monkeypatch.setattr(server.RequestHandlerClass, "do_HEAD", refuses)
        with models.staging() as staging:
            there = bring(f"{server.url}/m", staging, models.cache, "")
        with models.staging() as staging, pytest.raises(ModelNotFound):
            bring(f"{server.url}/elsewhere", staging, models.cache, "")
    assert (there.digest, there.fingerprint) == (known.digest, known.fingerprint)


@pytest.mark.parametrize("said", [{"Content-Range": "bytes */0"}, {}], ids=["range", "bare"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "length"])
def test_an_empty_file_as_s3_says_it(
    tmp_path: Path, said: dict[str, str], chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3's errors have a body, and come in chunks; RFC 9110 has it that 416 SHOULD say the length, S3's XML does."""
    numbers_model(tmp_path / "served" / "m")
    (tmp_path / "served" / "m" / "merges.txt").write_bytes(b"")
    with store(tmp_path / "store") as models, range_server(tmp_path / "served") as server:
        handler = server.RequestHandlerClass
        get = handler.do_GET  # type: ignore[attr-defined]

        def as_s3(self: Any) -> None:
            if not (self.path.endswith("merges.txt") and self.headers.get("Range")):
                get(self)
            elif not chunked:
                self.answer(416, XML, said, body=True)
            else:
                self.send_response(416)
                for name, value in {**said, "Transfer-Encoding": "chunked"}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(XML), XML))

        monkeypatch.setattr(handler, "do_HEAD", lambda self: self.answer(403, b"", {}, body=False))
        monkeypatch.setattr(handler, "do_GET", as_s3)
        with models.staging() as staging:
            assert bring(f"{server.url}/m", staging, models.cache, "").digest


def deny_what_is_missing(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = server.RequestHandlerClass
    answer = handler.answer  # type: ignore[attr-defined]

    def denied(self: object, status: int, *args: object, **more: object) -> None:
        answer(self, 403 if status == 404 else status, *args, **more)

    monkeypatch.setattr(handler, "answer", denied)

"""``sllm secret``: where a value comes from, and that it is shown nowhere."""

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sllm import secret
from sllm_runtime.protocol.errors import InvalidArgument, SecretNotFound
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.secrets import MAX_SECRET
from tests.fixtures import command
from tests.unit.sdk.gateway import Answer, Gateway

STORED = {"name": "token", "stored": 1.5, "functions": ["chat"]}


def test_a_value_comes_from_stdin_without_its_lines_end(gateway: Gateway) -> None:
    gateway.will(Answer(json=STORED))
    words = [sys.executable, "-m", "sllm", "secret", "set", "token"]
    done = subprocess.run(
        words, input=b"hunter2 \xff\n\r\n", capture_output=True, env=os.environ, timeout=60, check=True
    )
    assert done.stdout == b"token is stored\n"
    assert b"chat: instances that run keep the value" in done.stderr
    method, path, body, _ = gateway.asked[-1]
    assert (method, path) == ("PUT", f"{API}/secrets/token")
    assert base64.b64decode(body["value"]) == b"hunter2 \xff\n"


def test_a_file_is_taken_byte_for_byte(gateway: Gateway, tmp_path: Path) -> None:
    gateway.will(Answer(json=STORED))
    value = tmp_path / "value"
    value.write_bytes(b"x" * MAX_SECRET)
    command.here(dict(os.environ), "secret", "set", "token", "--file", str(value))
    assert base64.b64decode(gateway.asked[-1][2]["value"]) == b"x" * MAX_SECRET


@pytest.mark.parametrize("size", [0, MAX_SECRET + 1, None])
def test_what_cannot_be_a_value_is_not_sent(gateway: Gateway, tmp_path: Path, size: int | None) -> None:
    value = tmp_path / "value"
    if size is not None:
        value.write_bytes(b"x" * size)
    done = command.here(dict(os.environ), "secret", "set", "token", "--file", str(value), expect=2)
    assert ("No such file" if size is None else "nothing was stored") in done.stderr
    for name in ("to ken", "../x"):
        assert "no secret's name" in command.here(dict(os.environ), "secret", "delete", name, expect=2).stderr
    assert gateway.asked == []


def test_names_are_listed(gateway: Gateway) -> None:
    gateway.will(Answer(json={"secrets": [STORED, {"name": "z", "stored": 1.0}]}))
    lines = command.here(dict(os.environ), "secret", "list").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines][-2:] == ["token", "z"]
    assert lines[-2].endswith("\tchat")


def test_a_function_reads_the_value_as_it_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No end of a line of it becomes another; and one that is there, but no text, is not said not to be there."""
    monkeypatch.setenv("SLLM_SECRETS_DIR", str(tmp_path))
    (tmp_path / "key").write_bytes(b"-----BEGIN\r\nabc\r")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert secret("key") == "-----BEGIN\r\nabc\r"
    with pytest.raises(InvalidArgument, match=r"bytes is no text.*\$SLLM_SECRETS_DIR/bytes"):
        secret("bytes")
    with pytest.raises(SecretNotFound, match="no secret 'other'"):
        secret("other")


@pytest.mark.parametrize("directory", [True, False])
def test_who_runs_a_function_here_is_told_where_its_secrets_come_from(
    directory: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It names the secret already: that alone would be no advice."""
    monkeypatch.delenv("SLLM_SECRETS_DIR", raising=False)
    if directory:
        monkeypatch.setenv("SLLM_SECRETS_DIR", str(tmp_path))
    with pytest.raises(SecretNotFound, match=r"`sllm run`.*have a file of that name in .*SLLM_SECRETS_DIR"):
        secret("hf-token")

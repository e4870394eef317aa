"""Secrets as the files that a function reads."""

import os
import stat
from pathlib import Path

import pytest

import sllm
from sllm_runtime.protocol.errors import SecretNotFound
from sllm_runtime.protocol.secrets import SECRETS_DIR, Secrets
from sllm_runtime.worker.secret_files import lay


def test_each_is_a_file_that_only_its_owner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRETS_DIR, "/of/somebody/else")
    lay(Secrets({"token": b"hunter2", "raw": b"\xff\0"}), tmp_path / "secrets")
    assert os.environ[SECRETS_DIR] == str(tmp_path / "secrets")
    assert (tmp_path / "secrets" / "raw").read_bytes() == b"\xff\0"
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "secrets").iterdir()} == {0o400}
    assert sllm.secret("token") == "hunter2"
    for name in ("other", "../secrets/token"):
        with pytest.raises(SecretNotFound, match=r"name it in secrets=\[\.\.\.\]"):
            sllm.secret(name)


def test_without_secrets_there_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRETS_DIR, "/of/somebody/else")
    lay(Secrets(), tmp_path / "secrets")
    assert SECRETS_DIR not in os.environ
    assert not (tmp_path / "secrets").exists()
    with pytest.raises(SecretNotFound, match="SLLM_SECRETS_DIR is not set"):
        sllm.secret("token")

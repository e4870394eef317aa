"""What loaderd takes by default is a half of what the node has, which its control group may limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from sllm_invoker import machine
from sllm_loaderd.daemon.settings import read_settings
from sllm_runtime.platform import control_groups

GIB = 2**30


def test_the_pool_is_half_of_what_the_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    monkeypatch.setattr(control_groups, "groups", lambda: [tmp_path])
    assert machine.memory() == GIB, "as the invoker says it"
    settings = read_settings(["--node", "n1", "--data", str(tmp_path), "--socket", str(tmp_path / "s")])
    assert settings.pool_bytes == GIB // 2

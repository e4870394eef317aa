"""What loaderd takes by default is a half of what the node has, which its control group may limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from sllm_invoker import machine
from sllm_invoker.settings import InvokerSettings
from sllm_loaderd.daemon.settings import LoaderSettings, read_settings
from sllm_runtime.platform import control_groups
from sllm_runtime.protocol.errors import InvalidRequest

GIB = 2**30


def test_the_pool_is_half_of_what_the_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    monkeypatch.setattr(control_groups, "groups", lambda: [tmp_path])
    assert machine.memory() == GIB, "as the invoker says it"
    settings = read_settings(["--node", "n1", "--data", str(tmp_path), "--socket", str(tmp_path / "s")])
    assert settings.pool_bytes == GIB // 2


def test_the_pool_is_half_of_what_the_node_is_said_to_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The invoker offers what the pool leaves of ``SLLM_MEMORY``: half of a larger machine would leave nothing."""
    monkeypatch.setattr(control_groups, "groups", lambda: [])
    monkeypatch.setattr("sllm_loaderd.daemon.settings.memory", lambda: 64 * GIB)
    environment = {"SLLM_MEMORY": "8GiB", "SLLM_NODE": "n1", "SLLM_DATA": str(tmp_path), "SLLM_SOCKET": str(tmp_path)}
    said = InvokerSettings.load(environment | {"SLLM_DATA_DIR": str(tmp_path), "SLLM_LOADERD_SOCKET": str(tmp_path)})
    assert said.memory == 8 * GIB
    assert LoaderSettings.load(environment).pool_bytes == 4 * GIB


def test_a_pool_that_leaves_no_function_any_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No instance would ever be placed there."""
    monkeypatch.setattr("sllm_loaderd.daemon.settings.memory", lambda: 64 * GIB)
    environment = {"SLLM_NODE": "n1", "SLLM_DATA": str(tmp_path), "SLLM_SOCKET": str(tmp_path)}
    for has, pool in (("8GiB", 8 * GIB), ("", 64 * GIB)):
        with pytest.raises(InvalidRequest, match=r"SLLM_POOL_BYTES.*SLLM_MEMORY.*leave no function any"):
            LoaderSettings.load(environment | {"SLLM_MEMORY": has, "SLLM_POOL_BYTES": str(pool)})

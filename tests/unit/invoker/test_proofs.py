"""Proofs are kept for their own version alone, over a restart, within bounds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sllm_invoker.proofs import Proofs
from sllm_runtime.protocol.limits import MAX_PROOF
from sllm_runtime.protocol.records import ModelRecord
from tests.fixtures.invoker import order

MODEL = ModelRecord(digest="sha256:0", uri="/m", nbytes=1000, partitions=(1000,))


def test_a_version_gets_back_what_it_said_and_no_other_does(tmp_path: Path) -> None:
    first = msgspec.structs.replace(order("i1"), model=MODEL)
    proofs = Proofs(tmp_path / "proofs")
    assert proofs.get(first) == ""
    proofs.keep(first, "{1}")
    for kept in (proofs, Proofs(tmp_path / "proofs")):
        assert kept.get(msgspec.structs.replace(first, instance="i2", term=9)) == "{1}"
        for change in ({"function": "other"}, {"version": 7}, {"bundle": "sha256:b"}, {"model": None}):
            assert kept.get(msgspec.structs.replace(first, **change)) == ""


def test_bounds(tmp_path: Path) -> None:
    proofs = Proofs(tmp_path)
    proofs.keep(order("i1"), "x" * (MAX_PROOF + 1))
    proofs.keep(order("i1"), "")
    assert list(tmp_path.iterdir()) == []
    for version in range(300):
        proofs.keep(msgspec.structs.replace(order("i1"), version=version), str(version))
        proofs.get(msgspec.structs.replace(order("i1"), version=0))
    assert len(list(tmp_path.iterdir())) == 256
    assert proofs.get(msgspec.structs.replace(order("i1"), version=0)) == "0", "it was asked for all the time"
    assert proofs.get(msgspec.structs.replace(order("i1"), version=1)) == ""


def test_a_disk_that_refuses_costs_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "proofs").write_text("a file stands where the folder should")
    proofs = Proofs(tmp_path / "proofs")
    proofs.keep(order("i1"), "{1}")
    assert proofs.get(order("i1")) == "{1}"
    assert "cannot be written" in caplog.text

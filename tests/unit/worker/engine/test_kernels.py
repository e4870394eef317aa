"""What kernels make of rows: as exact arithmetic has it, whatever layout, width and dtype; how a process gets them."""

from __future__ import annotations

import hashlib
import logging
import sys
from pathlib import Path

import pytest
import torch

from sllm_runtime.protocol.errors import StartFailed
from sllm_runtime.protocol.worker import KERNELS
from sllm_runtime.worker.engine.ours.kernels import loaded
from sllm_runtime.worker.engine.ours.kernels.loaded import kernels
from sllm_runtime.worker.engine.ours.model.host import HostRmsNorm, silu_gate

WIDTHS = [1, 15, 16, 40, 256]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def rows(count: int, width: int, dtype: torch.dtype = torch.float32, size: float = 3.0) -> torch.Tensor:
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(width)) * size).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = rows(3, width, dtype), rows(1, width)[0]
    wide = x.double()
    wanted = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * (weight + 1)
    found = HostRmsNorm(weight, 1e-3, 1.0)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=NEAR[dtype], atol=NEAR[dtype])
    x[1, 0] = float("nan")
    again = HostRmsNorm(weight, 1e-3, 1.0)(x)
    assert again[1].isnan().all()
    assert torch.equal(again[[0, 2]], found[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_gate(width: int, dtype: torch.dtype) -> None:
    both = rows(5, 2 * width, dtype, size=20)
    both[0, 0], both[1, 0], both[2, 0] = -300, 300, float("nan")
    wide = both.double()
    wanted = torch.nn.functional.silu(wide[:, :width]) * wide[:, width:]
    found = silu_gate(both)
    torch.testing.assert_close(found.double(), wanted, rtol=NEAR[dtype], atol=NEAR[dtype], equal_nan=True)
    turned = silu_gate(both.t().contiguous().t())
    torch.testing.assert_close(turned, found, rtol=0, atol=0, equal_nan=True)


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    """Of all numbers that it has, halved: the square root of one number's square is that number."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = halves[halves.isfinite() & (halves.float().abs() > 1e-15) & (halves.float().abs() < 1e15)].view(-1, 1)
    for weight in (torch.linspace(1, 2, 9)).tolist():
        found = HostRmsNorm(torch.tensor([weight]), 0.0, 0.0)(x)
        assert torch.equal(found, (x.sign().float() * weight).to(torch.bfloat16))


# --- how they come to a process --------------------------------------------------------------------
@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a process looks that has none yet, beside an installation that cannot be written to; compiling gives what
    is here already."""
    here = loaded.target()
    code = loaded.obtained(here)
    (tmp_path / "installation").touch()
    paths = [tmp_path / "installation/k.o", tmp_path / "node/kernels/k.o"]
    monkeypatch.setattr(loaded, "places", lambda target: paths)
    monkeypatch.setattr(loaded, "compiled", lambda: code)
    return paths[1]


def test_what_is_compiled_once_is_found_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loaded.obtained(loaded.target())
    monkeypatch.setattr(loaded, "compiled", lambda: pytest.fail("it was there"))
    assert loaded.obtained(loaded.target()) == first
    assert [each.name for each in place.parent.iterdir()] == [place.name]


def test_another_processor_has_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS, "/node")
    here = loaded.target()
    found = [path for each in (here, here._replace(features="+sse2")) for path in loaded.places(each)]
    assert len(set(found)) == 4
    assert [path.parent for path in found[1::2]] == [Path("/node")] * 2


def test_a_damaged_file_is_compiled_anew(place: Path) -> None:
    first = loaded.obtained(loaded.target())
    content = bytearray(place.read_bytes())
    content[-1] ^= 1
    place.write_bytes(content)
    assert loaded.obtained(loaded.target()) == first
    place.write_bytes(content[:40])
    assert loaded.obtained(loaded.target()) == first
    assert place.read_bytes()[loaded.HEAD :] == first


def test_where_nothing_can_be_kept_it_is_said(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    place.parents[1].touch()
    with caplog.at_level(logging.WARNING):
        assert loaded.obtained(loaded.target())
    assert "cannot be kept in any" in caplog.text


@pytest.mark.slow
def test_compiling_gives_the_same_bytes_again() -> None:
    """Instances go on with each other's calls only where the digest is the same."""
    assert hashlib.sha256(loaded.compiled()).hexdigest() == kernels().digest


def test_what_keeps_them_from_being_compiled_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'No module named numba' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(StartFailed, match="cannot be compiled here: No module named numba"):
        loaded.compiled()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(StartFailed, match="No such file"):
        loaded.compiled()

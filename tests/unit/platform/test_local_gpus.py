"""GPUs of one machine that several nodes are on."""

from __future__ import annotations

from pathlib import Path

import pytest

from sllm_invoker import machine
from sllm_invoker.settings import InvokerSettings
from sllm_loaderd.daemon.settings import LoaderSettings
from tests.unit.platform.test_local import made, options

GPUS = 2


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the NVIDIA driver says of a machine with two."""
    for index in range(GPUS):
        folder = tmp_path / "gpus" / f"0000:0{index}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA L4\n")
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path / "gpus")


def gpus(settings: InvokerSettings) -> list[int]:
    """As an invoker finds them."""
    found = machine.nvidia_gpus() if settings.gpus is None else machine.parse_gpus(settings.gpus)
    return [gpu.index for gpu in found]


@pytest.mark.usefixtures("driver")
def test_no_gpu_is_two_nodes(tmp_path: Path) -> None:
    found = made(options(tmp_path / "run", nodes=2), {"SLLM_CUDA_DEVICES": "all"})
    theirs = [gpus(InvokerSettings.load(found[f"invoker-{name}"].env)) for name in ("n1", "n2")]
    assert sorted(index for each in theirs for index in each) == list(range(GPUS)), f"each believes to have {theirs}"
    served = [LoaderSettings.load(found[f"loaderd-{name}"].env).cuda_devices for name in ("n1", "n2")]
    assert [bool(each) for each in served] == [bool(each) for each in theirs]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    "environment", [{"SLLM_GPUS": "L4:24GiB"}, {"SLLM_GPUS": "L4:24GiB", "SLLM_CUDA_DEVICES": "0"}]
)
def test_what_is_said_each_has(tmp_path: Path, environment: dict[str, str]) -> None:
    """Virtual ones, and parts of one: for tests."""
    found = made(options(tmp_path / "run", nodes=2), environment)
    for name in ("n1", "n2"):
        assert gpus(InvokerSettings.load(found[f"invoker-{name}"].env)) == [0]
        assert LoaderSettings.load(found[f"loaderd-{name}"].env).cuda_devices == environment.get(
            "SLLM_CUDA_DEVICES", ""
        )


@pytest.mark.usefixtures("driver")
def test_one_node_has_all(tmp_path: Path) -> None:
    found = made(options(tmp_path / "run"), {"SLLM_CUDA_DEVICES": "all"})
    assert gpus(InvokerSettings.load(found["invoker-n1"].env)) == list(range(GPUS))
    assert LoaderSettings.load(found["loaderd-n1"].env).cuda_devices == "all"

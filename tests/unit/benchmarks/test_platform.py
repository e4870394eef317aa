"""The benchmarks' view of a real platform, with one deployed function and one burst of streams through it."""

import sys
from pathlib import Path

import pytest

from benchmarks.platform import Platform
from benchmarks.programs import ROOT, Program, ProgramFailed
from benchmarks.streaming import PACED, Generator, _ours
from sllm_runtime.platform.process import start_time


@pytest.mark.slow
def test_deployed_called_loaded_gone(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmarks.generator"]
    with Program(argv, tmp_path / "log", cwd=ROOT) as program, Platform(tmp_path / "p") as platform:
        name = platform.deploy(PACED, keep_alive=0.0)
        answer = platform.stream(name, {"count": 3, "interval": 0.0})
        assert [value.partition("@")[0] for value in answer.values] == ["t0", "t1", "t2"]
        assert 0 < answer.first_ms <= answer.total_ms
        platform.until_cold(name)
        assert platform.pool_idle() == 2
        system = _ours(platform)
        outcome, usage = Generator(program).run(system, system.load(10, 20, 0.0))
        assert (outcome.completed, outcome.tokens) == (10, 200)
        assert usage.cpu_s > 0
        with pytest.raises(ProgramFailed, match="422"):
            platform.stream(name, {"count": "many"})
        pids = [process.pid for process in platform.program.tree()]
    assert [pid for pid in pids if start_time(pid) is not None] == []

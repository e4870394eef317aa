"""When memory is short, and what is available: of the machine and of a control group."""

import asyncio
from pathlib import Path

import pytest

from sllm_invoker import machine, pressure
from tests.fixtures.waiting import until

MIB = 2**20


@pytest.mark.parametrize(
    ("available", "was", "is_short"),
    [(99, False, True), (100, False, False), (150, False, False), (150, True, True), (200, True, False)],
)
def test_it_is_short_from_the_floor_until_twice_as_much(available: int, was: bool, is_short: bool) -> None:
    assert pressure.short(available, 100, was) is is_short


def test_without_a_floor_it_is_never_short() -> None:
    assert not pressure.short(0, 0, False)


async def test_each_change_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "LOOK_S", 0)
    values = iter([500, 90, 150, 90, 250, 500, 10])
    told: list[bool] = []
    watching = asyncio.create_task(pressure.watch(lambda: next(values, 10), 100, told.append))
    await until(lambda: len(told) == 3, what="the last change is told")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert told == [True, False, True]


def test_a_control_group_leaves_what_it_has_not_used_and_what_only_caches(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemFree:   10 kB\nMemAvailable:    8192 kB\n")
    there = ([tmp_path], tmp_path / "meminfo")
    assert machine.available(*there) == 8 * MIB, "no group, no limit"
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{6 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {MIB}\nactive_file {MIB}\nfile 9\n")
    assert machine.available(*there) == 8 * MIB
    (tmp_path / "memory.max").write_text(f"{7 * MIB}\n")
    assert machine.available(*there) == 3 * MIB
    (tmp_path / "memory.max").write_text(f"{64 * MIB}\n")
    assert machine.available(*there) == 8 * MIB, "the machine has no more"


def test_this_machine_has_some() -> None:
    assert 0 < machine.available() <= machine.memory()


def test_each_control_group_that_this_process_is_in_may_have_a_limit(tmp_path: Path) -> None:
    """A unit's is its own (``MemoryMax=``, ``CPUQuota=``); a container sees its own at the root."""
    root, own = tmp_path / "cgroup", tmp_path / "own"
    unit = root / "system.slice" / "sllm.service"
    unit.mkdir(parents=True)
    own.write_text("12:memory:/elsewhere\n0::/system.slice/sllm.service\n")
    groups = machine.groups(root, own)
    assert groups == [unit, root / "system.slice", root]
    (unit / "memory.max").write_text("max\n")
    (unit / "cpu.max").write_text("max 100000\n")
    assert (machine.memory(groups), machine.cores(groups)) == (machine.memory([tmp_path]), machine.cores([tmp_path]))
    (unit / "memory.max").write_text(f"{64 * MIB}\n")
    (root / "system.slice" / "memory.max").write_text(f"{32 * MIB}\n")
    (root / "system.slice" / "cpu.max").write_text("50000 100000\n")
    assert (machine.memory(groups), machine.cores(groups)) == (32 * MIB, 0.5)
    for told in ("0::/\n", "0::/not/there\n", "5:memory:/x\n"):
        own.write_text(told)
        assert machine.groups(root, own)[-1] == root


def test_limits_of_version_1_count_too(tmp_path: Path) -> None:
    """As `docker run --memory 4g --cpus 2` sets them on RHEL 8 or Amazon Linux 2: a node took the whole machine for its
    own, half of it for loaderd's pool, and was killed."""
    root, own, meminfo = tmp_path / "cgroup", tmp_path / "own", tmp_path / "meminfo"
    meminfo.write_text("MemAvailable:    65536 kB\n")
    own.write_text("4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n")
    unit, cpu = root / "memory" / "docker" / "abc", root / "cpu"
    for made in (unit, cpu):
        made.mkdir(parents=True)
    (unit / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (cpu / "cpu.cfs_quota_us").write_text("-1\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    groups = machine.groups(root, own)
    assert groups[-1] == root
    assert (machine.memory(groups), machine.cores(groups)) == (machine.memory([tmp_path]), machine.cores([tmp_path]))
    (unit / "memory.limit_in_bytes").write_text(f"{32 * MIB}\n")
    (unit / "memory.usage_in_bytes").write_text(f"{30 * MIB}\n")
    (unit / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}\n")
    (cpu / "cpu.cfs_quota_us").write_text("50000\n")
    assert (machine.memory(groups), machine.cores(groups)) == (32 * MIB, 0.5)
    assert machine.available(groups, meminfo) == 4 * MIB

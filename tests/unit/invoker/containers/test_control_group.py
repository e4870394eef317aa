"""Which control group is a container's own, and what is written to it, in both versions."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_invoker.containers import control_group
from sllm_invoker.containers.control_group import Controller, Group, located
from sllm_runtime.protocol.errors import Unavailable

ID = "0123456789abcdef" * 4
OTHER = "f" * 64
UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
DIVIDED = """25 22 0:22 / /sys/fs/cgroup rw shared:3 - tmpfs tmpfs rw,mode=755
26 25 0:23 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
27 25 0:24 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory
28 25 0:25 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
V2 = "/sys/fs/cgroup"
MEMORY, CPU = "/sys/fs/cgroup/memory", "/sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("path", "own", "systemd"),
    [
        (f"/libpod_parent/libpod-{ID}", f"/libpod_parent/libpod-{ID}", False),
        (f"/machine.slice/libpod-{ID}.scope/container", f"/machine.slice/libpod-{ID}.scope", True),
        (f"/user.slice/user-1.slice/user@1.service/user.slice/libpod-{ID}.scope/container/deep/deeper",
         f"/user.slice/user-1.slice/user@1.service/user.slice/libpod-{ID}.scope", True),
        (f"/docker/{ID}", f"/docker/{ID}", False),
        (f"/system.slice/docker-{ID}.scope", f"/system.slice/docker-{ID}.scope", True),
    ],
)  # fmt: skip
def test_it_is_the_one_that_bears_the_containers_id(path: str, own: str, systemd: bool) -> None:
    found = Controller(Path(V2 + own), unified=True)
    assert located(ID, f"0::{path}\n", UNIFIED) == Group(found, found, systemd)
    divided = f"9:cpu,cpuacct:{path}\n8:memory:{path}\n7:pids:/other\n0::/\n"
    memory, cpu = Controller(Path(MEMORY + own), unified=False), Controller(Path(CPU + own), unified=False)
    assert located(ID, divided, DIVIDED) == Group(memory, cpu, systemd)


def test_a_machine_may_have_one_controller_in_each_version() -> None:
    path = f"/libpod_parent/libpod-{ID}"
    found = located(ID, f"8:memory:{path}\n0::{path}\n", DIVIDED)
    assert found.memory == Controller(Path(MEMORY + path), unified=False)
    assert found.cpu == Controller(Path("/sys/fs/cgroup/unified" + path), unified=True)


def test_a_part_of_the_tree_may_be_mounted() -> None:
    mounts = UNIFIED.replace(" / /sys", " /docker/outer /sys")
    assert located(ID, f"0::/docker/outer/libpod-{ID}\n", mounts).cpu.directory == Path(f"{V2}/libpod-{ID}")
    with pytest.raises(Unavailable, match="not mounted here"):
        located(ID, f"0::/elsewhere/libpod-{ID}\n", mounts)


@pytest.mark.parametrize(
    "path",
    ["/", "/user.slice", f"/libpod-{OTHER}", f"/../../libpod-{ID}", f"/libpod-{ID}/../libpod-{OTHER}", f"/x{ID}x",
     f"/libpod-{ID}.slice", f"/libpod-conmon-{ID}"],
)  # fmt: skip
def test_nobody_elses_is_taken(path: str) -> None:
    with pytest.raises(Unavailable, match="not container 0123456789ab's own"):
        located(ID, f"0::{path}\n", UNIFIED)


@pytest.mark.parametrize("container", ["", "short", "..", ID.upper(), f"{ID}\n{ID}", "." * 64])
def test_what_is_no_id_is_refused(container: str) -> None:
    with pytest.raises(Unavailable, match="no container's id"):
        located(container, f"0::/libpod-{ID}\n", UNIFIED)


@pytest.mark.parametrize(
    ("groups", "mounts", "says"),
    [("7:pids:/x\n", DIVIDED, "no control group has the controller memory"), (f"0::/{ID}\n", "", "not mounted here")],
)
def test_a_kernel_without_them_is_said_to_be_one(groups: str, mounts: str, says: str) -> None:
    with pytest.raises(Unavailable, match=says):
        located(ID, groups, mounts)


def test_a_process_that_is_gone_has_none(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="control group of process 7 cannot be read"):
        control_group.find(ID, 7, tmp_path)


# --- limits -------------------------------------------------------------------------------------------
def files(directory: Path, **values: str) -> Path:
    directory.mkdir()
    for name, value in values.items():
        (directory / name.replace("__", ".")).write_text(value)
    return directory


def values(directory: Path) -> dict[str, str]:
    """What was written over what stood there: the kernel takes a whole write for a value."""
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_limits_of_version_2(tmp_path: Path) -> None:
    own = Controller(files(tmp_path / "g", memory__max="0", memory__swap__max="1", cpu__max="0"), unified=True)
    Group(own, own, systemd=False).limit(2**30, 1.5)
    assert values(own.directory) == {"memory.max": str(2**30), "memory.swap.max": "0", "cpu.max": "150000 100000"}


def test_limits_of_version_1_where_swap_is_not_counted(tmp_path: Path) -> None:
    memory = Controller(files(tmp_path / "m", memory__limit_in_bytes="0"), unified=False)
    cpu = Controller(files(tmp_path / "c", cpu__cfs_period_us="0", cpu__cfs_quota_us="0"), unified=False)
    Group(memory, cpu, systemd=False).limit(2**30, 0.001)
    assert values(memory.directory) == {"memory.limit_in_bytes": str(2**30)}
    assert values(cpu.directory) == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "1000"}


SIZES = st.integers(1, 2**40)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("group") / "m"
    return files(place, memory__limit_in_bytes="0", memory__memsw__limit_in_bytes="0")


@given(before=SIZES, after=SIZES)
def test_memory_with_swap_is_never_less_than_memory(group: Path, before: int, after: int) -> None:
    """The kernel refuses that in version 1, whatever limit comes after which."""
    (group / "memory.limit_in_bytes").write_text(str(before))
    stands = {"memory.limit_in_bytes": before, "memory.memsw.limit_in_bytes": before}
    for path, value in control_group._memory(Controller(group, unified=False), after):
        stands[path.name] = value
        assert stands["memory.memsw.limit_in_bytes"] >= stands["memory.limit_in_bytes"]
    assert set(stands.values()) == {after}


def test_a_group_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    gone = Controller(tmp_path / "gone", unified=True)
    with pytest.raises(FileNotFoundError):
        Group(gone, gone, systemd=False).limit(2**30, 1.0)
    assert not gone.directory.exists()

"""What the kernel gives: sealed shared memory, huge pages, limits, memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from sllm.doctor.finding import Finding, failure, ok, warning
from sllm_runtime.protocol.quantities import show_bytes

SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUP: Final = Path("/proc/self/cgroup")
_CACHED: Final = re.compile(r"^(?:active|inactive)_file (\d+)$", re.MULTILINE)
_TOTAL: Final = re.compile(r"^total_(?:active|inactive)_file (\d+)$", re.MULTILINE)
_SIZES: Final = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and use, of a group of version 2 and of version 1."""
_QUOTA: Final = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
_F_ADD_SEALS: Final = 1033
_SEALS: Final = 0x01 | 0x02 | 0x04 | 0x10  # SEAL, SHRINK, GROW, FUTURE_WRITE
MIN_FILES: Final = 4096
MIN_MEMORY: Final = 2 * 2**30


def memfd() -> Finding:
    """Whether a writable mapping survives seals that forbid everybody else to write (Linux 5.1)."""
    import fcntl

    try:
        fd = os.memfd_create("sllm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        return failure(
            "memfd seals", f"memfd_create: {error}", "a Linux kernel from 5.1 on, and a seccomp that lets it"
        )
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as mapping:
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            mapping[0] = 1
            try:
                os.pwrite(fd, b"x", 0)
            except PermissionError:
                return ok("memfd seals", "shared weights can be sealed")
    except OSError as error:
        return failure("memfd seals", f"F_ADD_SEALS: {error.strerror}", "a Linux kernel from 5.1 on")
    finally:
        os.close(fd)
    return failure("memfd seals", "a sealed memfd could be written", "a Linux kernel from 5.1 on")


def pidfd() -> Finding:
    """Whether a process can be held by a descriptor (Linux 5.3): nodes see by it that a worker ends."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        remedy = "Linux 5.3, and a sandbox around it that lets this call through: a newer docker or podman"
        return failure("pidfd", f"pidfd_open: {error}", remedy)
    return ok("pidfd", "the end of a process can be waited for")


def huge_pages() -> Finding:
    """Whether shared memory may have 2 MiB pages: reading weights once costs a third (docs/loaderd.md)."""
    try:
        text = SHMEM_ENABLED.read_text()
    except OSError:
        return warning("huge pages", "transparent huge pages are not in this kernel", "weights are read by small pages")
    mode = re.search(r"\[(\w+)\]", text)
    chosen = mode[1] if mode else text.strip()
    if chosen in ("advise", "always", "within_size", "force"):
        return ok("huge pages", f"shmem_enabled={chosen}")
    return warning(
        "huge pages",
        f"shmem_enabled={chosen}: first reads of weights take longer",
        f"echo advise | sudo tee {SHMEM_ENABLED}",
    )


def open_files() -> Finding:
    """Chunks of weights and callers each hold a descriptor; daemons raise the soft limit themselves."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if hard == resource.RLIM_INFINITY or hard >= MIN_FILES:
        return ok("open files", f"soft {soft}, hard {most}")
    remedy = "ulimit -Hn 65536 (LimitNOFILE= in systemd, nofile in /etc/security/limits.conf)"
    return warning("open files", f"hard limit {most}, fewer than {MIN_FILES}", remedy)


def locked_memory(has_gpu: bool) -> Finding:
    """Pinned host memory counts against it where a GPU is loaded from."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = hard == resource.RLIM_INFINITY
    shown = "unlimited" if unlimited else f"soft {show_bytes(soft)}, hard {show_bytes(hard)}"
    if unlimited or not has_gpu:
        return ok("locked memory", shown + ("" if has_gpu else " (matters with a GPU only)"))
    remedy = "ulimit -Hl unlimited (LimitMEMLOCK=infinity in systemd, memlock in /etc/security/limits.conf)"
    return warning("locked memory", shown, remedy)


def memory() -> Finding:
    """What is available now."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = int(found[1]) * 1024 if found else 0
    cpus = float(len(os.sched_getaffinity(0)))
    for group in _groups():
        for names in _SIZES:
            with contextlib.suppress(OSError, ValueError):  # the other version, or there is no limit ("max")
                limit, used = (int((group / name).read_text()) for name in names)
                stat = (group / "memory.stat").read_text()
                cached = sum(map(int, _TOTAL.findall(stat) or _CACHED.findall(stat)))
                available = min(available, max(0, limit - used + cached))
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (group / "cpu.max").read_text().split())
            cpus = min(cpus, quota / period)
        with contextlib.suppress(OSError, ValueError):
            quota, period = (int((group / name).read_text()) for name in _QUOTA)
            cpus = min(cpus, quota / period) if quota > 0 else cpus
    what = f"{show_bytes(available)} available, {cpus:g} CPUs"
    if available < MIN_MEMORY:
        remedy = "end what is not needed, or raise this container's limit; a warm sandbox has torch in memory"
        return warning("memory", what, remedy)
    if cpus < 1:
        return warning("memory", what, "give this container a whole CPU, or functions `cpu` of less than one each")
    return ok("memory", what)


def _groups() -> list[Path]:
    """The control groups of this process and those above them, as its node looks at them."""
    try:
        said = re.findall(r"^\d+:([^:]*):/(.*)$", OWN_GROUP.read_text(), re.MULTILINE)
    except OSError:
        said = []
    paths = {name: path for names, path in said for name in names.split(",")}
    own = [CGROUPS / name / paths[name] for name in ("memory", "cpu") if name in paths and (CGROUPS / name).is_dir()]
    own.append(CGROUPS / paths.get("", ""))
    return [each for group in own for each in (group, *group.parents) if each.is_relative_to(CGROUPS)]


def sandboxes() -> Finding:
    """Whether functions get processes, files and a network of their own; tried as the invoker does it."""
    user = () if os.geteuid() == 0 else ("--user", "--map-current-user", "--keep-caps")
    words = ("unshare", *user, "--pid", "--fork", "--kill-child", "--mount-proc")
    remedy = "run as root, permit user namespaces (sysctl user.max_user_namespaces, AppArmor), or --cap-add SYS_ADMIN"
    if not _runs(*words, "true"):
        what = "no namespaces: functions see the platform's files and reach the network, whatever their manifest says"
        return warning("sandboxes", what, remedy)
    if not _runs(*words, "--net", "true"):
        return warning("sandboxes", "no network namespaces: network=False does not hold functions back", remedy)
    return ok("sandboxes", "processes, files and network of their own")


def _runs(*words: str) -> bool:
    try:
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def on_linux() -> bool:
    return sys.platform == "linux"

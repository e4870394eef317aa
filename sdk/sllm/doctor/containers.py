"""What functions in containers need: an engine, limits by control groups, user namespaces, and names for GPUs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Final

from sllm.doctor import software
from sllm.doctor.finding import Finding, ok, warning
from sllm.doctor.machine import said

ENGINES: Final = ("docker", "podman")
CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUP: Final = Path("/proc/self/cgroup")
SYSCTL: Final = Path("/proc/sys")
SUBUID: Final = Path("/etc/subuid")
SUBGID: Final = Path("/etc/subgid")
CDI: Final = (Path("/etc/cdi"), Path("/var/run/cdi"))
NEEDED: Final = ("cpu", "memory", "pids")
"""Controllers that hold a container to its limits."""
TRIAL: Final = (sys.executable, "-m", "sllm_invoker.containers")
"""Runs a container with all limits of a sandbox, and says by which engine, or why not."""
TRIED_S: Final = 90.0
"""A loaded machine takes seconds to start a container; each engine that hangs is given up by itself."""
_NO_ENGINE: Final = (
    "without one functions run as processes, which isolate nobody, and `image` and `requirements` are refused; "
    "apt install podman, or start docker's daemon and join its group; then SLLM_SANDBOX=auto"
)
_CLONE: Final = "kernel/unprivileged_userns_clone"
_MOST: Final = "user/max_user_namespaces"
_APPARMOR: Final = "kernel/apparmor_restrict_unprivileged_userns"


def engine() -> Finding:
    """A container engine that this user may drive; where a node's software is installed, one that has run a container
    as nodes do."""
    there, reasons = [], []
    for name in ENGINES:
        if shutil.which(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        failed, text = said([name, "version", "--format", "{{.Server.Version}}"])
        if failed:
            reasons.append(f"{name}: {_last_line(text)}")
        else:
            there.append(f"{name} {text}")
    if not there:
        return warning("containers", "; ".join(reasons), _NO_ENGINE)
    found = ", ".join(there)
    if not software.installed("server"):
        return ok("containers", found)
    failed, text = said(list(TRIAL), TRIED_S)
    if failed:
        return warning("containers", f"{found}: {' '.join(text.split())}", _NO_ENGINE)
    return ok("containers", f"{found}; a container was run by {text}")


def _last_line(text: str) -> str:
    return text.splitlines()[-1] if text else "no answer"


def control_groups(user: int) -> Finding:
    """Whether a container of ``user`` can be held to its limits."""
    check = "control groups"
    if not (CGROUPS / "cgroup.controllers").is_file():
        lacking = [name for name in NEEDED if not (CGROUPS / name).is_dir()]
        if lacking:
            remedy = "boot with systemd.unified_cgroup_hierarchy=1, or mount them; containers have no limits without"
            return warning(check, f"not mounted: {', '.join(lacking)}", remedy)
        if user == 0:
            return ok(check, "version 1, as root (podman then needs runc, which is tried)")
        remedy = "boot with systemd.unified_cgroup_hierarchy=1: version 1 lets only root limit a container"
        return warning(check, "version 1", remedy)
    if user == 0:
        return ok(check, "version 2, as root")
    there = _controllers()
    lacking = [name for name in NEEDED if name not in there]
    if not lacking:
        return ok(check, "version 2, delegated")
    remedy = "systemctl edit user@.service: [Service] Delegate=cpu cpuset io memory pids; then log in again"
    return warning(check, f"version 2, not delegated to this user: {', '.join(lacking)}", remedy)


def _controllers() -> frozenset[str]:
    """Those of the group that this process is in."""
    try:
        found = re.search(r"^0::/(.*)$", OWN_GROUP.read_text(), re.MULTILINE)
        return frozenset((CGROUPS / (found[1] if found else "") / "cgroup.controllers").read_text().split())
    except OSError:
        return frozenset()


def user_namespaces(user: int, name: str) -> Finding:
    """Whether an engine without root can give containers users of their own."""
    check = "user namespaces"
    if user == 0:
        return ok(check, "not needed by root's engine: its containers run as nobody")
    if _number(_MOST) == 0:
        return warning(check, "the kernel permits none", "sysctl -w user.max_user_namespaces=15000")
    if _number(_CLONE) == 0:
        return warning(check, "for root alone", "sysctl -w kernel.unprivileged_userns_clone=1")
    if _number(_APPARMOR) == 1:
        remedy = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for the engine"
        return warning(check, "AppArmor keeps them from programs without a profile", remedy)
    if shutil.which("podman") is not None:
        return _of_podman(check, name, str(user))
    return ok(check, "permitted")


def _of_podman(check: str, *names: str) -> Finding:
    """Whether podman may give the user with one of these ``names`` ids of other users."""
    for file, option in ((SUBUID, "subuids"), (SUBGID, "subgids")):
        if _mapped(file).isdisjoint(names):
            return warning(check, f"{file} gives {names[0]} no ids", f"usermod --add-{option} 100000-165535 {names[0]}")
    lacking = [name for name in ("newuidmap", "newgidmap") if shutil.which(name) is None]
    if lacking:
        return warning(check, f"{', '.join(lacking)} not installed: podman maps no ids", "apt install uidmap")
    return ok(check, "permitted")


def _number(path: str) -> int | None:
    try:
        return int((SYSCTL / path).read_text())
    except (OSError, ValueError):
        return None


def _mapped(file: Path) -> frozenset[str]:
    """The users, by name or number, that it gives ids to."""
    try:
        return frozenset(line.partition(":")[0] for line in file.read_text().splitlines())
    except OSError:
        return frozenset()


def gpu_names(has_gpu: bool) -> Finding:
    """Whether podman finds this machine's GPUs by name (CDI)."""
    files = [file for place in CDI if place.is_dir() for file in sorted(place.iterdir())]
    named = [file for file in files if file.suffix in (".yaml", ".yml", ".json") and "nvidia.com/gpu" in _text(file)]
    if named:
        return ok("cdi", str(named[0]))
    if not has_gpu:
        return ok("cdi", "no GPU to name")
    remedy = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml (NVIDIA Container Toolkit)"
    return warning("cdi", "no file names nvidia.com/gpu: containers of podman get no GPU", remedy)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def user_name() -> str:
    """Of the user that this process is, as ``/etc/subuid`` has it."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())

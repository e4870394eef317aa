"""What an engine is told about one container: a record in, words out. Pure, and the only place that knows the words.

Isolation is what a spec without wishes gets: no network, a root that nobody can write to, no capability, no privilege
to be gained, a user that is nobody, limits, and of the host one directory. Nothing secret is among the words.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sllm_runtime.protocol.worker import RENDEZVOUS

Kind = Literal["podman", "docker"]

NODE: Final = "sllm.node"
PLACE: Final = "sllm.place"
BOOT: Final = "sllm.boot"
SANDBOX: Final = "sllm.sandbox"
"""Labels of every container of ours: its node, that node's data directory (nodes of two platforms on one machine may
have one name), which of its lives, and the sandbox's name."""
SHARED_MEMORY: Final = 64 * 2**20
"""Bytes of /dev/shm."""
LOG_KIB: Final = 64
"""Of what a container says before its worker has its pipes; more is cut off."""
_CPU_PERIOD: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class User:
    """Who runs in a container. ``kept``: the invoker's own user, as it is on the host (rootless podman)."""

    uid: int
    gid: int
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The node that made a container, in one of its lives."""

    node: str
    place: str
    boot: str


@dataclass(frozen=True, kw_only=True)
class ContainerSpec:
    """One sandbox's container."""

    name: str
    image: str
    owner: Owner
    rendezvous: Path
    """Directory of this sandbox alone; seen inside as the one that ``RENDEZVOUS`` lies in."""
    user: User
    memory: int
    """Bytes of memory in all, /tmp and /dev/shm among it; no swap beside it."""
    cpu: float
    """Cores."""
    pids: int
    """Processes and threads."""
    tmp: int
    """Bytes of /tmp."""
    files: int
    """Open descriptors of each process."""
    processes: int
    """RLIMIT_NPROC: of the user on this machine, over all its containers."""
    network: bool = False
    cluster: str = ""
    """The container whose network it shares in place of one of its own; its user namespace too, where that is kept."""
    gpus: tuple[int, ...] = ()
    monitor: Path | None = None
    """File in which podman leaves the process id of the container's monitor."""


def run(kind: Kind, spec: ContainerSpec, command: tuple[str, ...]) -> tuple[str, ...]:
    """Start ``spec`` in the background with ``command``."""
    return (
        "run", "--detach", "--pull", "never",
        "--name", spec.name,
        *_labels(spec),
        *_user(spec),
        *_isolation(kind, spec),
        *limits(spec.memory, spec.cpu),
        "--pids-limit", str(spec.pids),
        "--ulimit", f"nofile={spec.files}:{spec.files}",
        "--ulimit", f"nproc={spec.processes}:{spec.processes}",
        "--ulimit", "core=0:0",
        "--log-driver", "json-file", "--log-opt", f"max-size={LOG_KIB}k",
        *_devices(kind, spec.gpus),
        *(("--conmon-pidfile", str(spec.monitor)) if kind == "podman" and spec.monitor is not None else ()),
        spec.image,
        *command,
    )  # fmt: skip


def limits(memory: int, cpu: float) -> tuple[str, ...]:
    """What can be changed while a container runs: ``memory`` bytes without swap, ``cpu`` cores."""
    return ("--memory", str(memory), "--memory-swap", str(memory), "--cpus", f"{max(cpu, _CPU_PERIOD):g}")


def _labels(spec: ContainerSpec) -> tuple[str, ...]:
    owner = spec.owner
    pairs = ((NODE, owner.node), (PLACE, owner.place), (BOOT, owner.boot), (SANDBOX, spec.name))
    return tuple(word for key, value in pairs for word in ("--label", f"{key}={value}"))


def _user(spec: ContainerSpec) -> tuple[str, ...]:
    user = spec.user
    namespace = ("--userns", f"container:{spec.cluster}" if spec.cluster else "keep-id") if user.kept else ()
    return (*namespace, "--user", f"{user.uid}:{user.gid}")


def _isolation(kind: Kind, spec: ContainerSpec) -> tuple[str, ...]:
    return (
        *_network(spec),
        "--read-only",
        # podman would hand on the proxies of whoever runs this node, which may have a password in their addresses.
        *(("--read-only-tmpfs=false", "--no-hosts", "--http-proxy=false") if kind == "podman" else ()),
        "--tmpfs", f"/tmp:rw,nosuid,nodev,size={spec.tmp},mode=1777",
        "--shm-size", str(SHARED_MEMORY),
        "--volume", f"{spec.rendezvous}:{Path(RENDEZVOUS).parent}:ro",
        "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges",
        "--ipc", "private",
    )  # fmt: skip


def _network(spec: ContainerSpec) -> tuple[str, ...]:
    if spec.cluster:  # with the hostname of the other: engines refuse a second one
        return ("--network", f"container:{spec.cluster}")
    return ("--network", "bridge" if spec.network else "none", "--hostname", "sandbox")


def _devices(kind: Kind, gpus: tuple[int, ...]) -> tuple[str, ...]:
    if not gpus:
        return ()
    if kind == "podman":
        return tuple(word for gpu in gpus for word in ("--device", f"nvidia.com/gpu={gpu}"))
    return ("--gpus", f'"device={",".join(map(str, gpus))}"')


def remove(kind: Kind, name: str) -> tuple[str, ...]:
    """Kill and remove a container, at once, and on podman those that share its network: it would refuse else."""
    return ("rm", "--force", *(("--ignore", "--depend", "--time", "0") if kind == "podman" else ()), name)


def runtime(name: str) -> tuple[str, ...]:
    """Ask podman which program runs a container, and by which id: two words."""
    return ("inspect", "--type", "container", "--format", "{{.OCIRuntime}} {{.ID}}", name)


def places(kind: Kind) -> tuple[str, ...]:
    """List all containers of ours, running or not, one a line: name, tab, place."""
    place = f'{{{{index .Labels "{PLACE}"}}}}' if kind == "podman" else f'{{{{.Label "{PLACE}"}}}}'
    return ("ps", "--all", "--filter", f"label={PLACE}", "--format", f"{{{{.Names}}}}\t{place}")

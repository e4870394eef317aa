"""Which engine works on this machine, and how it wants to be called: found by running a container with all our limits,
not by asking what is installed. The container is a program of a hundred bytes in an image of its own.
"""

from __future__ import annotations

import asyncio
import io
import platform
import shutil
import struct
import tarfile
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from sllm_invoker.containers.arguments import ContainerSpec, Kind, Owner
from sllm_invoker.containers.engine import Engine, EngineHangs
from sllm_invoker.containers.user import PROCESSES, user_here
from sllm_runtime.protocol.errors import Unavailable

Wanted = Literal["auto", "podman", "docker"]
KINDS: Final[tuple[Kind, ...]] = ("podman", "docker")
TRIAL: Final = "localhost/sllm-probe:1"
_MEMORY: Final = 64 * 2**20
_RUNC: Final = "--runtime=runc"
_CGROUPFS: Final = "--cgroup-manager=cgroupfs"
_OPTIONS: Final = ((), (_RUNC,), (_CGROUPFS,), (_CGROUPFS, _RUNC))
"""Of podman: as this host is configured; without crun, which takes no mixed control groups; without systemd."""
_EXIT: Final = {
    "x86_64": (62, bytes.fromhex("31ffb83c0000000f05")),
    "aarch64": (183, bytes.fromhex("000080d2a80b80d2010000d4")),
}
"""ELF's number of the machine, and the instructions of ``exit(0)``."""


def program(machine: str) -> bytes:
    """A static program that exits with 0. Raises ``Unavailable`` for a machine that we know no instructions of."""
    if machine not in _EXIT:
        raise Unavailable(f"containers cannot be tried on {machine}; name the engine in SLLM_SANDBOX")
    number, code = _EXIT[machine]
    base, head = 0x400000, 64 + 56
    size = head + len(code)
    elf = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, number, 1, base + head, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    return elf + struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000) + code


def archive(machine: str) -> bytes:
    """The trial's image as a tar file."""
    data = io.BytesIO()
    content = program(machine)
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in ("proc", "sys", "dev", "tmp", "run", "run/sllm", "etc"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        info = tarfile.TarInfo("exit")
        info.size, info.mode = len(content), 0o755
        tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def candidates(wanted: Wanted) -> Iterator[Engine]:
    """Every way to call an engine that is installed here."""
    for kind in KINDS if wanted == "auto" else (wanted,):
        path = shutil.which(kind)
        for options in _OPTIONS if kind == "podman" else ((),):
            if path is not None and (_RUNC not in options or shutil.which("runc")):
                yield Engine(kind, path, options)


async def find(wanted: Wanted = "auto") -> Engine:
    """The first engine that runs a container here. Raises ``Unavailable`` with what each one said."""
    reasons: dict[str, str] = {}
    hang = set()
    for engine in candidates(wanted):
        if engine.program in hang:
            continue  # another option would not help, and as long again be waited for
        try:
            await trial(engine)
        except Unavailable as error:
            if isinstance(error, EngineHangs):
                hang.add(engine.program)
            reasons.setdefault(" ".join((engine.kind, *engine.options)), error.message)
        else:
            return engine
    missing = [kind for kind in KINDS if wanted in ("auto", kind) and shutil.which(kind) is None]
    reasons.update({kind: "not installed" for kind in missing})
    said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise Unavailable(f"no container engine works here ({said})")


async def trial(engine: Engine) -> None:
    """Run one container as sandboxes run. Raises ``Unavailable``."""
    name = f"sllm-probe-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory(prefix="sllm-probe-") as directory:
        spec = ContainerSpec(
            name=name,
            image=TRIAL,
            owner=Owner(node="probe", place=directory, boot=name),
            rendezvous=Path(directory),
            user=user_here(engine),
            memory=_MEMORY,
            cpu=1.0,
            pids=16,
            tmp=_MEMORY,
            files=64,
            processes=PROCESSES // 2,
        )
        if not (await engine.command("images", "--quiet", TRIAL)).strip():
            await engine.command("import", "-", TRIAL, data=archive(platform.machine()))
        try:
            await engine.run(spec, ("/exit",))
            code = await engine.wait(name)
        finally:
            await engine.remove(name)
    if code != 0:
        raise Unavailable(f"`{engine.kind} run` made a container whose program ended with {code}")


def why_not(wanted: Wanted = "auto") -> str | None:
    """Why no engine works here, None where one does. For tools and tests, which have no loop of their own."""
    try:
        asyncio.run(find(wanted))
    except Unavailable as error:
        return error.message
    return None

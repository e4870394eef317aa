"""The compiled kernels in this process, as functions of C.

They lie on disk as an object file for one processor, LLVM and version of the sources. LLVM alone loads it; where there
is none yet, a process of its own makes one, so that none that computes ever has numba in its memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import llvmlite
import llvmlite.binding as llvm

from sllm_runtime.protocol.errors import StartFailed
from sllm_runtime.protocol.worker import KERNELS
from sllm_runtime.worker.engine.ours.kernels.shapes import variants

log = logging.getLogger(__name__)
Kernel = Callable[..., None]
HEAD: Final = hashlib.sha256().digest_size
"""Bytes before an object file's own: their digest."""
_TYPES: Final = {
    "F": ctypes.c_void_p, "H": ctypes.c_void_p, "L": ctypes.c_void_p, "I": ctypes.c_int64, "f": ctypes.c_float,
}  # fmt: skip
_COMPILE_S: Final = 300.0
_ARCH_PRCTL, _ASK_FOR_STATE, _TILES = 158, 0x1023, 18
"""The system call, its ARCH_REQ_XCOMP_PERM, and the number of the tiles' state."""
_SOURCES: Final = ("attention", "build", "common", "dots", "lanes", "products", "rows", "shapes", "tiles")


class Target(NamedTuple):
    """The processor that kernels are compiled for. ``name`` and ``features``: as LLVM has them."""

    name: str
    features: str
    machine: Any
    """llvmlite's ``TargetMachine``."""

    @property
    def tiles(self) -> bool:
        """Whether it multiplies tiles of bfloat16 (AMX)."""
        return {"+amx-tile", "+amx-bf16"} <= set(self.features.split(","))

    @property
    def wide(self) -> bool:
        """Whether a vector is one of its registers (AVX-512)."""
        return "+avx512f" in self.features.split(",")

    @property
    def narrow(self) -> bool:
        """Whether it has registers of 256 bits (AVX2), and nothing for bfloat16: libraries take many times as long for
        its products as for those of float32."""
        return {"+avx2", "+fma"} <= set(self.features.split(",")) and not (self.tiles or self.wide)


class Kernels:
    """Functions of an object file; each takes addresses and numbers (``shapes.KERNELS``), checks none of them, and
    lets other threads run meanwhile. ``digest``: of the file, so of all that decides its bits. ``tiles``: whether
    products may be used here; they are there where the target has them. ``wide``, ``narrow``: as the target has it;
    ``halves`` are there where it is narrow."""

    attend: Kernel
    norm: Kernel
    norm_bfloat16: Kernel
    gate: Kernel
    gate_bfloat16: Kernel
    dots: Kernel
    product: Kernel
    product_to_float32: Kernel
    product_of_float32: Kernel
    halves: Kernel
    halves_to_float32: Kernel
    halves_of_float32: Kernel

    def __init__(self, code: bytes, target: Target) -> None:
        self.digest = hashlib.sha256(code).hexdigest()
        self.tiles = target.tiles and _tiles_permitted()
        self.wide, self.narrow = target.wide, target.narrow
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target.machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        for symbol, (_, arguments) in variants(target.tiles, target.narrow).items():
            kind = ctypes.CFUNCTYPE(None, *(_TYPES[each] for each in arguments.split()))
            setattr(self, symbol, kind(self._engine.get_function_address(symbol)))


@cache
def kernels() -> Kernels:
    """Those for this processor, compiled if they are not there yet. Raises ``StartFailed``."""
    here = target()
    return Kernels(obtained(here), here)


def _tiles_permitted() -> bool:
    """Whether the operating system lets this process use them: it asks Linux, which keeps their state aside for none
    that has not asked. A process inherits it."""
    try:
        asked = ctypes.CDLL(None).syscall
    except AttributeError:
        return False
    return bool(asked(_ARCH_PRCTL, _ASK_FOR_STATE, _TILES) == 0)


def target() -> Target:
    """This processor."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=name, features=features, opt=3, reloc="static", codemodel="jitdefault", jit=True
    )
    return Target(name, features, machine)


def places(here: Target) -> list[Path]:
    """Where the object file may lie: beside Python's byte code of this package, or in the directory of the node's own.
    Its name says what it is made of."""
    sources = Path(__file__).parent
    made_of = hashlib.sha256("\n".join((llvmlite.__version__, here.name, here.features)).encode())
    for each in _SOURCES:
        made_of.update((sources / f"{each}.py").read_bytes())
    directories = [sources / "__pycache__", *map(Path, filter(None, [os.environ.get(KERNELS)]))]
    return [directory / f"kernels-{made_of.hexdigest()[:24]}.o" for directory in directories]


def obtained(here: Target) -> bytes:
    """The object file. Raises ``StartFailed``."""
    paths = places(here)
    found = next(filter(None, map(_read, paths)), None)
    if found is None:
        began = time.perf_counter()
        found = compiled()
        log.warning("the engine's kernels were not compiled for %s yet: %.1f s", here.name, time.perf_counter() - began)
        if not any(_keep(path, found) for path in paths):
            log.warning("they cannot be kept in any of %s: the next start compiles them again", [*map(str, paths)])
    return found


def compiled() -> bytes:
    """A new one. Raises ``StartFailed``."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"{__package__}.build"], stdin=subprocess.DEVNULL, capture_output=True,
            timeout=_COMPILE_S, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise StartFailed(f"the engine's kernels cannot be compiled here: {said:.300}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartFailed(f"the engine's kernels cannot be compiled here: {error}") from error
    return done.stdout


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[HEAD:]
    return code if hashlib.sha256(code).digest() == content[:HEAD] else None


def _keep(path: Path, code: bytes) -> bool:
    """Whether it could be written."""
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(hashlib.sha256(code).digest() + code)
        beside.replace(path)
    except OSError:
        return False
    return True

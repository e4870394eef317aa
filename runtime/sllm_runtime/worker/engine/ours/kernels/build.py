"""Compiles the kernels for this processor. Takes seconds, so it is done once (``loaded``), by ``python -m
sllm_runtime.worker.engine.ours.kernels.build``, which writes an object file to stdout.

numba makes LLVM's intermediate code of each, for the types that it is called with. Of that the bare function is kept,
without what would join it to numba or to Python, behind one of C's; an object file is made of all.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import llvmlite.binding as llvm
from numba import njit, types

from sllm_runtime.worker.engine.ours.kernels import attention, dots, products, rows
from sllm_runtime.worker.engine.ours.kernels.common import OPTIONS
from sllm_runtime.worker.engine.ours.kernels.loaded import target
from sllm_runtime.worker.engine.ours.kernels.shapes import variants

_TYPES: Final = {
    "F": (types.CPointer(types.float32), "ptr"),
    "H": (types.CPointer(types.uint16), "ptr"),
    "L": (types.CPointer(types.int64), "ptr"),
    "I": (types.int64, "i64"),
    "f": (types.float32, "float"),
}
"""Of the letters of ``shapes``: numba's, and LLVM's."""
_FUNCTIONS: Final[dict[str, Any]] = {
    "attend": attention.attend,
    "norm": rows.norm,
    "gate": rows.gate,
    "product": products.product,
    "dots": dots.dots,
    "halves": dots.halves,
}


def compiled() -> bytes:
    """An object file of all kernels."""
    here = target()
    machine = here.machine
    whole = llvm.parse_assembly("")
    for symbol, (name, arguments) in variants(here.tiles, here.narrow).items():
        whole.link_in(_module(symbol, _FUNCTIONS[name], arguments.split(), machine))
    found: bytes = machine.emit_object(whole)
    return found


def _module(symbol: str, function: Any, letters: list[str], machine: Any) -> Any:
    made = njit(types.void(*(_TYPES[each][0] for each in letters)), **OPTIONS)(function)
    (overload,) = made.overloads.values()
    bare = overload.fndesc.llvm_func_name
    module = llvm.parse_assembly(overload.library.get_llvm_str() + _outside(symbol, bare, letters))
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != symbol:
            each.linkage = "internal"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return module


def _outside(symbol: str, bare: str, letters: list[str]) -> str:
    """A function of C's for one of numba's, which has places for a result and an exception that there never are."""
    arguments = ", ".join(f"{_TYPES[each][1]} %{at}" for at, each in enumerate(letters))
    return (
        f"\ndefine void @{symbol}({arguments}) {{\n"
        f'  %none = alloca ptr\n  call i32 @"{bare}"(ptr %none, ptr %none, {arguments})\n  ret void\n}}\n'
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(compiled())

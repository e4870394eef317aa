"""Tiles of bfloat16 for kernels that numba compiles, as processors with AMX have them: eight registers of up to 16 rows
of 64 bytes, and the product of two that is added to a third in float32, pair of inputs after pair.

Imported only where kernels are compiled (``build``), and only used where the processor has them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sllm_runtime.worker.engine.ours.kernels.lanes import FLOATS, LANES, VECTOR, before, narrowed, squares
from sllm_runtime.worker.engine.ours.kernels.shapes import TILE

_BYTE, _INT, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)
_ROW = 4 * TILE
"""Bytes from one row of a tile in memory to the next, where it lies dense."""


def _x86(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _address(builder: Any, pointer: Any, index: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [index]), _BYTE.as_pointer())


def _numbers(*tiles: Any) -> list[Any]:
    return [ir.Constant(_BYTE, each.literal_value) for each in tiles]


@intrinsic
def configure(typing: Any, pointer: Any) -> Any:
    """From now on tiles have the shapes at ``pointer`` (64 bytes, as LDTILECFG has them), until ``release``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _x86(builder, "ldtilecfg", builder.bitcast(args[0], _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.none(pointer), generate


@intrinsic
def release(typing: Any) -> Any:
    """There are no tiles any more."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _x86(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic(prefer_literal=True)
def zero(typing: Any, tile: Any) -> Any:
    """``tile`` = 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _x86(builder, "tilezero", *_numbers(tile))
        return context.get_dummy_value()

    return types.none(tile), generate


@intrinsic(prefer_literal=True)
def load(typing: Any, tile: Any, pointer: Any, index: Any, stride: Any) -> Any:
    """``tile`` = rows from ``pointer[index]`` on, ``stride`` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _x86(builder, "tileloadd64", *_numbers(tile), _address(builder, args[1], args[2]), args[3])
        return context.get_dummy_value()

    return types.none(tile, pointer, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def store(typing: Any, tile: Any, pointer: Any, index: Any) -> Any:
    """``tile`` to ``pointer[index]``, dense."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = _address(builder, args[1], args[2])
        _x86(builder, "tilestored64", *_numbers(tile), into, ir.Constant(_LONG, _ROW))
        return context.get_dummy_value()

    return types.none(tile, pointer, types.int64), generate


@intrinsic(prefer_literal=True)
def multiply(typing: Any, into: Any, matrix: Any, columns: Any) -> Any:
    """``into`` (outputs, rows) += ``matrix`` (outputs, inputs) x ``columns`` (pairs of inputs, rows)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _x86(builder, "tdpbf16ps", *_numbers(into, matrix, columns))
        return context.get_dummy_value()

    return types.none(into, matrix, columns), generate


@intrinsic
def pairs(typing: Any, pointer: Any, index: Any, count: Any) -> Any:
    """``count`` numbers from ``pointer[index]`` on, of bfloat16 or of float32 that is rounded to it; 0 behind them. A
    pair in each lane."""
    if pointer.dtype == types.uint16:
        return VECTOR(pointer, types.int64, types.int64), _read_halves
    return VECTOR(pointer, types.int64, types.int64), _read_floats


def _read_halves(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    source, index, count = args
    return builder.bitcast(_masked(builder, source, index, count, _PAIRS, "v32i16"), FLOATS)


def _read_floats(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    source, index, count = args
    parts = []
    for at in (0, LANES):
        first, left = builder.add(index, ir.Constant(_LONG, at)), builder.sub(count, ir.Constant(_LONG, at))
        parts.append(narrowed(builder, _masked(builder, source, first, left, FLOATS, "v16f32")))
    both = builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(_INT, 2 * LANES), list(range(2 * LANES))))
    return builder.bitcast(both, FLOATS)


def _masked(builder: Any, pointer: Any, index: Any, count: Any, kind: Any, name: str) -> Any:
    source = builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())
    args = [source, _INT(2 if kind is _PAIRS else 4), before(builder, count, kind.count), ir.Constant(kind, None)]
    function = ir.FunctionType(kind, [each.type for each in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.masked.load.{name}.p0"), args)


@intrinsic
def transpose(typing: Any, source: Any, index: Any, into: Any, place: Any) -> Any:
    """``into[place:]`` (LANES, LANES) = ``source[index:]`` (LANES, LANES), columns as rows; of 32 bits each."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [builder.load(each, align=4) for each in _places(builder, args[0], args[1])]
        for size in (1, 2, 4, 8):
            _swap(builder, rows, size)
        for each, row in zip(_places(builder, args[2], args[3]), rows, strict=True):
            builder.store(row, each, align=4)
        return context.get_dummy_value()

    return types.none(source, types.int64, into, types.int64), generate


def _places(builder: Any, pointer: Any, index: Any) -> list[Any]:
    """Of the rows of a dense square."""
    places = [builder.add(index, ir.Constant(_LONG, row * LANES)) for row in range(LANES)]
    return [builder.bitcast(builder.gep(pointer, [each]), FLOATS.as_pointer()) for each in places]


def _swap(builder: Any, rows: list[Any], size: int) -> None:
    """In each square of 2 * ``size``, its upper right quarter with its lower left one."""
    upper, lower = squares(size)
    for row in range(LANES):
        if not row & size:
            both = rows[row], rows[row + size]
            rows[row] = builder.shuffle_vector(*both, upper)
            rows[row + size] = builder.shuffle_vector(*both, lower)

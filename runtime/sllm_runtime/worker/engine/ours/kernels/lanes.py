"""Vectors of float32 for kernels that numba compiles: what one is, and its operations, as LLVM has them.

LLVM makes one register of a vector, two or four, as the processor has them; numbers are the same. What a kernel adds
up in which order therefore stands in its source: nothing is reassociated, and products are fused with sums only where
``fma`` says so. Reading and writing take how many lanes there are of what is left, so that rows of any length will do.

Imported only where kernels are compiled (``build``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

LANES: Final = 16
_FLOAT, _INT, _HALF, _BIT = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(1)
FLOATS, _INTS, _HALVES, _BITS = (ir.VectorType(each, LANES) for each in (_FLOAT, _INT, _HALF, _BIT))
_NAN: Final = 0x7FC0
"""What bfloat16 has for any NaN."""


class _Lanes(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("lanes")


VECTOR = _Lanes()


@register_model(_Lanes)
class _Model(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


def _operator(which: Callable[..., Any], instruction: str) -> None:
    @infer_global(which)
    class Typed(ConcreteTemplate):  # type: ignore[misc]
        cases = (signature(VECTOR, VECTOR, VECTOR),)

    @lower_builtin(which, VECTOR, VECTOR)
    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _which, _instruction in (
    (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv"),
):  # fmt: skip
    _operator(_which, _instruction)


# --- parts of instructions -------------------------------------------------------------------------
def _all(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * LANES)


def _spread(builder: Any, value: Any, lanes: int = LANES) -> Any:
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes))


def before(builder: Any, count: Any, lanes: int = LANES) -> Any:
    """Which of so many ``lanes`` are before ``count``."""
    numbers = ir.Constant(ir.VectorType(_INT, lanes), list(range(lanes)))
    return builder.icmp_signed("<", numbers, _spread(builder, builder.trunc(count, _INT), lanes))


def _at(builder: Any, pointer: Any, index: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())


def _call(builder: Any, name: str, result: Any, args: Any) -> Any:
    kind = ir.FunctionType(result, [each.type for each in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _read(builder: Any, pointer: Any, index: Any, count: Any, kind: Any, name: str) -> Any:
    args = [_at(builder, pointer, index, kind), _INT(2 if kind is _HALVES else 4)]
    return _call(builder, f"llvm.masked.load.{name}.p0", kind, [*args, before(builder, count), _all(kind, 0)])


def _write(builder: Any, value: Any, pointer: Any, index: Any, count: Any, name: str) -> Any:
    kind = value.type
    args = [value, _at(builder, pointer, index, kind), _INT(2 if kind is _HALVES else 4), before(builder, count)]
    return _call(builder, f"llvm.masked.store.{name}.p0", ir.VoidType(), args)


def _widened(builder: Any, halves: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(halves, _INTS), _all(_INTS, 16)), FLOATS)


def narrowed(builder: Any, value: Any) -> Any:
    """To the nearest bfloat16, the even one of two."""
    bits = builder.bitcast(value, _INTS)
    odd = builder.and_(builder.lshr(bits, _all(_INTS, 16)), _all(_INTS, 1))
    near = builder.lshr(builder.add(bits, builder.add(odd, _all(_INTS, 0x7FFF))), _all(_INTS, 16))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), _all(_INTS, _NAN), near), _HALVES)


def squares(size: int) -> tuple[Any, Any]:
    """Of two vectors, what is left above and below each other when lanes ``size`` apart are swapped crosswise."""
    low = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
    high = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
    return ir.Constant(_INTS, low), ir.Constant(_INTS, high)


def _folded(builder: Any, value: Any, join: Callable[[Any, Any], Any]) -> Any:
    """All lanes as one: halves joined, then their halves."""
    count = LANES
    while count > 1:
        count //= 2
        order = ir.Constant(_INTS, [(lane + count) % LANES for lane in range(LANES)])
        value = join(value, builder.shuffle_vector(value, value, order))
    return builder.extract_element(value, _INT(0))


def _larger(builder: Any, first: Any, second: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", first, second), first, second)


# --- what kernels call -----------------------------------------------------------------------------
@intrinsic
def read(typing: Any, pointer: Any, index: Any, count: Any) -> Any:
    """``count`` numbers from ``pointer[index]`` on, of float32 or bfloat16 (pointers to uint16); 0 behind them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, first, number = args
        if pointer.dtype == types.uint16:
            return _widened(builder, _read(builder, source, first, number, _HALVES, "v16i16"))
        return _read(builder, source, first, number, FLOATS, "v16f32")

    return VECTOR(pointer, types.int64, types.int64), generate


@intrinsic
def write(typing: Any, pointer: Any, index: Any, count: Any, value: Any) -> Any:
    """The first ``count`` lanes to where ``read`` reads them; rounded, where that is bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into, first, number, content = args
        if pointer.dtype == types.uint16:
            _write(builder, narrowed(builder, content), into, first, number, "v16i16")
        else:
            _write(builder, content, into, first, number, "v16f32")
        return context.get_dummy_value()

    return types.none(pointer, types.int64, types.int64, VECTOR), generate


@intrinsic
def each(typing: Any, pointer: Any, index: Any) -> Any:
    """``pointer[index]`` (float32) in every lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _spread(builder, builder.load(builder.gep(args[0], [args[1]])))

    return VECTOR(pointer, types.int64), generate


@intrinsic
def fetch(typing: Any, pointer: Any, index: Any) -> Any:
    """Begin to bring what is around ``pointer[index]`` into the cache; nothing need be there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        hints = [_INT(0), _INT(3), _INT(1)]  # to be read, and to stay in all caches; it is data
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [builder.gep(*args[:1], [args[1]]), *hints])
        return context.get_dummy_value()

    return types.none(pointer, types.int64), generate


@intrinsic
def lanes(typing: Any, value: Any) -> Any:
    """``value`` in every lane."""
    return VECTOR(types.float32), lambda context, builder, signature, args: _spread(builder, args[0])


@intrinsic
def rounded(typing: Any, pointer: Any, value: Any) -> Any:
    """What ``read`` would find of each after ``write``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _widened(builder, narrowed(builder, args[1])) if pointer.dtype == types.uint16 else args[1]

    return VECTOR(pointer, VECTOR), generate


@intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.fma.v16f32", FLOATS, args)

    return VECTOR(VECTOR, VECTOR, VECTOR), generate


@intrinsic
def larger(typing: Any, x: Any, y: Any) -> Any:
    """The larger of two; ``y`` where one is NaN."""
    return VECTOR(VECTOR, VECTOR), lambda context, builder, signature, args: _larger(builder, *args)


@intrinsic
def smaller(typing: Any, x: Any, y: Any) -> Any:
    """The smaller of two; ``y`` where one is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return VECTOR(VECTOR, VECTOR), generate


@intrinsic
def between(typing: Any, value: Any, low: Any, high: Any, other: Any) -> Any:
    """``value`` in the lanes [low, high), ``other`` elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, first, end, instead = args
        here = builder.and_(builder.not_(before(builder, first)), before(builder, end))
        return builder.select(here, number, _spread(builder, instead))

    return VECTOR(VECTOR, types.int64, types.int64, types.float32), generate


@intrinsic
def power_of_two(typing: Any, value: Any) -> Any:
    """2 to the low bits of each, read as a whole number: what adding 1.5 * 2^23 leaves of a float (``exp``)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exponent = builder.shl(builder.bitcast(args[0], _INTS), _all(_INTS, 23))
        return builder.bitcast(builder.add(exponent, _all(_INTS, 0x3F800000)), FLOATS)

    return VECTOR(VECTOR), generate


@intrinsic
def total(typing: Any, value: Any) -> Any:
    """The sum of all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _folded(builder, args[0], builder.fadd)

    return types.float32(VECTOR), generate


@intrinsic
def largest(typing: Any, value: Any) -> Any:
    """The largest of all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _folded(builder, args[0], lambda x, y: _larger(builder, x, y))

    return types.float32(VECTOR), generate


@intrinsic(prefer_literal=True)
def paired(typing: Any, first: Any, second: Any, size: Any) -> Any:
    """Sums of the lanes that are ``size`` (1, 2, 4 or 8) apart: of ``first`` in lanes whose number lacks that bit, of
    ``second`` in those that have it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high = squares(size.literal_value)
        x, y = args[0], args[1]
        return builder.fadd(builder.shuffle_vector(x, y, low), builder.shuffle_vector(x, y, high))

    return VECTOR(VECTOR, VECTOR, size), generate


@intrinsic(prefer_literal=True)
def fourth(typing: Any, value: Any, which: Any) -> Any:
    """The four lanes from 4 * ``which`` on, as the first ones."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        order = [(lane + 4 * which.literal_value) % LANES for lane in range(LANES)]
        return builder.shuffle_vector(args[0], args[0], ir.Constant(_INTS, order))

    return VECTOR(VECTOR, which), generate

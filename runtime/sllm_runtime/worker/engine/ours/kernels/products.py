"""Products of rows with a matrix of bfloat16 that lies as it was stored, by tiles (``tiles``).

A tile of the matrix has 16 outputs, 32 inputs; a tile of rows, whose columns they are, has 32 inputs of 16 rows. Inputs
are added from the first to the last, two at a time, whatever stands beside a row or an output.
"""

from __future__ import annotations

from typing import Any, Final

from numba import njit

from sllm_runtime.worker.engine.ours.kernels import tiles
from sllm_runtime.worker.engine.ours.kernels.common import OPTIONS
from sllm_runtime.worker.engine.ours.kernels.lanes import LANES, read, rounded, write
from sllm_runtime.worker.engine.ours.kernels.shapes import COLUMNS, DEEP, TILE

_SQUARE: Final = TILE * TILE
"""Numbers of 32 bits of a tile."""
_DENSE: Final = 4 * TILE
"""Bytes of one row of a tile that lies dense."""
_TURNED: Final = 4 * _SQUARE
_ENDS: Final = 5 * _SQUARE
"""Where ``scratch`` has a result with rows as rows, and the ends of the matrix' rows; its begin has results."""


@njit(**OPTIONS)
def _pack(x: Any, rows: Any, inputs: Any, scratch: Any) -> None:
    """Rows as tiles, from ``scratch[COLUMNS:]`` on: those of 16 rows behind one another, zeros where there is none."""
    into = COLUMNS
    for first in range(0, rows, TILE):
        for at in range(0, inputs, DEEP):
            for row in range(first, first + TILE):
                count = min(inputs - at, DEEP) if row < rows else 0
                write(scratch, (row - first) * TILE, LANES, tiles.pairs(x, row * inputs + at, count))
            tiles.transpose(scratch, 0, scratch, into)
            into += _SQUARE


@njit(**OPTIONS)
def _end(weight: Any, at: Any, inputs: Any, high: Any, scratch: Any, into: Any) -> None:
    """The last inputs of ``high`` outputs from ``weight[at:]`` on, with zeros behind them, as a dense tile."""
    left = inputs % DEEP
    for row in range(high):
        write(scratch, into + row * TILE, LANES, tiles.pairs(weight, at + row * inputs + inputs - left, left))


@njit(**OPTIONS)
def _add(matrix: Any, first: Any, second: Any, stride: Any, scratch: Any, columns: Any) -> None:
    """To results 0 and 1 two tiles of outputs (which stay in 4 and 5) times one of rows."""
    tiles.load(6, scratch, columns, _DENSE)
    tiles.load(4, matrix, first, stride)
    tiles.multiply(0, 4, 6)
    tiles.load(5, matrix, second, stride)
    tiles.multiply(1, 5, 6)


@njit(**OPTIONS)
def _add_others(scratch: Any, columns: Any) -> None:
    """To results 2 and 3 the same two times another one of rows."""
    tiles.load(7, scratch, columns, _DENSE)
    tiles.multiply(2, 4, 7)
    tiles.multiply(3, 5, 7)


@njit(**OPTIONS)
def _two(weight: Any, first: Any, second: Any, inputs: Any, scratch: Any, columns: Any) -> None:
    """Two tiles of outputs for one of rows: results 0 and 1."""
    tiles.zero(0)
    tiles.zero(1)
    whole = inputs // DEEP * DEEP
    for at in range(0, whole, DEEP):
        _add(weight, first + at, second + at, 2 * inputs, scratch, columns)
        columns += _SQUARE
    if whole < inputs:
        _add(scratch, _ENDS, _ENDS + _SQUARE, _DENSE, scratch, columns)


@njit(**OPTIONS)
def _four(weight: Any, first: Any, second: Any, inputs: Any, scratch: Any, columns: Any, others: Any) -> None:
    """Two tiles of outputs for two of rows: results 0 and 1, 2 and 3."""
    tiles.zero(0)
    tiles.zero(1)
    tiles.zero(2)
    tiles.zero(3)
    whole = inputs // DEEP * DEEP
    for at in range(0, whole, DEEP):
        _add(weight, first + at, second + at, 2 * inputs, scratch, columns)
        _add_others(scratch, others)
        columns += _SQUARE
        others += _SQUARE
    if whole < inputs:
        _add(scratch, _ENDS, _ENDS + _SQUARE, _DENSE, scratch, columns)
        _add_others(scratch, others)


@njit(**OPTIONS)
def _give(
    scratch: Any, result: Any, count: Any, high: Any, residual: Any, added: Any, out: Any, at: Any, across: Any
) -> None:
    """``count`` rows of ``high`` outputs of a result to ``out[at:]``, ``across`` numbers apart."""
    tiles.transpose(scratch, result * _SQUARE, scratch, _TURNED)
    for row in range(count):
        found = read(scratch, _TURNED + row * TILE, LANES)
        place = at + row * across
        if added:
            found = read(residual, place, high) + rounded(out, found)
        write(out, place, high, found)


def product(
    x: Any, rows: Any, inputs: Any, weight: Any, outputs: Any, residual: Any, added: Any, out: Any, across: Any,
    shapes: Any, scratch: Any,
) -> None:  # fmt: skip
    """``out`` = ``x`` (rows, inputs) x ``weight`` (outputs, inputs) transposed, and ``residual``, where that is
    ``added``; rows of both are ``across`` numbers apart.

    ``shapes``: of tiles with as many rows as there are outputs, TILE at most. ``scratch`` is written to: COLUMNS
    numbers and as many as the rows have in whole tiles (``shapes.scratch``).
    """
    tiles.configure(shapes)
    _pack(x, rows, inputs, scratch)
    high = min(outputs, TILE)
    deep = (inputs + DEEP - 1) // DEEP * _SQUARE
    for output in range(0, outputs, 2 * TILE):
        # The last ones are computed again with those before them: all tiles have the same shape.
        one, two = min(output, outputs - high), min(output + TILE, outputs - high)
        if inputs % DEEP:
            _end(weight, one * inputs, inputs, high, scratch, _ENDS)
            _end(weight, two * inputs, inputs, high, scratch, _ENDS + _SQUARE)
        for row in range(0, rows, 2 * TILE):
            columns, left = COLUMNS + row // TILE * deep, rows - row
            if left > TILE:
                _four(weight, one * inputs, two * inputs, inputs, scratch, columns, columns + deep)
                tiles.store(2, scratch, 2 * _SQUARE)
                tiles.store(3, scratch, 3 * _SQUARE)
            else:
                _two(weight, one * inputs, two * inputs, inputs, scratch, columns)
            tiles.store(0, scratch, 0)
            tiles.store(1, scratch, _SQUARE)
            for result in range(4 if left > TILE else 2):
                below = result // 2 * TILE
                at = (row + below) * across + (two if result % 2 else one)
                _give(scratch, result, min(left - below, TILE), high, residual, added, out, at, across)
    tiles.release()

"""Products of rows with a matrix that lies as it was stored, four rows with four outputs at a time.

Each of the sixteen results is a vector of sums, input after input by lanes; then lanes are added up in pairs, in one
order for all. So a result has the same bits whatever stands beside its row or its output. All is added up in float32;
of bfloat16 rows are widened once, and the matrix as it is read.
"""

from __future__ import annotations

from typing import Any, Final

from numba import njit

from sllm_runtime.worker.engine.ours.kernels.common import OPTIONS, ZERO
from sllm_runtime.worker.engine.ours.kernels.lanes import (
    LANES,
    fetch,
    fma,
    fourth,
    lanes,
    paired,
    read,
    rounded,
    write,
)
from sllm_runtime.worker.engine.ours.kernels.shapes import NEAR, SIDE

_FEW: Final = 2
"""Rows that are computed one by one."""
_AHEAD: Final = 2048
"""Weights between those that are read and those that are fetched: two pages of memory, which the processor's own
fetching does not cross."""


@njit(**OPTIONS)
def _four(x: Any, y: Any, z: Any, u: Any, w: Any, sums: Any) -> Any:
    """What four rows' inputs add to their ``sums`` with one output's weights ``w``."""
    return fma(x, w, sums[0]), fma(y, w, sums[1]), fma(z, w, sums[2]), fma(u, w, sums[3])


@njit(**OPTIONS)
def _row(sums: Any, others: Any, more: Any, rest: Any, row: Any) -> Any:
    """Of a row and each of four outputs' sums, four lanes in turn, lanes already added up in fours."""
    return paired(paired(sums[row], others[row], 1), paired(more[row], rest[row], 1), 2)


@njit(**OPTIONS)
def _square(x: Any, a: Any, b: Any, c: Any, d: Any, weight: Any, at: Any, inputs: Any, ahead: Any) -> Any:
    """Rows at ``x[a:]``, ``x[b:]``, ``x[c:]``, ``x[d:]`` with four outputs from ``weight[at:]`` on: a row's results
    behind one another. Meanwhile the weights that are ``ahead`` of these are fetched."""
    none = lanes(ZERO)
    p = q = r = s = (none, none, none, none)
    whole = inputs // LANES * LANES
    second, third, last = at + inputs, at + 2 * inputs, at + 3 * inputs
    for n in range(0, whole, LANES):
        f, g, h, i = read(x, a + n, LANES), read(x, b + n, LANES), read(x, c + n, LANES), read(x, d + n, LANES)
        fetch(weight, at + n + ahead)
        p = _four(f, g, h, i, read(weight, at + n, LANES), p)
        fetch(weight, second + n + ahead)
        q = _four(f, g, h, i, read(weight, second + n, LANES), q)
        fetch(weight, third + n + ahead)
        r = _four(f, g, h, i, read(weight, third + n, LANES), r)
        fetch(weight, last + n + ahead)
        s = _four(f, g, h, i, read(weight, last + n, LANES), s)
    if whole < inputs:
        n, left = whole, inputs - whole
        f, g, h, i = read(x, a + n, left), read(x, b + n, left), read(x, c + n, left), read(x, d + n, left)
        p = _four(f, g, h, i, read(weight, at + n, left), p)
        q = _four(f, g, h, i, read(weight, second + n, left), q)
        r = _four(f, g, h, i, read(weight, third + n, left), r)
        s = _four(f, g, h, i, read(weight, last + n, left), s)
    upper = paired(_row(p, q, r, s, 0), _row(p, q, r, s, 1), 4)
    return paired(upper, paired(_row(p, q, r, s, 2), _row(p, q, r, s, 3), 4), 8)


@njit(**OPTIONS)
def _line(x: Any, a: Any, weight: Any, at: Any, inputs: Any, ahead: Any) -> Any:
    """The same of one row, its four results in the first lanes."""
    none = lanes(ZERO)
    p = q = r = s = none
    whole = inputs // LANES * LANES
    second, third, last = at + inputs, at + 2 * inputs, at + 3 * inputs
    for n in range(0, whole, LANES):
        f = read(x, a + n, LANES)
        fetch(weight, at + n + ahead)
        p = fma(f, read(weight, at + n, LANES), p)
        fetch(weight, second + n + ahead)
        q = fma(f, read(weight, second + n, LANES), q)
        fetch(weight, third + n + ahead)
        r = fma(f, read(weight, third + n, LANES), r)
        fetch(weight, last + n + ahead)
        s = fma(f, read(weight, last + n, LANES), s)
    if whole < inputs:
        n, left = whole, inputs - whole
        f = read(x, a + n, left)
        p, q = fma(f, read(weight, at + n, left), p), fma(f, read(weight, second + n, left), q)
        r, s = fma(f, read(weight, third + n, left), r), fma(f, read(weight, last + n, left), s)
    row = paired(paired(p, q, 1), paired(r, s, 1), 2)
    upper = paired(row, row, 4)
    return paired(upper, upper, 8)


@njit(**OPTIONS)
def _give(found: Any, residual: Any, added: Any, out: Any, at: Any) -> None:
    """A row's four results to ``out[at:]``."""
    if added:
        found = rounded(out, found) + read(residual, at, SIDE)
    write(out, at, SIDE, found)


@njit(**OPTIONS)
def _one_by_one(
    x: Any, rows: Any, inputs: Any, weight: Any, outputs: Any, residual: Any, added: Any, out: Any, across: Any
) -> None:
    """``dots`` of few rows, which would be computed again for those that are not there."""
    for output in range(0, outputs, SIDE):
        at, ahead = min(output, outputs - SIDE), _AHEAD
        for row in range(rows):
            _give(_line(x, row * inputs, weight, at * inputs, inputs, ahead), residual, added, out, row * across + at)
            ahead = 0


@njit(**OPTIONS)
def _near(
    x: Any,
    first: Any,
    low: Any,
    high: Any,
    inputs: Any,
    weight: Any,
    outputs: Any,
    residual: Any,
    added: Any,
    out: Any,
    across: Any,
) -> None:
    """``dots`` of the rows from ``low`` to ``high``; ``x`` begins with row ``first``."""
    for output in range(0, outputs, SIDE):
        # The last ones are computed again with those before them.
        at = min(output, outputs - SIDE)
        ahead = 0 if low else _AHEAD  # later ones find them in the cache
        for row in range(low, high, SIDE):
            # A row that is not there is the last one again.
            a, b, c, d = row, min(row + 1, high - 1), min(row + 2, high - 1), min(row + 3, high - 1)
            e, f, g, h = (a - first) * inputs, (b - first) * inputs, (c - first) * inputs, (d - first) * inputs
            found = _square(x, e, f, g, h, weight, at * inputs, inputs, ahead)
            ahead = 0
            _give(fourth(found, 0), residual, added, out, a * across + at)
            _give(fourth(found, 1), residual, added, out, b * across + at)
            _give(fourth(found, 2), residual, added, out, c * across + at)
            _give(fourth(found, 3), residual, added, out, d * across + at)


def dots(
    x: Any, rows: Any, inputs: Any, weight: Any, outputs: Any, residual: Any, added: Any, out: Any, across: Any
) -> None:
    """``out`` = ``x`` (rows, inputs) x ``weight`` (outputs, inputs) transposed, and ``residual``, where that is
    ``added``; rows of both are ``across`` numbers apart. Four outputs or more. ``residual`` is not ``out``: some
    results are written twice."""
    if rows <= _FEW:  # as in most steps
        _one_by_one(x, rows, inputs, weight, outputs, residual, added, out, across)
        return
    for low in range(0, rows, NEAR):
        _near(x, 0, low, min(low + NEAR, rows), inputs, weight, outputs, residual, added, out, across)


@njit(**OPTIONS)
def _widen(x: Any, at: Any, count: Any, weight: Any, scratch: Any) -> None:
    """``count`` numbers from ``x[at:]`` on, rounded to the type of ``weight``, as float32."""
    for n in range(0, count, LANES):
        left = min(LANES, count - n)
        write(scratch, n, left, rounded(weight, read(x, at + n, left)))


def halves(
    x: Any,
    rows: Any,
    inputs: Any,
    weight: Any,
    outputs: Any,
    residual: Any,
    added: Any,
    out: Any,
    across: Any,
    scratch: Any,
) -> None:
    """``dots`` with a matrix of bfloat16, of which type ``x`` is too, or is rounded to; ``scratch`` has room for NEAR
    rows."""
    if rows <= _FEW:
        _widen(x, 0, rows * inputs, weight, scratch)
        _one_by_one(scratch, rows, inputs, weight, outputs, residual, added, out, across)
        return
    for low in range(0, rows, NEAR):
        high = min(low + NEAR, rows)
        _widen(x, low * inputs, (high - low) * inputs, weight, scratch)
        _near(scratch, low, low, high, inputs, weight, outputs, residual, added, out, across)

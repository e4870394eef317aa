"""Attention over pages, the same arithmetic for a decode row and for any row of a prefill.

A row goes through its pages in order and keeps maximum, sum and result of each of its heads (online softmax). There is
no split over the pages, so a row's bits follow from its query, its position and the K and V of its places alone: pages
that are left out would change none, since their weights would be 0 and what is summed would be multiplied by 1.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from sllm_runtime.worker.engine.ours.kernels.common import ONE, OPTIONS, ZERO, exp
from sllm_runtime.worker.engine.ours.kernels.lanes import (
    LANES,
    between,
    each,
    fma,
    lanes,
    larger,
    largest,
    read,
    total,
    write,
)
from sllm_runtime.worker.engine.ours.kernels.shapes import BLOCK
from sllm_runtime.worker.engine.ours.pages import PAGE

_INF: Final = np.float32(np.inf)
_TWO: Final = np.float32(2)
_WIDE: Final = 4 * LANES
"""Places whose scores are computed together."""
_DEEP: Final = 8
"""Places whose parts of a result are computed together, each its own sum."""


@njit(**OPTIONS)
def _turn(qkv: Any, at: Any, half: Any, cos: Any, sin: Any, wave: Any) -> None:
    """The first 2 * ``half`` numbers of the head ``qkv[at:]``, by those of ``cos[wave:]`` and ``sin[wave:]``."""
    for number in range(0, half, LANES):
        left = half - number
        x, y = read(qkv, at + number, left), read(qkv, at + half + number, left)
        here = wave + number
        write(qkv, at + number, left, fma(y, read(sin, here, left), x * read(cos, here, left)))
        here += half
        write(qkv, at + half + number, left, fma(x, read(sin, here, left), y * read(cos, here, left)))


@njit(**OPTIONS)
def _keep(qkv: Any, at: Any, kv: Any, width: Any, page: Any, place: Any, k: Any, v: Any) -> None:
    """K and V of a row, ``qkv[at:]``, into its page."""
    for head in range(kv):
        into = (page * kv + head) * width * PAGE
        for number in range(width):
            k[into + number * PAGE + place] = qkv[at + head * width + number]
            v[into + place * width + number] = qkv[at + (kv + head) * width + number]


@njit(**OPTIONS)
def _score(q: Any, at: Any, width: Any, k: Any, page: Any, places: Any, scale: Any, scores: Any) -> None:
    """``scores[:places]`` of the query ``q[at:]`` (width) with the keys ``k[page:]`` (width, PAGE), even numbers and
    odd ones summed apart: a sum must wait for the one before."""
    for place in range(0, places, _WIDE):
        a = b = c = d = e = f = g = h = lanes(ZERO)
        key = page + place
        for number in range(at, at + width - 1, 2):
            x, y = each(q, number), each(q, number + 1)
            a = fma(x, read(k, key, LANES), a)
            b = fma(x, read(k, key + LANES, LANES), b)
            c = fma(x, read(k, key + 2 * LANES, LANES), c)
            d = fma(x, read(k, key + 3 * LANES, LANES), d)
            key += PAGE
            e = fma(y, read(k, key, LANES), e)
            f = fma(y, read(k, key + LANES, LANES), f)
            g = fma(y, read(k, key + 2 * LANES, LANES), g)
            h = fma(y, read(k, key + 3 * LANES, LANES), h)
            key += PAGE
        if width % 2:
            x = each(q, at + width - 1)
            a = fma(x, read(k, key, LANES), a)
            b = fma(x, read(k, key + LANES, LANES), b)
            c = fma(x, read(k, key + 2 * LANES, LANES), c)
            d = fma(x, read(k, key + 3 * LANES, LANES), d)
        write(scores, place, LANES, (a + e) * lanes(scale))
        write(scores, place + LANES, LANES, (b + f) * lanes(scale))
        write(scores, place + 2 * LANES, LANES, (c + g) * lanes(scale))
        write(scores, place + 3 * LANES, LANES, (d + h) * lanes(scale))


@njit(**OPTIONS)
def _bend(scores: Any, places: Any, cap: Any) -> None:
    """Each score below ``cap``: cap * tanh(score / cap), where tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    for place in range(0, places, LANES):
        part = read(scores, place, LANES) / lanes(cap)
        bent = lanes(ONE) - lanes(_TWO) / (exp(part * lanes(_TWO)) + lanes(ONE))
        write(scores, place, LANES, bent * lanes(cap))


@njit(**OPTIONS)
def _soften(scores: Any, low: Any, high: Any, places: Any, state: Any, at: Any) -> Any:
    """Weights in place of the scores, 0 but for the places [low, high). ``state[at:]``: the largest score and the sum
    of weights so far; returns what the result so far is to be multiplied by."""
    top = lanes(-_INF)
    for place in range(0, places, LANES):
        top = larger(between(read(scores, place, LANES), low - place, high - place, -_INF), top)
    before = state[at]
    most = largest(larger(lanes(before), top))
    added = lanes(ZERO)
    for place in range(0, places, LANES):
        weights = exp(read(scores, place, LANES) - lanes(most))
        weights = between(weights, low - place, high - place, ZERO)
        write(scores, place, LANES, weights)
        added = added + weights
    factor = largest(exp(lanes(before - most)))
    state[at] = most
    state[at + 1] = state[at + 1] * factor + total(added)
    return factor


@njit(**OPTIONS)
def _weigh(
    weights: Any, places: Any, v: Any, page: Any, width: Any, factor: Any, seen: Any, at: Any, count: Any
) -> None:
    """``count`` numbers of a result, ``seen[at:]``, times ``factor``, and what the values ``v[page:]`` (PAGE, width)
    add."""
    a = b = c = d = e = f = g = h = lanes(ZERO)
    for place in range(0, places, _DEEP):
        a = fma(each(weights, place), read(v, page, count), a)
        b = fma(each(weights, place + 1), read(v, page + width, count), b)
        c = fma(each(weights, place + 2), read(v, page + 2 * width, count), c)
        d = fma(each(weights, place + 3), read(v, page + 3 * width, count), d)
        e = fma(each(weights, place + 4), read(v, page + 4 * width, count), e)
        f = fma(each(weights, place + 5), read(v, page + 5 * width, count), f)
        g = fma(each(weights, place + 6), read(v, page + 6 * width, count), g)
        h = fma(each(weights, place + 7), read(v, page + 7 * width, count), h)
        page += _DEEP * width
    added = ((a + b) + (c + d)) + ((e + f) + (g + h))
    write(seen, at, count, fma(read(seen, at, count), lanes(factor), added))


@njit(**OPTIONS)
def _look(
    q: Any, at: Any, k: Any, v: Any, page: Any, width: Any, low: Any, high: Any, scale: Any, cap: Any,
    seen: Any, into: Any, state: Any, kept: Any, scores: Any,
) -> None:  # fmt: skip
    """One query at the places [low, high) of one page."""
    places = (high + _WIDE - 1) // _WIDE * _WIDE
    _score(q, at, width, k, page, places, scale, scores)
    if cap > ZERO:
        _bend(scores, places, cap)
    factor = _soften(scores, low, high, places, state, kept)
    places = (high + _DEEP - 1) // _DEEP * _DEEP
    for number in range(0, width - LANES + 1, LANES):
        _weigh(scores, places, v, page + number, width, factor, seen, into + number, LANES)
    if width % LANES:
        number = width // LANES * LANES
        _weigh(scores, places, v, page + number, width, factor, seen, into + number, width - number)


@njit(**OPTIONS)
def _begin(seen: Any, into: Any, state: Any, results: Any, width: Any) -> None:
    """``results`` of ``width`` numbers each, with nothing seen yet."""
    for result in range(results):
        state[2 * result] = -_INF
        state[2 * result + 1] = ZERO
    for number in range(results * width):
        seen[into + number] = ZERO


@njit(**OPTIONS)
def _end(seen: Any, into: Any, state: Any, results: Any, width: Any) -> None:
    for result in range(results):
        share = ONE / state[2 * result + 1]
        for number in range(width):
            seen[into + result * width + number] *= share


def attend(
    qkv: Any, rows: Any, seeing: Any, queries: Any, kv: Any, width: Any, of: Any, positions: Any, tables: Any,
    span: Any, half: Any, cos: Any, sin: Any, k: Any, v: Any, window: Any, scale: Any, cap: Any, seen: Any, state: Any,
    scores: Any,
) -> None:  # fmt: skip
    """Turn q and k of each row of ``qkv`` (rows, queries + 2 * kv, width), put K and V into the row's page, and what
    each of the first ``seeing`` rows sees into ``seen`` (rows, queries * width).

    ``of`` (rows): which of ``tables`` (sequences, span) says the pages of a row at ``positions`` (rows). ``half``: of
    the numbers of a head that are turned; ``cos`` and ``sin`` (rows, width), the first half of ``sin`` negated. ``k``
    (pages, kv, width, PAGE), ``v`` (pages, kv, PAGE, width). ``window``, ``scale``, ``cap``: as ``Look`` has them.
    ``state`` (BLOCK, queries, 2) and ``scores`` (PAGE) are written to.
    """
    heads = queries + 2 * kv
    for row in range(rows):
        for head in range(queries + kv if half else 0):
            _turn(qkv, (row * heads + head) * width, half, cos, sin, row * width)
        page = tables[of[row] * span + positions[row] // PAGE]
        _keep(qkv, (row * heads + queries) * width, kv, width, page, positions[row] % PAGE, k, v)
    group = queries // kv
    first = 0
    while first < seeing:
        # Rows behind one another of one sequence: a page's head is read once for all of them.
        last = first + 1
        while last < seeing and last < first + BLOCK and of[last] == of[first]:
            last += 1
        _begin(seen, first * queries * width, state, (last - first) * queries, width)
        low = max(positions[first] - window + 1, 0) if window else 0
        for number in range(low // PAGE, positions[last - 1] // PAGE + 1):
            page = tables[of[first] * span + number] * kv
            for head in range(kv):
                for row in range(first, last):
                    low = max(positions[row] - window + 1 - number * PAGE, 0) if window else 0
                    high = min(positions[row] + 1 - number * PAGE, PAGE)
                    if low < high:
                        for query in range(head * group, (head + 1) * group):
                            _look(
                                qkv, (row * heads + query) * width, k, v, (page + head) * width * PAGE, width, low,
                                high, scale, cap, seen, (row * queries + query) * width, state,
                                ((row - first) * queries + query) * 2, scores,
                            )  # fmt: skip
        _end(seen, first * queries * width, state, (last - first) * queries, width)
        first = last

"""GGUF's packed blocks and the numbers in them: vectorised, float32, as ggml's own reference computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from sllm_runtime.protocol.checkpoint import QUANT_BLOCKS

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

_IQ4: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_FP4: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
"""Twice the values of e2m1, as ggml has them; the scale is half as big."""


def unpack(kind: str, data: Bytes) -> Floats:
    """The float32 numbers, [elements], in whole blocks ``data`` of ``kind``, a name in ``QUANT_BLOCKS``."""
    elements, nbytes = QUANT_BLOCKS[kind]
    blocks = data.reshape(-1, nbytes)
    with np.errstate(all="ignore"):  # scales that are no numbers give numbers that are none
        return np.asarray(_UNPACK[kind](blocks), dtype=np.float32).reshape(len(blocks) * elements)


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Bits of ``values`` as bfloat16, rounded to nearest, ties to even; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    odd = np.isnan(values)
    if odd.any():
        rounded[odd] = ((bits[odd] >> 16) | 0x40).astype(np.uint16)
    return rounded


def _half(data: Bytes) -> Floats:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _bits(data: Bytes, width: int, run: int) -> Bytes:
    """Fields of ``width`` bits, [blocks, fields]: of each run of bytes first all lowest fields, then the next ones."""
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    fields = (data.reshape(len(data), -1, 1, run) >> shifts) & np.uint8((1 << width) - 1)
    return fields.reshape(len(data), -1)


def _whole(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float32)


def _q4_0(b: Bytes) -> Floats:
    return _half(b[:, :2]) * (_whole(_bits(b[:, 2:], 4, 16)) - np.float32(8))


def _q4_1(b: Bytes) -> Floats:
    return _half(b[:, :2]) * _whole(_bits(b[:, 4:], 4, 16)) + _half(b[:, 2:4])


def _five(high: Bytes, low: Bytes) -> Floats:
    top = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return _whole(_bits(low, 4, 16) | (top << np.uint8(4)))


def _q5_0(b: Bytes) -> Floats:
    return _half(b[:, :2]) * (_five(b[:, 2:6], b[:, 6:]) - np.float32(16))


def _q5_1(b: Bytes) -> Floats:
    return _half(b[:, :2]) * _five(b[:, 4:8], b[:, 8:]) + _half(b[:, 2:4])


def _q8_0(b: Bytes) -> Floats:
    return _whole(np.ascontiguousarray(b[:, 2:]).view(np.int8)) * _half(b[:, :2])


def _q2_k(b: Bytes) -> Floats:
    scales = b[:, :16]
    scale = (_half(b[:, 80:82]) * _whole(scales & 15))[..., None]
    least = (_half(b[:, 82:84]) * _whole(scales >> 4))[..., None]
    return scale * _whole(_bits(b[:, 16:80], 2, 32)).reshape(-1, 16, 16) - least


def _q3_k(b: Bytes) -> Floats:
    packed = b[:, 96:108]
    scales = _bits(packed[:, :8], 4, 8) | (_bits(packed[:, 8:], 2, 4) << np.uint8(4))
    scale = (_half(b[:, 108:110]) * (_whole(scales) - np.float32(32)))[..., None]
    values = _whole(_bits(b[:, 32:96], 2, 32)) - 4 * (1 - _whole(_bits(b[:, :32], 1, 32)))
    return _whole(scale * values.reshape(-1, 16, 16))


def _scales_k(packed: Bytes) -> tuple[Floats, Floats]:
    """The eight 6-bit scales and minima of a block of q4_k or q5_k."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1)
    return _whole(scales), _whole(minima)


def _scaled_k(b: Bytes, values: Bytes) -> Floats:
    scales, minima = _scales_k(b[:, 4:16])
    scale, least = _half(b[:, :2]) * scales, _half(b[:, 2:4]) * minima
    return scale[..., None] * _whole(values).reshape(-1, 8, 32) - least[..., None]


def _q4_k(b: Bytes) -> Floats:
    return _scaled_k(b, _bits(b[:, 16:], 4, 32))


def _q5_k(b: Bytes) -> Floats:
    return _scaled_k(b, _bits(b[:, 48:], 4, 32) | (_bits(b[:, 16:48], 1, 32) << np.uint8(4)))


def _q6_k(b: Bytes) -> Floats:
    values = _bits(b[:, :128], 4, 64) | (_bits(b[:, 128:192], 2, 32) << np.uint8(4))
    scale = _half(b[:, 208:210]) * _whole(np.ascontiguousarray(b[:, 192:208]).view(np.int8))
    return scale[..., None] * (_whole(values) - np.float32(32)).reshape(-1, 16, 16)


def _iq4_nl(b: Bytes) -> Floats:
    return _half(b[:, :2]) * _IQ4[_bits(b[:, 2:], 4, 16)]


def _iq4_xs(b: Bytes) -> Floats:
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    scales = _bits(b[:, 4:8], 4, 1) | ((high & 3) << 4).astype(np.uint8)
    scale = _half(b[:, :2]) * (_whole(scales) - np.float32(32))
    return scale[..., None] * _IQ4[_bits(b[:, 8:], 4, 16)].reshape(-1, 8, 32)


def _trits(data: Bytes, count: int) -> Bytes:
    """``count`` base-3 digits of each byte, [blocks, count, bytes] in a row."""
    shifted = data[:, None, :] * np.array([1, 3, 9, 27, 81][:count], dtype=np.uint8).reshape(1, -1, 1)
    return ((shifted.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(data), -1)


def _tq1_0(b: Bytes) -> Floats:
    digits = np.concatenate([_trits(b[:, :32], 5), _trits(b[:, 32:48], 5), _trits(b[:, 48:52], 4)], axis=1)
    return _half(b[:, 52:54]) * (_whole(digits) - np.float32(1))


def _tq2_0(b: Bytes) -> Floats:
    return _half(b[:, 64:66]) * (_whole(_bits(b[:, :64], 2, 32)) - np.float32(1))


def _mxfp4(b: Bytes) -> Floats:
    exponent = b[:, :1].astype(np.uint32)
    small = np.uint32(0x00200000) << np.minimum(exponent, 1)
    scale = np.where(exponent < 2, small, (np.maximum(exponent, 1) - 1) << np.uint32(23)).astype(np.uint32)
    return scale.view(np.float32) * _FP4[_bits(b[:, 1:], 4, 16)]


_UNPACK: Final[dict[str, Callable[[Bytes], Floats]]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "tq1_0": _tq1_0, "tq2_0": _tq2_0, "mxfp4": _mxfp4,
}  # fmt: skip

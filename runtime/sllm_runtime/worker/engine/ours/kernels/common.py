"""What several kernels compute with."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from sllm_runtime.worker.engine.ours.kernels.lanes import fma, lanes, larger, power_of_two, smaller

OPTIONS: Final[dict[str, Any]] = {
    "error_model": "numpy", "boundscheck": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
}  # fmt: skip
"""Of every kernel: no checks, no Python around it, no arithmetic but what is written down."""
ZERO: Final = np.float32(0)
ONE: Final = np.float32(1)
_LEAST, _MOST = np.float32(-87), np.float32(88)
_LOG2_E: Final = np.float32(1.44269504088896341)
_WHOLE: Final = np.float32(12582912)
"""1.5 * 2^23: what is added to it is rounded to a whole number."""
_LN2_HIGH, _LN2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@njit(**OPTIONS)
def exp(x: Any) -> Any:
    """Of each lane, as Cephes' expf; what is beyond -87 and 88 counts as these. NaN stays NaN."""
    x = smaller(lanes(_MOST), larger(lanes(_LEAST), x))
    shifted = fma(x, lanes(_LOG2_E), lanes(_WHOLE))
    whole = shifted - lanes(_WHOLE)
    rest = fma(whole, lanes(_LN2_LOW), fma(whole, lanes(_LN2_HIGH), x))
    found = fma(lanes(_C0), rest, lanes(_C1))
    found = fma(found, rest, lanes(_C2))
    found = fma(found, rest, lanes(_C3))
    found = fma(found, rest, lanes(_C4))
    found = fma(found, rest, lanes(_C5))
    return (fma(found, rest * rest, rest) + lanes(ONE)) * power_of_two(shifted)

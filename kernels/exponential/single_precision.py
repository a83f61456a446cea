"""Exponential, SiLU and GELU in float32 as plain arithmetic: loops over them become vectors.

numba calls the C library once per element (about 10 ns); these inline into the caller's loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_SMALLEST = np.float32(-87.0)
_LARGEST = np.float32(88.0)
_GELU_SLOPE = np.float32(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_CUBE = np.float32(0.07135481282614032)  # and 0.044715 of it


@intrinsic
def _float_from_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 whose bits are the int32 ``bits``."""

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), code_generator


@njit(nogil=True, cache=True, inline="always")
def exponential(x: np.float32) -> np.float32:
    """``exp(x)`` for float32, relative error below 2e-7; 0 below -87, exp(88) above 88."""
    clamped = min(max(x, _SMALLEST), _LARGEST)
    # The shift keeps the argument of the truncating conversion positive: truncation is floor.
    power = np.int32(clamped * _LOG2_E + np.float32(128.5)) - np.int32(128)
    whole = np.float32(power)
    r = clamped - whole * _LN2_HIGH
    r = r - whole * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    scaled = p * _float_from_bits(np.int32((power + np.int32(127)) << np.int32(23)))
    return scaled if x >= _SMALLEST else np.float32(0.0)


@njit(nogil=True, cache=True, inline="always")
def silu(x: np.float32) -> np.float32:
    """``x / (1 + exp(-x))`` in float32."""
    return x / (np.float32(1.0) + exponential(-x))


@njit(nogil=True, cache=True, inline="always")
def gelu(x: np.float32) -> np.float32:
    """``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` in float32, the tanh as an exponential:
    what transformers calls gelu_pytorch_tanh."""
    return x / (np.float32(1.0) + exponential(-x * (_GELU_SLOPE + _GELU_CUBE * (x * x))))

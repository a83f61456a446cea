"""What a model does to its logits after the matrix product: bias, scale, soft-cap.

Applied to canonical logits element by element, in this order:

1. ``l = fp32(l + bias_i)``
2. ``l = fp32(l * scale)``
3. ``l = fp32(cap * tanh(f64(l) / cap))``
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def postprocess(
    logits: npt.NDArray[np.float32],
    *,
    bias: npt.NDArray[np.float32] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> npt.NDArray[np.float32]:
    """Bias, scale and soft-cap of canonical logits, fp32.

    ``logits`` of any shape; ``bias`` broadcasts against them (the biases of the same tokens).
    Returns ``logits`` itself where there is nothing to do.
    """
    result = logits
    # A logit too large for fp32 is infinite, which the decision orders like any other.
    with np.errstate(over="ignore"):
        if bias is not None:
            result = result + bias.astype(np.float32, copy=False)
        if scale != 1.0:
            result = result * np.float32(scale)
    if softcap is not None:
        result = (softcap * np.tanh(result.astype(np.float64) / softcap)).astype(np.float32)
    return result

"""What a screen gives."""

from __future__ import annotations

from typing import Any, NamedTuple


class Screened(NamedTuple):
    """Estimates and their bounds; tensors on the device of the tier, on the CPU numpy arrays.

    ``|estimate_ni - canonical_ni| <= sum_k hidden_slack_nk row_slack_ki``, where ``canonical`` is
    the raw canonical logit. Both slacks are positive or zero. An infinite entry in a row of
    ``hidden_slack`` says that its estimates mean nothing (they are finite all the same).
    """

    estimate: Any  # [N, V] fp32
    row_slack: Any  # [2, V] fp32: error norm, size
    hidden_slack: Any  # [N, 2] float64: ||r|| (see `OneBitTier` for its own), roundings per size

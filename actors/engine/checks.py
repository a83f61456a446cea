"""Early refusals of settings of an engine's memory."""

from __future__ import annotations


def check_utilization(share: float) -> None:
    """Raises ValueError for a share of a GPU's memory that cannot be."""
    if not 0.0 < share <= 1.0:
        raise ValueError(f"--gpu-memory-utilization {share} must be above 0 and at most 1")

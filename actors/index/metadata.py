"""What an index file says about itself: plain data, readable without its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What a step may ask of the output head: the best token, the 50 best, a draw at temperature 1.
NEEDS = ("top-1", "top-50", "Gumbel")


@dataclass(frozen=True, slots=True)
class Weights:
    """The output weights [rows, columns] an index belongs to, rows beyond the tokenizer cut off."""

    hash: str  # SHA-256, hexadecimal
    rows: int
    columns: int
    dtype: str  # bfloat16 or float32
    bias: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as the head stores it."""
        return self.columns * (2 if self.dtype == "bfloat16" else 4)


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The hidden states that decide and measure.

    The mean of the first ``fitted`` of ``positions`` is the common direction; the others measure.
    """

    source: str
    seed: int  # of the whole build
    prompts: int
    positions: int
    fitted: int


@dataclass(frozen=True, slots=True)
class Tightness:
    """How well a tier screens the calibration's measured hidden states, one at a time.

    By need: the mean number of rows that could not be excluded by the screen (``kept``) and by the
    low plane after it (``refined``, None without one), and the bytes one token reads
    (``bytes_read``) if tier and output rows are all there is. ``bound`` is the mean error bound of
    a raw logit, ``error`` the root mean square of the errors themselves.
    """

    kept: dict[str, float]
    refined: dict[str, float] | None
    bytes_read: dict[str, float]
    bound: float
    error: float

    @property
    def mean_bytes(self) -> float:
        """Bytes per token, every need counted alike."""
        return sum(self.bytes_read.values()) / len(self.bytes_read)


@dataclass(frozen=True, slots=True)
class TierReport:
    """A tier, and which of its two forms was stored: the one that reads fewer bytes."""

    stored_bytes: int
    screened_bytes: int  # one pass over the tier, without its low plane
    common_direction: bool
    tightness: Tightness
    alternative: Tightness | None  # the form that was not stored


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The clusters, and the share of all rows that lie in those a bound could not exclude.

    ``opened`` is by bound (ball, cone, best) and need.
    """

    kind: Literal["euclidean", "spherical"]
    requested: int
    count: int  # without empty ones
    fine_clusters: int
    fine_tokens: int
    iterations: int
    stored_bytes: int
    opened: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Metadata:
    """Everything an index file says about itself."""

    weights: Weights
    calibration: CalibrationReport
    clusters: ClusterReport | None
    tiers: dict[str, TierReport]

"""The hot vocabulary at run time: calibrated on this machine, refitted from what it lives through.

Its size changes what a decision costs, never which token it takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lexshard.actors.decision.hot_vocabulary.file import HotFile, read_hot_file
from lexshard.kernels.hot_vocab import (
    Cost,
    Curve,
    best_size,
    expected_cost,
    fit_cost,
    interpolate,
    rising,
    skip_rate,
)

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

# Decides a fixed set of rows with these hot ids (sorted); tail tokens visited per row.
Decide = Callable[[Ids], npt.NDArray[np.int64]]

# Decided rows after which an observation counts half.
HALF_LIFE = 4096.0
# The traces' word counts as much as this many live rows.
PRIOR_ROWS = 64.0
# Rows at one size before another is considered, and what the other must promise to save.
SETTLING_ROWS = 256.0
HYSTERESIS = 0.05
# After a size that did not keep its promise no other is tried for so many rows, twice as many each
# time in a row: where nothing pays, hardly any rows pay for finding out.
FIRST_BACKOFF, LONGEST_BACKOFF = 512.0, 32_768.0
# A step that took longer than this many times what was expected was interrupted.
INTERRUPTED = 4.0
CALIBRATION_SECONDS = 0.3


class HotVocabulary:
    """The tokens to visit first, and how many of them: 0 (off) where visiting them does not pay.

    ``ids`` are all that may be hot, by falling frequency; ``curve`` is the skip rate that traces
    promise (see `kernels.hot_vocab.sizing`). The sizes to choose from are 0, those of the curve
    and its optimum. Not thread-safe: one for each sampler.

    Raises ValueError for ids that are not distinct ids of the vocabulary.
    """

    def __init__(self, ids: Ids, vocabulary_size: int, curve: Curve, cost: Cost) -> None:
        self._path: Path | None = None
        self._signature: tuple[int, ...] = ()
        self._tokenizer: str | None = None
        self.vocabulary_size = vocabulary_size
        self._adopt(ids, curve)
        self._set_cost(cost)
        self._choose()

    @classmethod
    def load(
        cls, path: str | Path, vocabulary_size: int, tokenizer: str | None = None
    ) -> HotVocabulary:
        """The file at ``path``, if it fits (ValueError otherwise; see `read_hot_file`)."""
        signature = _signature(path)
        file = read_hot_file(path, vocabulary_size, tokenizer)
        hot = cls(file.ids, vocabulary_size, file.curve, file.cost)
        hot._path, hot._signature, hot._tokenizer = Path(path), signature, tokenizer
        return hot

    @property
    def ids(self) -> Ids:
        """The hot tokens of now [H], sorted by id; empty while they do not pay."""
        return self._hot

    @property
    def hot_ids(self) -> Ids | None:
        """`ids`, or None while they do not pay."""
        return self._hot if self.size else None

    @property
    def cost(self) -> Cost:
        """What visiting costs on this machine, as far as is known."""
        return self._cost

    @property
    def curve(self) -> Curve:
        """The skip rate at the sizes to choose from: traces and live rows together."""
        rates = skip_rate(self._sizes, self._visited_now(), self.vocabulary_size)
        return Curve(self._sizes.copy(), rates)

    def calibrate(self, decide: Decide, *, seconds: float = CALIBRATION_SECONDS) -> Cost:
        """Fit the cost on this machine by timing ``decide`` at sizes from 0 to the largest.

        Every size once for the compiler and caches, then rounds until ``seconds`` are over, at
        least one; the quickest run of each counts. The size is chosen anew.
        """
        chosen = np.unique(np.linspace(0, len(self._sizes) - 1, 6).round().astype(np.int64))
        sets = [np.sort(self._ids[:size]) for size in self._sizes[chosen].tolist()]
        tails = [decide(hot_ids) for hot_ids in sets]
        visited = np.array([tail.mean() for tail in tails])
        best = np.full(len(sets), np.inf)
        ends = time.perf_counter() + seconds
        while not np.isfinite(best[0]) or time.perf_counter() < ends:
            for index, hot_ids in enumerate(sets):
                started = time.perf_counter()
                decide(hot_ids)
                best[index] = min(best[index], time.perf_counter() - started)
        if len(sets) > 1:
            self._set_cost(fit_cost(self._sizes[chosen], visited, best / len(tails[0])))
            self._choose()
        return self._cost

    def observe(self, visited_tail: int, rows: int, seconds: float) -> None:
        """A step decided ``rows`` rows with `ids` in ``seconds``, visiting ``visited_tail`` tail
        tokens in all; after some hundred rows the size may change.

        Older observations fade. What is learned at one size also bounds the others: more hot
        tokens never leave more of the tail. A change must promise to save 5%; after a promise that
        was not kept there is none for a while, but to off.
        """
        cost = self._cost
        each = cost.fixed + cost.two_goes * (self.size > 0) + cost.per_token * self.size
        usual = rows * each + cost.per_token * visited_tail
        self._new_rows += rows
        self._new_visited += visited_tail
        self._new_seconds += min(seconds, INTERRUPTED * usual) if usual > 0 else seconds
        if self._new_rows >= SETTLING_ROWS:  # numpy is too slow for every step
            self._refit()

    def reload_if_changed(self) -> bool:
        """Read the file again if it is another one than was read last; True if it is in use now.

        What was learned live is forgotten, the calibrated cost stays. Raises ValueError, once,
        where the new file does not fit: the old content stays in use. A file that has gone away
        changes nothing.
        """
        if self._path is None:
            return False
        signature = _signature(self._path)
        if not signature or signature == self._signature:
            return False
        self._signature = signature
        file: HotFile = read_hot_file(self._path, self.vocabulary_size, self._tokenizer)
        self._adopt(file.ids, file.curve)
        self._set_cost(self._cost)
        self._choose()
        return True

    # -- what is believed -------------------------------------------------------------------------

    def _adopt(self, ids: Ids, curve: Curve) -> None:
        if (
            ids.min(initial=0) < 0
            or ids.max(initial=0) >= self.vocabulary_size
            or len(np.unique(ids)) < len(ids)
        ):
            raise ValueError(
                f"hot ids must be distinct ids of the vocabulary of {self.vocabulary_size}"
            )
        best = best_size(curve, Cost(0.0, 1.0), self.vocabulary_size)
        every = np.array([0, best, *curve.sizes.tolist()], np.int64)
        self._ids = np.ascontiguousarray(ids, np.int32)
        self._sizes = np.unique(every[every <= len(ids)])
        self._prior = (1.0 - interpolate(curve, self._sizes)) * (self.vocabulary_size - self._sizes)
        self._rows, self._visited = np.zeros(len(self._sizes)), np.zeros(len(self._sizes))
        self._new_rows = self._new_visited = self._new_seconds = 0.0
        self._backoff = self._backoff_left = 0.0

    def _visited_now(self) -> Floats:
        """Tail tokens visited per row at every size [m], never rising with the size."""
        weights = PRIOR_ROWS + self._rows
        means = (PRIOR_ROWS * self._prior + self._visited) / weights
        return -rising(-means, weights)

    def _expected(self) -> Floats:
        return expected_cost(self._sizes, self.curve.skip_rate, self._cost, self.vocabulary_size)

    def _choose(self) -> None:
        """The best size, whatever the present one is; off where it saves too little."""
        expected = self._expected()
        place = int(np.argmin(expected))
        self._move(0 if expected[place] > (1.0 - HYSTERESIS) * expected[0] else place, expected)

    def _move(self, place: int, expected: Floats) -> None:
        self._place = place
        self._promised = float(expected[place])
        self.size = int(self._sizes[place])
        self._hot = np.sort(self._ids[: self.size])

    def _refit(self) -> None:
        """Learn from the rows since the last time, and move where that promises enough."""
        place, rows, visited = self._place, self._new_rows, self._new_visited
        fade = 0.5 ** (rows / HALF_LIFE)
        self._rows *= fade
        self._visited *= fade
        self._rows[place] += rows
        self._visited[place] += visited
        self._timed *= fade
        self._timed[place] += rows, visited, self._new_seconds
        self._fit_cost()
        self._new_rows = self._new_visited = self._new_seconds = 0.0
        self._backoff_left = max(self._backoff_left - rows, 0.0)
        expected = self._expected()
        if expected[place] > (1.0 + HYSTERESIS) * self._promised:
            self._promised = np.inf  # counted once
            self._backoff_left = self._backoff = min(
                max(2 * self._backoff, FIRST_BACKOFF), LONGEST_BACKOFF
            )
        elif place and np.isfinite(self._promised):
            self._backoff = 0.0
        least = (1.0 - HYSTERESIS) * expected[place]
        if self._backoff_left and expected[0] < least:
            self._move(0, expected)
        elif not self._backoff_left and expected.min() < least:
            self._choose()

    # -- what it costs ----------------------------------------------------------------------------

    def _set_cost(self, cost: Cost) -> None:
        """Take ``cost`` as known. It stays in the fit as a few observations, which do not fade."""
        self._cost = cost
        count = len(self._sizes)
        rates = skip_rate(self._sizes, self._prior, self.vocabulary_size)
        predicted = expected_cost(self._sizes, rates, cost, self.vocabulary_size)
        self._known = (self._sizes, self._prior, predicted, np.full(count, PRIOR_ROWS / count))
        self._timed = np.zeros((count, 3))  # rows, tail tokens they visited, seconds

    def _fit_cost(self) -> None:
        some = self._timed[:, 0] > 0
        rows, visited, seconds = self._timed[some].T
        known_sizes, known_visited, known_seconds, weights = self._known
        self._cost = fit_cost(
            np.concatenate([known_sizes, self._sizes[some]]),
            np.concatenate([known_visited, visited / rows]),
            np.concatenate([known_seconds, seconds / rows]),
            np.concatenate([weights, rows]),
        )


def _signature(path: str | Path) -> tuple[int, ...]:
    """What tells a file from the one that was there before; empty where there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size

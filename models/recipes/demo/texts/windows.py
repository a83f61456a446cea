"""Token streams cut into training windows, and the order in which they are trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.recipes.demo.recipe import Schedule


@dataclass(frozen=True)
class TokenSource:
    """Tokens of one kind of text and the places where a window may begin."""

    name: str
    weight: float
    tokens: np.ndarray
    starts: np.ndarray


def window_starts(source: TokenSource, length: int) -> np.ndarray:
    """Begin a window at a document or paragraph start, and the next where its last one begins.

    What a window cuts off is read whole in the next: to go on after the end would leave the ends
    of a quarter of the dialogues and of a tenth of the stories unread in every round.
    """
    chosen: list[int] = []
    index = 0
    last = len(source.tokens) - length - 1
    while index < len(source.starts) and source.starts[index] <= last:
        start = int(source.starts[index])
        chosen.append(start)
        cut = int(np.searchsorted(source.starts, start + length, side="right")) - 1
        index = max(index + 1, cut)
    if not chosen:
        raise ValueError(f"source {source.name!r} is shorter than one window of {length} tokens")
    return np.asarray(chosen, dtype=np.int64)


class WindowOrder:
    """An endless, seeded order of windows of one length from the weighted sources."""

    def __init__(self, sources: list[TokenSource], length: int, count: int, seed: int) -> None:
        self._sources = sources
        self._length = length
        weights = np.asarray([source.weight for source in sources])
        edges = np.cumsum(weights / weights.sum())
        draws = np.random.default_rng([seed, length, 0]).random(count)
        self._choice = np.minimum(np.searchsorted(edges, draws), len(sources) - 1)
        self._position = np.zeros(count, dtype=np.int64)
        for number, source in enumerate(sources):
            places = np.flatnonzero(self._choice == number)
            starts = window_starts(source, length)
            order = np.random.default_rng([seed, length, 1 + number])
            rounds = -(-len(places) // len(starts))
            shuffled = [order.permutation(starts) for _ in range(rounds)]
            if shuffled:
                self._position[places] = np.concatenate(shuffled)[: len(places)]

    def window(self, index: int) -> np.ndarray:
        """Tokens of window ``index``: the inputs and one more for the last target."""
        source = self._sources[self._choice[index]]
        start = self._position[index]
        return source.tokens[start : start + self._length + 1].astype(np.int64)


class BatchOrder:
    """The batch of every step: short windows first, long windows at the end."""

    def __init__(self, sources: list[TokenSource], schedule: Schedule, seed: int) -> None:
        self._schedule = schedule
        short_windows = schedule.batch_tokens // schedule.sequence
        long_windows = max(1, schedule.batch_tokens // schedule.long_sequence)
        long_steps = schedule.steps - schedule.long_start
        self._short = WindowOrder(
            sources, schedule.sequence, short_windows * schedule.long_start, seed
        )
        self._long = (
            WindowOrder(sources, schedule.long_sequence, long_windows * long_steps, seed)
            if long_steps
            else None
        )

    def batch(self, step: int) -> np.ndarray:
        """Token array of shape ``[windows, length + 1]``."""
        schedule = self._schedule
        if self._long is not None and step >= schedule.long_start:
            order, count = self._long, max(1, schedule.batch_tokens // schedule.long_sequence)
            step -= schedule.long_start
        else:
            order, count = self._short, schedule.batch_tokens // schedule.sequence
        return np.stack([order.window(step * count + row) for row in range(count)])

"""What the sampler benchmark decides on: rows of logits, histories, and the tokens that follow.

Every contender of a case sees the same: step ``s`` of a batch has the next rows of logits in turn,
and after it the same token is appended to each history whichever drew what, so that the penalty
state of all moves alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.actors.states.need import Need
from lexshard.kernels.noise import gumbel_row
from lexshard.kernels.truncate import best_ids, truncate
from lexshard.loadtest.bench.options.sampler import Setting
from lexshard.loadtest.bench.synthetic.head_workload import draw_from_all, needs

POOL, CALIBRATION = 96, 32  # rows; as many as the batch where that is more
CANDIDATES = 90  # what a top-50 certificate leaves
LIKELY = 64  # the tokens of a row that histories go on with
RECENT = 64  # tokens of a history that stand in for its context
OUTPUT_SHARE = 0.25  # of a history; the rest is prompt

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Rows of raw logits, each with its likeliest tokens."""

    rows: Rows  # [R, V]
    likely: npt.NDArray[np.int64]  # [R, LIKELY]
    shares: npt.NDArray[np.float64]  # [R, LIKELY] of the softmax over them
    frequency: npt.NDArray[np.float64]  # [V] expected in the rows to calibrate on

    @classmethod
    def of(cls, rows: Rows, calibration: Rows) -> Pool:
        likely = np.argpartition(rows, -LIKELY, axis=1)[:, -LIKELY:]
        best = np.take_along_axis(rows, likely, axis=1).astype(np.float64)
        frequency = np.zeros(rows.shape[1])
        for row in calibration:
            frequency += _softmax(row[None].astype(np.float64))[0] / len(calibration)
        return cls(rows, likely, _softmax(best), frequency)

    @property
    def vocabulary_size(self) -> int:
        return self.rows.shape[1]


def synthetic_rows(vocabulary: int, count: int, seed: int) -> Rows:
    """Logits ``-ln(rank + 8) + 1.6 N(0, 1)`` with a fixed random order of the tokens (Zipf's law),
    and in three of four rows six tokens, drawn by that law, that stand out: around 3 above the
    best of the others with deviation 1.5. The fourth row is flat."""
    chance = np.random.Generator(np.random.Philox(key=seed))
    prior = -np.log(np.arange(vocabulary, dtype=np.float32) + 8)
    prior = prior[chance.permutation(vocabulary)]
    law = _softmax(prior[None].astype(np.float64))[0]
    rows = chance.standard_normal((count, vocabulary), dtype=np.float32)
    rows *= 1.6
    rows += prior
    for index in range(len(rows)):
        if index % 4:
            ids = chance.choice(vocabulary, 6, replace=False, p=law)
            rows[index, ids] = rows[index].max() + 3 + 1.5 * chance.standard_normal(6)
    return rows


def synthetic_pool(vocabulary: int, count: int, seed: int) -> Pool:
    """`synthetic_rows` to decide on, and more of them to calibrate on."""
    rows = synthetic_rows(vocabulary, count + CALIBRATION, seed)
    return Pool.of(rows[:count], rows[count:])


class SamplerWorkload:
    """One case: ``batch`` sequences with histories of ``history`` tokens, sampled by ``setting``
    for ``steps`` steps.

    Sequence ``r`` has seed ``r``. The tokens of a history come as often as in the rows to calibrate
    on, but the last `RECENT` are likely ones of the rows that are decided, as text repeats itself:
    penalties meet tokens that could be drawn, and as many of them in long histories as in short.
    """

    def __init__(
        self, pool: Pool, setting: Setting, batch: int, history: int, steps: int, seed: int
    ) -> None:
        self.pool = pool
        self.setting = setting
        self.batch = batch
        self.history = history
        self._candidates: dict[int, list[npt.NDArray[np.int32]]] = {}
        chance = np.random.Generator(np.random.Philox(key=seed))
        tokens = chance.choice(pool.vocabulary_size, (batch, history), p=pool.frequency)
        shape = (batch, min(RECENT, history))
        rows = chance.integers(0, len(pool.rows), shape)
        tokens[:, -shape[1] :] = pool.likely[rows, chance.integers(0, LIKELY, shape)]
        prompt = history - max(1, int(OUTPUT_SHARE * history))
        # [B, P] and [B, O], before step 0.
        self.prompts, self.outputs = tokens[:, :prompt].copy(), tokens[:, prompt:].copy()
        self.places = np.arange(steps * batch).reshape(steps, batch) % len(pool.rows)
        # [steps, B] the token every history goes on with, drawn from its raw softmax.
        shares = pool.shares[self.places]
        sums = np.cumsum(shares, axis=2)
        sums[:, :, -1] = 1.0
        chosen = np.argmax(sums > chance.random((steps, batch, 1)), axis=2)
        self.appended: npt.NDArray[np.int64] = np.take_along_axis(
            pool.likely[self.places], chosen[:, :, None], axis=2
        )[:, :, 0]

    @property
    def vocabulary_size(self) -> int:
        return self.pool.vocabulary_size

    def logits(self, step: int) -> Rows:
        """The raw logits [B, V] of a step, a copy."""
        return self.pool.rows[self.places[step]]

    def adjusted(self, step: int) -> Rows:
        """The logits [B, V] of a step after penalties, computed plainly."""
        logits = self.logits(step)
        setting = self.setting
        if not setting.penalised:
            return logits
        outputs = np.concatenate([self.outputs, self.appended[:step].T], axis=1)
        for row, line in enumerate(logits):
            seen = np.union1d(self.prompts[row], outputs[row])
            old = line[seen]
            strength = np.float32(setting.repetition_penalty)
            line[seen] = np.where(old > 0, old / strength, old * strength)
            drawn, counts = np.unique(outputs[row], return_counts=True)
            line[drawn] -= np.float32(setting.frequency_penalty) * counts.astype(np.float32)
            line[drawn] -= np.float32(setting.presence_penalty)
        return logits

    def plain_draw(self, step: int) -> npt.NDArray[np.int64]:
        """The tokens [B] that a step draws from all adjusted logits."""
        setting = self.setting
        scale = 0.0 if setting.greedy else float(np.float32(1 / setting.temperature))
        wish = Need("top1", setting.top_k, setting.min_p, setting.top_p, inverse_temperature=scale)
        return draw_from_all(self.adjusted(step), needs(wish, self.batch, self.history + step))

    def kept(self, step: int) -> npt.NDArray[np.bool_]:
        """The tokens [B, V] that our definition of truncation keeps."""
        return np.stack([self._truncate(row) for row in self.adjusted(step)])

    def candidates(self, step: int) -> list[npt.NDArray[np.int32]]:
        """Per row the ids, sorted, that a certificate leaves: the `CANDIDATES` best by what decides
        (the adjusted logit, or with noise where the whole softmax is drawn from); with min-p all
        that it keeps, if those are more; for top-p alone the nucleus itself."""
        if step in self._candidates:
            return self._candidates[step]
        kind = self.setting.asks_for
        self._candidates[step] = found = []
        for row, logits in enumerate(self.adjusted(step)):
            if kind == "nucleus":
                ids = np.flatnonzero(self._truncate(logits))
            else:
                decides = logits
                if kind == "gumbel":
                    noise = gumbel_row(row, self.history + step, len(logits))
                    decides = logits * np.float32(1 / self.setting.temperature) + noise
                ids = best_ids(decides, min(CANDIDATES, len(logits)))
                if kind == "minp":
                    ids = np.union1d(ids, np.flatnonzero(self._truncate(logits)))
            found.append(np.sort(ids).astype(np.int32))
        return found

    def _truncate(self, logits: Rows) -> npt.NDArray[np.bool_]:
        setting = self.setting
        if setting.greedy:
            return logits == logits.max()
        return truncate(
            logits,
            inverse_temperature=float(np.float32(1 / setting.temperature)),
            top_k=setting.top_k,
            top_p=setting.top_p,
            min_p=setting.min_p,
        )


def _softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)

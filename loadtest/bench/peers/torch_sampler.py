"""The standard sampler semantics in plain torch: the port that the sampler benchmark calls naive.

What vLLM documents for its sampler, done as a tensor program over the whole vocabulary: histories
padded to one tensor and counted into [B, V], every processor over all logits, a sort for top-p.
Everything in fp32 and in place, in the order penalties, temperature, min-p, top-k, top-p, draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lexshard.loadtest.bench.options.sampler import Setting

EXCLUDED = float("-inf")


class TorchSampler:
    """The port for ``rows`` sequences of one setting with prompts [B, P] of any one length."""

    def __init__(self, setting: Setting, prompts: torch.Tensor) -> None:
        rows = len(prompts)
        self._setting = setting
        self._prompts = prompts
        self._chance = np.random.Generator(np.random.SFC64(0))
        self._temperature = torch.full((rows,), setting.temperature)
        self._repetition = torch.full((rows, 1), setting.repetition_penalty)
        self._frequency = torch.full((rows, 1), setting.frequency_penalty)
        self._presence = torch.full((rows, 1), setting.presence_penalty)
        self._min_p = torch.full((rows, 1), setting.min_p)
        self._top_k = torch.full((rows, 1), setting.top_k, dtype=torch.int64)
        self._top_p = torch.full((rows, 1), setting.top_p)

    def sample(self, logits: torch.Tensor, outputs: Sequence[Sequence[int]]) -> torch.Tensor:
        """A token per row [B] of ``logits`` [B, V] fp32, which are overwritten.

        ``outputs`` are the tokens each row has drawn so far.
        """
        scores = self.process(logits, outputs)
        setting = self._setting
        if not setting.greedy:
            truncated = setting.top_k > 0 or setting.top_p < 1 or setting.min_p > 0
            add_gumbel_noise(scores, self._chance, only_kept=truncated)
        # numpy's argmax uses wide registers, torch's does not.
        return torch.from_numpy(scores.numpy().argmax(axis=1))

    def process(self, logits: torch.Tensor, outputs: Sequence[Sequence[int]]) -> torch.Tensor:
        """The logits after every processor, ``-inf`` where a token is out; in place."""
        setting = self._setting
        if setting.penalised:
            self._penalise(logits, outputs)
        if setting.greedy:
            return logits
        logits.div_(self._temperature[:, None])
        if setting.min_p > 0:
            shares = logits.softmax(dim=1)
            least = shares.amax(dim=1, keepdim=True) * self._min_p
            logits.masked_fill_(shares < least, EXCLUDED)
        if setting.top_p < 1:
            return self._cut_sorted(logits)
        return self._cut_top_k(logits) if setting.top_k else logits

    def _penalise(self, logits: torch.Tensor, outputs: Sequence[Sequence[int]]) -> None:
        size = logits.shape[1]
        longest = max(map(len, outputs))
        padded = np.full((len(outputs), longest), size, np.int64)
        for row, tokens in enumerate(outputs):
            padded[row, : len(tokens)] = tokens
        in_prompt = count_tokens(self._prompts, size) > 0
        counts = count_tokens(torch.from_numpy(padded), size)
        in_output = counts > 0
        factor = torch.where(in_prompt | in_output, self._repetition, 1.0)
        logits.mul_(torch.where(logits > 0, 1.0 / factor, factor))
        logits.sub_(self._frequency * counts)
        logits.sub_(self._presence * in_output)

    def _cut_top_k(self, logits: torch.Tensor) -> torch.Tensor:
        best = logits.topk(int(self._top_k.max()), dim=1).values
        least = best.gather(1, self._top_k - 1)
        return logits.masked_fill_(logits < least, EXCLUDED)

    def _cut_sorted(self, logits: torch.Tensor) -> torch.Tensor:
        """Top-k, if any, and top-p from one ascending sort."""
        ascending, places = logits.sort(dim=1)
        if self._setting.top_k:
            least = ascending.gather(1, ascending.shape[1] - self._top_k)
            ascending.masked_fill_(ascending < least, EXCLUDED)
        below = ascending.softmax(dim=1).cumsum(dim=1)
        out = below <= 1 - self._top_p
        out[:, -1] = False
        ascending.masked_fill_(out, EXCLUDED)
        return logits.scatter_(1, places, ascending)


def count_tokens(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """How often each of ``size`` ids stands in each row of ``tokens`` [B, L], padded with ``size``:
    int64 [B, size]."""
    counts = torch.zeros(len(tokens), size + 1, dtype=torch.int64)
    counts.scatter_add_(1, tokens, torch.ones_like(tokens))
    return counts[:, :size]


def add_gumbel_noise(logits: torch.Tensor, chance: np.random.Generator, *, only_kept: bool) -> None:
    """Adds ``-log E`` with exponential clocks ``E`` to ``logits`` [B, V] in place: the largest sum
    of a row is then a draw from its softmax. ``only_kept``: where they are not ``-inf``."""
    if not only_kept:
        logits.sub_(_clocks(chance, tuple(logits.shape)).log_())
        return
    rows, places = (logits > EXCLUDED).nonzero(as_tuple=True)
    logits[rows, places] -= _clocks(chance, tuple(rows.shape)).log_()


def _clocks(chance: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Exponential numbers by numpy, six times faster than torch's."""
    return torch.from_numpy(chance.standard_exponential(shape, dtype=np.float32))

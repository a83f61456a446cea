"""The part of the vocabulary that takes part in the softmax of one step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.recipes.demo.recipe import Schedule


@dataclass(frozen=True)
class SoftmaxCandidates:
    """Token ids in the softmax, the logit correction of each and a lookup of their places."""

    identities: Tensor
    bias: Tensor
    places: Tensor


class CandidateSampler:
    """Frequent tokens, the batch's own targets and a uniform sample of all the rest.

    The sampled tokens stand for every token left out: their logits are raised by the log of how
    many each of them represents, which keeps the estimate of the softmax normaliser unbiased.
    """

    def __init__(self, frequent_first: np.ndarray, schedule: Schedule, seed: int) -> None:
        self._vocabulary = len(frequent_first)
        self._frequent = frequent_first[: schedule.frequent_tokens]
        self._schedule = schedule
        self._seed = seed

    def candidates(self, step: int, targets: np.ndarray) -> SoftmaxCandidates | None:
        """Candidates of a step, or nothing where the whole vocabulary takes part."""
        schedule = self._schedule
        if step >= schedule.full_softmax_start:
            return None
        certain = np.zeros(self._vocabulary, dtype=bool)
        certain[self._frequent] = True
        certain[targets.ravel()] = True
        rest = np.flatnonzero(~certain)
        if len(rest) <= schedule.sampled_tokens:
            return None
        generator = np.random.default_rng([self._seed, step])
        sampled = generator.choice(rest, schedule.sampled_tokens, replace=False)
        identities = np.concatenate([np.flatnonzero(certain), np.sort(sampled)])
        bias = np.zeros(len(identities), dtype=np.float32)
        bias[-len(sampled) :] = math.log(len(rest) / len(sampled))
        places = np.zeros(self._vocabulary, dtype=np.int64)
        places[identities] = np.arange(len(identities))
        return SoftmaxCandidates(
            torch.from_numpy(identities), torch.from_numpy(bias), torch.from_numpy(places)
        )

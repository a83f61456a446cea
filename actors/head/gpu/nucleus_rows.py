"""Rows of top-p alone on a device: their nucleus is found there, from every canonical logit.

What travels to the host is the nucleus, where all logits are half a megabyte a row. Its tokens are
exactly the host's (`kernels.truncate.device`). Rows that only draw from it are searched first as if
there were no top-p: what is left for their nuclei are those whose token may lie outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.head.backoff import LARGEST_UNCERTAIN
from lexshard.actors.head.gpu.device_step import DeviceStep, StepResults, send
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.rows.triton_kernel import Factors, every_logit
from lexshard.kernels.search.gpu.packing import pack_questions
from lexshard.kernels.search.gpu.search import (
    PostProcessing,
    Questions,
    Support,
    draw,
    unpack_results,
)
from lexshard.kernels.search.gpu.triton_adjust import ENTRY
from lexshard.kernels.truncate.device import nuclei

# Each takes some fifty bytes for a moment, and each piece of a step some thirty launches.
LOGITS_AT_ONCE = 1 << 22
# Of the mass outside of nuclei: what bounds leave uncertain is about as much again.
UNCERTAIN = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class LeftRows:
    """Rows of a step that its search left, and what the device has found of them instead."""

    places: torch.Tensor  # [1 + K] int64, how many they are and which; the others mean nothing
    results: StepResults

    def read(self) -> tuple[npt.NDArray[np.int64], tuple[npt.NDArray[Any], ...]]:
        """Waits; the rows' places [R] in the step, and what is known of them in this order."""
        parts = self.results.read()
        count = min(int(self.places[0]), len(self.places) - 1)
        return self.places[1 : 1 + count].numpy(), parts


def uncertain_rows(top_p: Sequence[float]) -> int:
    """Room for the rows that a search of draws from nuclei is likely to leave, of these; 0 where
    they are so many that it does not pay."""
    expected = sum(min(1.0, UNCERTAIN * (1.0 - each)) for each in top_p)
    if expected > LARGEST_UNCERTAIN * len(top_p):
        return 0
    room = math.ceil(expected + 2.0 * math.sqrt(expected))
    # One program computes up to eight rows.
    room = -(-room // 8) * 8 if room > 4 else 1 << (room - 1).bit_length()
    return min(room, len(top_p))


class NucleusRows:
    """The nuclei of rows over ``weight`` [V, d], all the vocabulary has, with room for ``capacity``
    tokens each; ``post`` has no soft-cap, for its last bit may be another on a device."""

    def __init__(self, weight: torch.Tensor, post: PostProcessing, capacity: int) -> None:
        self._weight = weight
        self._post = post
        self._capacity = capacity

    def launch(self, hidden: torch.Tensor, rows: RowTable) -> StepResults:
        """Starts the step of ``rows`` without processors, whose hidden states are ``hidden`` [N, d]
        fp32, wherever it lies. Candidates come best first."""
        there = torch.empty(hidden.shape, device=self._weight.device)
        send(there, hidden)
        questions = Questions(*map(self._sent, pack_questions(rows.search(), rows.controls)))
        return self._results(self._found(there, questions), len(rows))

    def finish(self, step: DeviceStep, rows: Sequence[bool], room: int) -> LeftRows:
        """Starts the step of those of ``rows`` [N], without processors, that the search of ``step``
        has left, up to ``room`` of them; what they draw takes its place among what it has drawn."""
        found, room = step.results, min(room, len(rows))
        left = self._sent(np.array(rows)) & (found.counts[: len(rows)] > self._capacity)
        count = left.sum()
        order = left.int().argsort(descending=True, stable=True)[:room]
        asked = step.questions
        questions = Questions(asked.integers[order], asked.reals[order])
        memory = self._found(step.hidden[order], questions, count)
        own, drawn = unpack_results(memory, room), found.drawn
        # Beyond the count are rows that the search has decided.
        taken = torch.arange(room, device=count.device) < count
        drawn.index_copy_(0, order, torch.where(taken, own.drawn, drawn[order]))
        places = torch.empty(1 + room, dtype=torch.int64, pin_memory=count.is_cuda)
        places.copy_(torch.cat([count[None], order]), non_blocking=True)
        return LeftRows(places, self._results(memory, room))

    def _found(
        self, hidden: torch.Tensor, questions: Questions, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The memory of the results of rows ``hidden`` [N, d] that ask ``questions``, of which the
        first ``wanted`` [] are of interest."""
        count = len(hidden)
        memory = torch.zeros(
            count * (4 + 2 * self._capacity), dtype=torch.int32, device=hidden.device
        )
        results = unpack_results(memory, count)
        results.finite.copy_(torch.isfinite(hidden).all(dim=1))
        together = max(1, LOGITS_AT_ONCE // len(self._weight))
        for first in range(0, count, together):
            own = slice(first, first + together)
            products = every_logit(
                Factors.of(hidden[own], self._weight), None if wanted is None else wanted - first
            )
            reals = questions.reals[own]
            found = nuclei(self._finished(products), reals[:, 0], reals[:, 4], self._capacity)
            room = found.ids.shape[1]
            results.counts[own] = found.counts.clamp(max=self._capacity + 1)
            results.candidates[own, :room] = found.ids
            results.logits[own, :room] = products.gather(1, found.ids)
        nothing = torch.zeros(count + 1, dtype=torch.int64, device=hidden.device)
        support = Support(nothing, torch.zeros(1, ENTRY, dtype=torch.int32, device=hidden.device))
        levels = torch.empty(count, device=hidden.device)
        draw(questions, results.candidates, results, self._post, support, levels=levels)
        return memory

    @staticmethod
    def _results(memory: torch.Tensor, rows: int) -> StepResults:
        return StepResults.of(memory, unpack_results(memory, rows).largest, rows)

    def _sent(self, values: object) -> torch.Tensor:
        here = torch.as_tensor(values)
        there = torch.empty_like(here, device=self._weight.device)
        send(there, here)
        return there

    def _finished(self, products: torch.Tensor) -> torch.Tensor:
        """`kernels.rows.postprocess` without a soft-cap: each an operation of fp32."""
        logits = products
        if self._post.bias is not None:
            logits = logits + self._post.bias
        return logits * self._post.scale if self._post.scale != 1.0 else logits

"""Rows of top-p alone on a device: their nucleus is found there, from every canonical logit.

What travels to the host is the nucleus, where all logits are half a megabyte a row. Its tokens are
exactly the host's (`kernels.truncate.device`).
"""

from __future__ import annotations

import torch

from lexshard.actors.head.gpu.device_step import StepResults, send
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.rows.triton_kernel import canonical_logits
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
        device, count = self._weight.device, len(rows)
        there = torch.empty(hidden.shape, device=device)
        send(there, hidden)
        questions = Questions(*map(self._sent, pack_questions(rows.search(), rows.controls)))
        memory = torch.zeros(count * (4 + 2 * self._capacity), dtype=torch.int32, device=device)
        results = unpack_results(memory, count)
        results.finite.copy_(torch.isfinite(there).all(dim=1))
        together = max(1, LOGITS_AT_ONCE // len(self._weight))
        for first in range(0, count, together):
            own = slice(first, first + together)
            products = canonical_logits(there[own], self._weight)
            reals = questions.reals[own]
            found = nuclei(self._finished(products), reals[:, 0], reals[:, 4], self._capacity)
            room = found.ids.shape[1]
            results.counts[own] = found.counts.clamp(max=self._capacity + 1)
            results.candidates[own, :room] = found.ids
            results.logits[own, :room] = products.gather(1, found.ids)
        nothing = torch.zeros(count + 1, dtype=torch.int64, device=device)
        support = Support(nothing, torch.zeros(1, ENTRY, dtype=torch.int32, device=device))
        draw(questions, results.candidates, results, self._post, support)
        return StepResults.of(memory, questions.reals[:, 0], count)

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

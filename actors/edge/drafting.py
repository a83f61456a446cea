"""The device's end: what a small model guesses, in batches that fit a budget of bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.drafter.task import DraftTask
from lexshard.actors.edge.frames import MOST_GUESSES, FrameCodec, GuessBatch
from lexshard.actors.edge.threshold import ConformalThreshold
from lexshard.actors.proposal import Proposal
from lexshard.kernels.lattice import Kept, Lattice, draw, lattice_bits, quantise, sparsify


class EdgeDrafter:
    """Batches of guesses for one text, for a session that reads them by ``codec``.

    A batch ends before it would exceed ``budget_bits`` (of guesses, not of its header) and after
    ``longest`` guesses; one guess there always is. Distributions are cut off at ``threshold``,
    which mode ``csqs`` needs, and no other. Raises ValueError for settings that do not fit.
    """

    def __init__(
        self,
        drafter: Drafter,
        codec: FrameCodec,
        *,
        budget_bits: int = 5_000,
        longest: int = 16,
        threshold: ConformalThreshold | None = None,
    ) -> None:
        if (threshold is None) != (codec.mode != "csqs"):
            raise ValueError("a threshold is what csqs cuts off at, and csqs alone")
        if budget_bits < 1 or not 1 <= longest <= MOST_GUESSES:
            raise ValueError(f"a batch has 1 to {MOST_GUESSES} guesses and a budget above 0 bits")
        self._drafter = drafter
        self._codec = codec
        self._budget = budget_bits
        self._longest = longest
        self._threshold = threshold
        self._number = 0

    def draft(self, task: DraftTask) -> GuessBatch:
        """The next batch for the text of ``task``, of at most its ``most`` guesses."""
        most = min(task.most, self._longest)
        number, self._number = self._number, (self._number + 1) % 65_536
        if self._codec.mode == "same-token":
            most = min(most, max(1, self._budget // self._codec.token_bits))
            [drafted] = self._drafter.propose([replace(task, most=most, propose=False)])
            return GuessBatch(number, len(task.history), tuple(drafted.token_ids))
        return self._distributions(number, task, most)

    def _distributions(self, number: int, task: DraftTask, most: int) -> GuessBatch:
        """One guess after the other: each is drawn from what the other side will be told."""
        history = list(task.history)
        token_ids: list[int] = []
        lattices: list[Lattice] = []
        left = self._budget
        while len(token_ids) < most:
            step = replace(task, history=history, most=1, propose=True)
            [drafted] = self._drafter.propose([step])
            if not drafted.proposals:  # it has not yet read all that has been said
                break
            kept = self._kept(drafted.proposals[0])
            lattice = quantise(kept, self._codec.resolution)
            left -= self._codec.guess_bits(lattice)
            if left < 0 and token_ids:
                break
            if self._threshold is not None:
                self._threshold.drafted(kept.dropped)
            token_ids.append(draw(lattice, task.key, len(history)))
            lattices.append(lattice)
            history.append(token_ids[-1])
        return GuessBatch(number, len(task.history), tuple(token_ids), tuple(lattices))

    def _kept(self, proposal: Proposal) -> Kept:
        """The tokens whose shares the other side is told."""
        codec, threshold = self._codec, self._threshold
        size, scale = codec.vocabulary_size, proposal.inverse_temperature
        order = np.argsort(proposal.ids)
        ids, logits = proposal.ids[order], proposal.logits[order]
        if threshold is None:
            most = size if codec.mode == "qs" else min(codec.size, size)
            return _filled(sparsify(ids, logits, inverse_temperature=scale, most=most), most, size)
        kept = sparsify(ids, logits, inverse_temperature=scale, threshold=threshold.value)
        own = lattice_bits(size, len(kept.ids), codec.resolution)
        if own <= lattice_bits(size, size, codec.resolution):
            return kept
        # Which of so many are kept would take more bits than to tell of all.
        return _filled(sparsify(ids, logits, inverse_temperature=scale), size, size)

    def heard(self, stood: int) -> None:
        """The verdict on the last batch: so many of its guesses stand."""
        if self._threshold is not None:
            self._threshold.heard(stood)


def _filled(kept: Kept, count: int, vocabulary_size: int) -> Kept:
    """As many tokens as ``count``, those that were not kept without a share."""
    missing = count - len(kept.ids)
    if not missing:
        return kept
    others = np.setdiff1d(np.arange(vocabulary_size, dtype=np.int32), kept.ids)[:missing]
    ids = np.concatenate([kept.ids, others])
    shares = np.concatenate([kept.probabilities, np.zeros(missing)])
    order = np.argsort(ids)
    return Kept(ids[order], shares[order], kept.dropped)

"""The device's end: what a small model guesses, in batches that fit a budget of bits."""

from __future__ import annotations

import numpy as np

from lexshard.actors.drafter.draft_cache import MOST_PENDING
from lexshard.actors.drafter.protocol import GuessingModel
from lexshard.actors.drafter.task import Draft, DraftTask
from lexshard.actors.edge.frames import MOST_GUESSES, FrameCodec, GuessBatch
from lexshard.actors.edge.threshold import ConformalThreshold
from lexshard.actors.proposal import Proposal
from lexshard.actors.states.sequence_state import SequenceState
from lexshard.kernels.lattice import Kept, Lattice, draw, lattice_bits, quantise, sparsify


class EdgeDrafter:
    """Batches of guesses for one text, the ``sequence`` of the drafter, drawn as ``state`` says; to
    be read by ``codec``.

    A batch ends before it would exceed ``budget_bits`` (of guesses, not of its header) and after
    ``longest`` guesses; one guess there always is. Distributions are cut off at ``threshold``,
    which mode ``csqs`` needs, and no other. Raises ValueError for settings that do not fit.
    """

    def __init__(
        self,
        drafter: GuessingModel,
        codec: FrameCodec,
        state: SequenceState,
        sequence: int,
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
        self._state = state
        self._sequence = sequence
        self._budget = budget_bits
        self._longest = longest
        self.threshold = threshold
        self._first = 0  # position of the first guess that the threshold has not heard of

    def draft(self, history: list[int], most: int) -> GuessBatch:
        """At most ``most`` guesses at what follows ``history``, in a batch without a number. One
        without guesses asks for a token."""
        most = min(most, self._longest)
        if most == 0:
            return GuessBatch(0, len(history), ())
        if self._codec.mode == "same-token":
            most = min(most, max(1, self._budget // self._codec.token_bits))
            drafted = self._propose(history, most)
            return GuessBatch(0, len(history), tuple(drafted.token_ids))
        return self._distributions(history, most)

    def probe(self, history: list[int], most: int) -> tuple[int, ...]:
        """Guesses that are not sent: whether it is worth while to send some."""
        return tuple(self._propose(history, most).token_ids)

    def _propose(self, history: list[int], most: int, *, propose: bool = False) -> Draft:
        """Guesses, as soon as the model has read the history: a long one takes several calls."""
        state, parameters = self._state, self._state.parameters
        task = DraftTask(
            self._sequence,
            history,
            most,
            state.key,
            state.inverse_temperature,
            propose,
            state.top_k,
            parameters.top_p,
            parameters.min_p,
        )
        for _ in range(len(history) // MOST_PENDING + 1):
            [drafted] = self._drafter.propose([task])
            if drafted.token_ids:
                break
        return drafted

    def _distributions(self, history: list[int], most: int) -> GuessBatch:
        """One guess after the other: each is drawn from what the other side will be told."""
        position, history = len(history), list(history)
        if self.threshold is not None and not self.threshold.drafting:
            self._first = position
        token_ids: list[int] = []
        lattices: list[Lattice] = []
        left = self._budget
        while len(token_ids) < most:
            drafted = self._propose(history, 1, propose=True)
            if not drafted.proposals:  # it has no room for the text
                break
            kept = self._kept(drafted.proposals[0])
            lattice = quantise(kept, self._codec.resolution)
            left -= self._codec.guess_bits(lattice)
            if left < 0 and token_ids:
                break
            if self.threshold is not None:
                self.threshold.drafted(kept.dropped)
            token_ids.append(draw(lattice, self._state.key, len(history)))
            lattices.append(lattice)
            history.append(token_ids[-1])
        return GuessBatch(0, position, tuple(token_ids), tuple(lattices))

    def _kept(self, proposal: Proposal) -> Kept:
        """The tokens whose shares the other side is told."""
        codec, threshold = self._codec, self.threshold
        size, scale = codec.vocabulary_size, proposal.inverse_temperature
        order = np.argsort(proposal.ids)
        ids, logits = proposal.ids[order], proposal.logits[order]
        if scale == 0:  # the best token is certain
            best = int(np.argmax(logits))
            ids, logits, scale = ids[best : best + 1], np.zeros(1, np.float32), 1.0
        if threshold is None:
            most = size if codec.mode == "qs" else min(codec.size, size)
            return _filled(sparsify(ids, logits, inverse_temperature=scale, most=most), most, size)
        kept = sparsify(ids, logits, inverse_temperature=scale, threshold=threshold.value)
        own = lattice_bits(size, len(kept.ids), codec.resolution)
        if own <= lattice_bits(size, size, codec.resolution):
            return kept
        # Which of so many are kept would take more bits than to tell of all.
        return _filled(sparsify(ids, logits, inverse_temperature=scale), size, size)

    def heard(self, length: int, *, goes_on: bool) -> None:
        """Prompt and output have come to ``length`` tokens; what was guessed behind them
        ``goes_on``, or was wrong."""
        if self.threshold is not None:
            self.threshold.heard(max(0, length - self._first), goes_on=goes_on)
            self._first = max(self._first, length)
        if not goes_on:
            self._drafter.roll_back(self._sequence, length)

    def close(self) -> None:
        """The text has ended."""
        self._drafter.forget(self._sequence)


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

"""The device's end: what a small model guesses, in batches that fit a budget of bits."""

from __future__ import annotations

from functools import partial

import numpy as np

from lexshard.actors.drafter.draft_cache import MOST_PENDING
from lexshard.actors.drafter.protocol import GuessingModel
from lexshard.actors.drafter.task import Draft, DraftTask
from lexshard.actors.edge.frames import FrameCodec, GuessBatch
from lexshard.actors.edge.lattice import Lattice, lattice_bits, least_bits
from lexshard.actors.edge.settings import EdgeSettings
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.proposal import Proposal
from lexshard.actors.states.sequence_state import SequenceState
from lexshard.kernels.lattice import draw, quantise, sparsify


class EdgeDrafter:
    """Guesses at what is said to ``request``, drawn as it says; the ``model``'s ``sequence``."""

    def __init__(
        self,
        model: GuessingModel,
        settings: EdgeSettings,
        request: Request,
        sequence: int,
        vocabulary_size: int,
    ) -> None:
        self._state = SequenceState(request, vocabulary_size, ())
        # At temperature 0 nothing is drawn: an id tells all there is to tell.
        mode = settings.mode if self._state.inverse_temperature else "same-token"
        self.codec = FrameCodec(mode, vocabulary_size, settings.resolution, settings.size)
        self.threshold = settings.threshold()  # in other modes it hears of no token
        self._model = model
        self._settings = settings
        self._sequence = sequence
        self._heard = 0  # length of the text that the threshold has heard of

    def draft(self, history: list[int], most: int) -> GuessBatch:
        """A batch without a number: 1 to ``most`` guesses, or none where the model has no room."""
        position, left = len(history), self._settings.budget_bits
        most = min(most, self._settings.longest)
        if self.codec.mode == "same-token":
            most = min(most, max(1, left // self.codec.token_bits))
            return GuessBatch(0, position, self.tokens(history, most))
        tokens, lattices = list(history), list[Lattice]()
        # One guess after the other: each is drawn from what the other side will be told.
        while len(lattices) < most:
            drafted = self._propose(tokens, 1, propose=True)
            if not drafted.proposals:  # it has no room for the text
                break
            lattice, dropped = self._quantised(drafted.proposals[0])
            left -= self.codec.guess_bits(lattice)
            if left < 0 and lattices:
                break
            if self.codec.mode == "csqs":
                self.threshold.drafted(dropped)
            lattices.append(lattice)
            tokens.append(draw(lattice.likely, lattice.logits, self._state.key, len(tokens)))
        return GuessBatch(0, position, tuple(tokens[position:]), tuple(lattices))

    def tokens(self, history: list[int], most: int) -> tuple[int, ...]:
        """Guesses alone; none where the model has no room for the text."""
        return tuple(self._propose(history, most).token_ids)

    def _propose(self, history: list[int], most: int, *, propose: bool = False) -> Draft:
        """Guesses, as soon as the model has read the history: a long one takes several calls."""
        task = DraftTask.of(self._sequence, self._state, history, most, propose=propose)
        for _ in range(len(history) // MOST_PENDING + 1):
            [drafted] = self._model.propose([task])
            if drafted.token_ids:
                break
        return drafted

    def _quantised(self, proposal: Proposal) -> tuple[Lattice, float]:
        """What the other side is told of a guess's distribution, and the mass that this drops."""
        size, parts = self.codec.vocabulary_size, self.codec.resolution
        order, scale = proposal.ids.argsort(), proposal.inverse_temperature
        ids, logits = proposal.ids[order], proposal.logits[order]
        some = partial(sparsify, ids, logits, inverse_temperature=scale)
        if self.codec.mode != "csqs":
            told = self.codec.fixed_size
            kept = some(most=told)
        else:
            kept = some(threshold=self.threshold.value)
            told = len(kept.ids)
            if least_bits(size, told, parts) > lattice_bits(size, size, parts):
                # Which of so many are kept would take more bits than to tell of all.
                kept, told = some(), size
        counts = np.zeros(size, np.int64)
        counts[kept.ids] = quantise(kept.probabilities, parts)
        # There may be fewer than have to be told: others without a share are told with them.
        others = np.setdiff1d(np.arange(told, dtype=np.int32), kept.ids)[: told - len(kept.ids)]
        ids = np.union1d(kept.ids, others)
        return Lattice(ids, counts[ids]), kept.dropped

    def heard(self, length: int, *, goes_on: bool) -> None:
        """The text has ``length`` tokens now; what was guessed to follow ``goes_on``, or fell."""
        self.threshold.heard(length - self._heard, goes_on=goes_on)
        self._heard = length
        if not goes_on:
            self._model.roll_back(self._sequence, length)

    def close(self) -> None:
        """The text has ended."""
        self._model.forget(self._sequence)


def warm_up(model: GuessingModel, settings: EdgeSettings, vocabulary_size: int) -> None:
    """Compiles what drafting in this mode takes: the first text is not to take it for its price."""
    request = Request("warm up", 0, (0, 1), SamplingParameters())
    drafter = EdgeDrafter(model, settings, request, 0, vocabulary_size)
    drafter.codec.decode(drafter.codec.encode(drafter.draft([0, 1], 2)))
    drafter.close()

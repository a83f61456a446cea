"""The device's end: what a small model guesses, in batches that fit a budget of bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.drafter.task import Draft, DraftTask
from lexshard.actors.edge.frames import (
    MOST_GUESSES,
    MOST_RESOLUTION,
    EdgeMode,
    FrameCodec,
    GuessBatch,
)
from lexshard.actors.edge.lattice import Lattice, lattice_bits, least_bits
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.proposal import Proposal
from lexshard.actors.states.sequence_state import SequenceState
from lexshard.kernels.lattice import draw, quantise, sparsify


class ConformalThreshold:
    """Below it a drafted distribution's tokens are dropped. A token that drops more mass than
    ``alpha`` lowers it, one that drops less raises it, by the rate ``eta`` (C-SQS, equation 8 and
    algorithm 1): so tokens that the verifier heard of drop ``alpha`` at most on the average. It
    begins with ``first``. Raises ValueError for values that bound nothing.

    What is kept may go below 0, to ``-eta (1 - alpha)``: a clamp would give back what is never paid
    (docs/edge.md). What is used may not. Above 1, where it would only save up, it is clamped."""

    def __init__(self, alpha: float, eta: float, first: float) -> None:
        if not 0 < alpha < 1 or not 0 < eta < float("inf") or not 0 <= first <= 1:
            raise ValueError(
                f"alpha {alpha} must be between 0 and 1, eta {eta} above 0, and the first "
                f"threshold {first} from 0 to 1"
            )
        self._alpha, self._eta, self._first = alpha, eta, first
        self._states = [first]  # of the tokens on their way, and of the next one
        self._dropped: list[float] = []  # by the tokens on their way
        self.tokens = 0  # that the verifier has heard of
        self.dropped = 0.0  # by them, in all

    @property
    def value(self) -> float:
        """Tokens less likely than this are dropped of the next distribution."""
        return max(0.0, self._states[-1])

    def drafted(self, dropped: float) -> None:
        """A token was drafted with `value`, which dropped so much; none at a threshold of 0."""
        self._dropped.append(dropped)
        self._states.append(min(1.0, self._states[-1] - self._eta * (dropped - self._alpha)))

    def heard(self, used: int, *, goes_on: bool = False) -> None:
        """Of the tokens that were drafted, ``used`` have been said, as they were guessed or, the
        last one, otherwise. What was drafted behind them ``goes_on``, or never was."""
        used = min(used, len(self._dropped))
        self.tokens += used
        self.dropped += sum(self._dropped[:used])
        del self._states[:used], self._dropped[:used]
        if not goes_on:
            del self._states[1:], self._dropped[:]

    @property
    def average(self) -> float:
        """The mass that tokens dropped on the average."""
        return self.dropped / max(1, self.tokens)

    @property
    def bound(self) -> float:
        """What `average` cannot exceed, whatever the distributions are."""
        spent = self._first + self._eta * (1 - self._alpha)
        return self._alpha + spent / (self._eta * max(1, self.tokens))


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """A batch ends before it would exceed ``budget_bits`` (of guesses, not of its header) and after
    ``longest`` guesses. ``thrift`` is `DraftPace`'s, ``size`` and ``resolution`` `FrameCodec`'s;
    what follows is `ConformalThreshold`'s. Raises ValueError for what is out of its bounds."""

    mode: EdgeMode = "same-token"
    size: int = 32
    resolution: int = 100
    budget_bits: int = 5_000
    longest: int = 16
    thrift: float = 0.1
    alpha: float = 0.05
    eta: float = 0.01
    first_threshold: float = 0.01

    def __post_init__(self) -> None:
        if self.budget_bits < 1 or not 1 <= self.longest <= MOST_GUESSES:
            raise ValueError(f"a batch has 1 to {MOST_GUESSES} guesses and a budget above 0 bits")
        if not 0 <= self.thrift <= 1:
            raise ValueError(f"thrift {self.thrift} must be from 0 to 1")
        if self.size < 1 or not 1 <= self.resolution <= MOST_RESOLUTION:
            raise ValueError(f"a distribution has a token and 1 to {MOST_RESOLUTION} parts")
        self.threshold()

    def threshold(self) -> ConformalThreshold:
        """Of one text, in mode ``csqs``."""
        return ConformalThreshold(self.alpha, self.eta, self.first_threshold)


class EdgeDrafter:
    """Guesses at what is said to ``request``, drawn as it says; the ``model``'s ``sequence``."""

    def __init__(
        self,
        model: Drafter,
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
        self._heard = 0  # length of the text: what a history has behind it are guesses

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
        own, ahead = (self._sequence, self._state), len(history) - self._heard
        task = DraftTask.of(*own, history, most, propose=propose, ahead=ahead)
        [drafted] = self._model.propose([task])
        while drafted.reads:
            [drafted] = self._model.propose([task])
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

    def close(self) -> None:
        """The text has ended."""
        self._model.forget(self._sequence)


def warm_up(model: Drafter, settings: EdgeSettings, vocabulary_size: int) -> None:
    """Compiles what drafting in this mode takes: the first text is not to take it for its price."""
    request = Request("warm up", 0, (0, 1), SamplingParameters())
    drafter = EdgeDrafter(model, settings, request, 0, vocabulary_size)
    drafter.codec.decode(drafter.codec.encode(drafter.draft([0, 1], 2)))
    drafter.close()

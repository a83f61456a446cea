"""Decisions from a head and loose sequence states, as an engine makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.messages import SamplerSettings
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.messages import Certificate, RowDecision
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.sequence_state import SequenceState, SequenceStates


class LooseStates(SequenceStates):
    """States that the test keeps."""

    def __init__(self, vocabulary_size: int, states: Sequence[SequenceState]) -> None:
        super().__init__(vocabulary_size, (), 1)
        self._states = dict(enumerate(states))


def need_of(state: SequenceState, drafted: tuple[int, ...] = ()) -> Need:
    """What a row asks that follows the sequence's tokens and ``drafted``."""
    return LooseStates(1, [state]).table(RowNames((0,), (drafted,))).need(0)


def decide(
    candidates: Candidates, states: Sequence[SequenceState], vocabulary_size: int
) -> list[RowDecision | None]:
    """A decision per row of ``candidates``, row ``r`` for ``states[r]``."""
    loose = LooseStates(vocabulary_size, states)
    decisions = OwnDecisions(Sampler(SamplerSettings(vocabulary_size, ()), loose), loose)
    return decisions.submit(0, RowNames(tuple(range(len(states)))), candidates).result()


def screen_and_decide(
    head: Any, hidden: torch.Tensor | np.ndarray, states: Sequence[SequenceState]
) -> tuple[list[RowDecision | None], tuple[Certificate, ...]]:
    """Decisions of the rows of ``hidden`` [N, d], with the head's certificates."""
    candidates = head.rescore(
        head.screen(
            hidden,
            LooseStates(head.vocabulary_size, states).table(RowNames(tuple(range(len(states))))),
        )
    )
    return decide(candidates, states, head.vocabulary_size), candidates.certificates

"""A head that knows its sequences: from hidden states and names of rows to candidates.

What a row needs (guarantee, noise, processors) follows from its sequence's sampling state. A head
in the engine's process shares the engine's states; one elsewhere keeps its own, from the same
deltas that samplers get, so that names of rows are all that travels with hidden states.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from actors.candidates import Candidates
from actors.head.output_head import OutputHead, Thresholds
from actors.states.deltas import Deltas
from actors.states.need import Need
from actors.states.sequence_state import SequenceStates


class SequenceHead:
    """``head`` with the ``states`` of the sequences whose rows it is asked about."""

    def __init__(self, head: OutputHead, states: SequenceStates) -> None:
        self.head = head
        self._states = states

    def apply(self, deltas: Deltas) -> None:
        """What happened to the sequences happens here; not where states are shared."""
        self._states.apply(deltas)

    def candidates(
        self,
        hidden: torch.Tensor,
        sequences: Sequence[int],
        drafted: Sequence[tuple[int, ...]] = (),
        whole: Container[int] = (),
    ) -> Candidates:
        """The candidates of rows ``hidden`` [N, d]; row ``r`` draws for ``sequences[r]``.

        ``drafted[r]`` are the guesses that row ``r`` assumes to follow its sequence's tokens;
        empty where no row assumes any. Of the rows ``whole``, of sequences with guesses, every
        token is a candidate. Raises `NonFiniteHiddenError` naming the rows that contain NaN or
        infinity.
        """
        needs = self._states.needs(sequences, drafted, whole)
        return self.head.rescore(self._screen(hidden, needs, sequences, drafted))

    def _screen(
        self,
        hidden: torch.Tensor,
        needs: Sequence[Need],
        sequences: Sequence[int],
        drafted: Sequence[tuple[int, ...]],
    ) -> Thresholds:
        """For heads that must be told more than needs (`actors.head.sharded`)."""
        return self.head.screen(hidden, needs)

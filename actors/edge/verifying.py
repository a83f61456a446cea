"""The cloud's end: a batch of guesses as an engine hears it, and a sequence that waits for them."""

from __future__ import annotations

import numpy as np

from lexshard.actors.edge.frames import EdgeMode, GuessBatch
from lexshard.actors.messages import DraftDistribution, Drafting, Drafts
from lexshard.kernels.lattice import Lattice


def drafting_of(mode: EdgeMode) -> Drafting:
    """How the sequence of a session in this mode is guessed for."""
    return Drafting("client", "same-token" if mode == "same-token" else "same-distribution")


def drafts_of(batch: GuessBatch, request_id: str, choice: int) -> Drafts:
    """``batch`` for one sequence."""
    proposals = tuple(map(_distribution, batch.lattices))
    return Drafts(request_id, choice, batch.position, batch.token_ids, proposals)


def _distribution(lattice: Lattice) -> DraftDistribution:
    some = np.flatnonzero(lattice.counts)
    logits = np.log(lattice.counts[some].astype(np.float64))
    return DraftDistribution(tuple(lattice.ids[some].tolist()), tuple(logits.tolist()))

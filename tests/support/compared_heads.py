"""An engine whose every decision is made twice: from its head's candidates, and from all logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.own import OwnStep
from lexshard.actors.decision.plane import PendingStep
from lexshard.actors.engine.engine import Engine
from lexshard.actors.states.row_table import RowNames, RowTable


@dataclass(slots=True)
class Comparison:
    """Rows that have been decided, and of these the ones whose token all logits do not give."""

    rows: int = 0
    different: int = 0
    certified: int = 0  # rows of which not every logit was computed


def compare_decisions(engine: Engine) -> Comparison:
    """From now on the engine's head is asked twice per step, for the same hidden states.

    The second time every canonical logit is wanted, where the head is. Samplers decide from both;
    the engine goes on with the first.
    """
    comparison = Comparison()
    head, plane = engine._head, engine._plane
    screened, submit = head._decide, plane.submit
    dense: list[Candidates] = []

    def decide(hidden: torch.Tensor, rows: RowTable, *about: Any) -> Candidates:
        dense.append(screened(hidden, replace(rows, kinds=("dense",) * len(rows)), *about))
        return screened(hidden, rows, *about)

    def submit_both(step: int, names: RowNames, candidates: Candidates) -> PendingStep | OwnStep:
        expected = submit(step, names, dense.pop()).result()
        found = submit(step, names, candidates).result()
        for ours, theirs, certificate in zip(found, expected, candidates.certificates, strict=True):
            assert ours is not None
            assert theirs is not None
            comparison.rows += 1
            comparison.different += ours.token_id != theirs.token_id
            comparison.certified += certificate.guarantee != "dense"
        return submit(step, names, candidates)

    head._decide = decide  # type: ignore[method-assign]
    plane.submit = submit_both  # type: ignore[method-assign,assignment]
    return comparison

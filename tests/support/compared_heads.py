"""An engine whose every decision is made twice: from its head's candidates, and from all logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.plane import PendingStep
from lexshard.actors.engine.engine import Engine


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

    def decide(hidden: torch.Tensor, needs: Sequence[Any], *about: Any, **more: Any) -> Candidates:
        every = [replace(need, kind="dense") for need in needs]
        dense.append(screened(hidden, every, *about, **more))
        return screened(hidden, needs, *about, **more)

    def submit_both(
        step: int, sequences: Sequence[int], candidates: Candidates, *more: Any
    ) -> PendingStep:
        expected = submit(step, sequences, dense.pop(), *more).result()
        found = submit(step, sequences, candidates, *more).result()
        for ours, theirs, certificate in zip(found, expected, candidates.certificates, strict=True):
            assert ours is not None
            assert theirs is not None
            comparison.rows += 1
            comparison.different += ours.token_id != theirs.token_id
            comparison.certified += certificate.guarantee != "dense"
        return submit(step, sequences, candidates, *more)

    head._decide = decide  # type: ignore[method-assign]
    plane.submit = submit_both  # type: ignore[method-assign,assignment]
    return comparison

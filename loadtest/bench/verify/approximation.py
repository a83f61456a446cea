"""How far from the target what is emitted is, where weights that are not probabilities decide."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lexshard.kernels.verify.reference import log_softmax, sigmoid_weights
from lexshard.loadtest.bench.verify.workload import VerifyStep

EVALUATED = 8  # first drafts whose law is computed

Row = npt.NDArray[np.float64]  # [V]


def emitted_law(weights: Row, drafter: Row, proposed_weights: Row) -> Row:
    """The law of the token that takes a draft's place, where drafts come from ``drafter`` and
    ``weights / proposed_weights`` decides whether they stand."""
    stands = np.minimum(1.0, weights / np.maximum(proposed_weights, np.finfo(np.float64).tiny))
    left = np.maximum(0.0, weights - proposed_weights)
    left = left if left.any() else weights
    return np.asarray(drafter * stands + (drafter * (1 - stands)).sum() * left / left.sum())


def total_variation(one: Row, other: Row) -> float:
    return 0.5 * float(np.abs(one - other).sum())


def sigmoid_errors(steps: Sequence[VerifyStep], alpha: float, beta: float) -> list[float]:
    """Total variation between the target and what is emitted, for the first draft of a sequence."""
    errors = []
    for p, q in first_rows(steps):
        target, drafter = (np.exp(log_softmax(each, 1.0)) for each in (p, q))
        weights, proposed = (sigmoid_weights(each, 1.0, (alpha, beta)) for each in (p, q))
        errors.append(total_variation(emitted_law(weights, drafter, proposed), target))
    return errors


def drafter_distances(steps: Sequence[VerifyStep]) -> list[float]:
    """Total variation between target and drafter: what emitting every draft would be off by."""
    return [
        total_variation(np.exp(log_softmax(p, 1.0)), np.exp(log_softmax(q, 1.0)))
        for p, q in first_rows(steps)
    ]


def first_rows(
    steps: Sequence[VerifyStep],
) -> list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Target's and drafter's logits of the first draft of the first sequences."""
    found = [
        (step.logits[index * (step.gamma + 1)], step.proposed[index * step.gamma])
        for step in steps
        for index in range(step.batch)
    ]
    return found[:EVALUATED]

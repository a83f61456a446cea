"""Scores of rows: the bits of one normaliser, one comparison and one sort, in one pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels.logprobs import RowScores, reference, score_rows

SPECIAL = np.array([-np.inf, np.inf, -0.0, 0.0, 3e38, -3e38, 1e-40], np.float32)


def same(left: RowScores, right: RowScores) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(left, right, strict=True))


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 7),
    size=st.integers(1, 700),
    count=st.integers(0, 90),
    flavour=st.sampled_from(["plain", "ties", "special", "ascending", "excluded"]),
)
def test_cpu_has_the_bits_of_the_reference(
    seed: int, rows: int, size: int, count: int, flavour: str
) -> None:
    random = np.random.default_rng(seed)
    logits = (4 * random.standard_normal((rows, size))).astype(np.float32)
    if flavour == "ties":
        logits = logits.round(0)
    elif flavour == "special":
        logits = np.where(
            random.random(logits.shape) < 0.3, random.choice(SPECIAL, logits.shape), logits
        )
    elif flavour == "ascending":
        logits.sort(axis=1)
    elif flavour == "excluded":
        logits[random.random(logits.shape) < 0.95] = -np.inf
    token_ids = random.integers(0, size, rows)
    expected = reference.score_rows(logits, token_ids, min(count, size))
    got = score_rows(logits, token_ids, count)
    assert got.best_ids.shape == (rows, min(count, size))
    assert same(got, expected)


@pytest.mark.parametrize("size", [16_384, 151_936])
def test_large_vocabularies_agree(size: int) -> None:
    random = np.random.default_rng(size)
    logits = (3 * random.standard_normal((5, size))).astype(np.float32).round(2)
    token_ids = random.integers(0, size, 5)
    expected = reference.score_rows(logits, token_ids, 20)
    assert same(score_rows(logits, token_ids, 20), expected)


def test_refuses_what_does_not_fit() -> None:
    rows, ids = np.zeros((2, 5), np.float32), np.zeros(2, np.int64)
    for logits, token_ids, count in ((rows[0], ids, 1), (rows, ids[:1], 1), (rows, ids, -1)):
        with pytest.raises(ValueError, match="expected"):
            score_rows(logits, token_ids, count)
    with pytest.raises(ValueError, match="fp32"):
        score_rows(rows.astype(np.float64), ids, 1)

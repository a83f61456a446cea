"""Rows that test a guess, through the certified head: the one token that all logits would give."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from lexshard.actors.head.ladder import Ladder
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.screens import DENSE
from lexshard.actors.head.shard import Shard
from lexshard.actors.head.softmax.guess_tests import decide_by_candidates
from lexshard.actors.proposal import GuessTest, Proposal
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable, flatten_adjustments
from lexshard.actors.verification import emitted_tokens
from lexshard.kernels.draw import Controls
from lexshard.kernels.penalties import adjust
from lexshard.kernels.quantize import Kind, Tier, quantize
from tests.support.sampler_cases import verified_token
from tests.support.search_cases import random_adjustment

SIZE, COLUMNS, ROWS = 900, 64, 24
EVERY = np.arange(SIZE, dtype=np.int32)


def shard_of(screen: str) -> Shard:
    generator = torch.Generator().manual_seed(4)
    weight = 0.3 * torch.randn(SIZE, COLUMNS, generator=generator)
    ladder = None
    if screen != DENSE:
        tiers: dict[str, Tier] = {screen: quantize(weight, cast(Kind, screen))}
        ladder = Ladder(tiers, ((1, screen),))
    return Shard(weight, None, None, 1.0, SIZE, ladder=ladder)


def needs_of(random: np.random.Generator, logits: np.ndarray) -> list[Need]:
    """Guesses of a drafter that sees the logits dimly, or is certain; every fourth row draws."""
    needs = []
    for row in range(ROWS):
        key, position = int(random.integers(0, 2**63)), int(random.integers(0, 2**31))
        adjustment = random_adjustment(random, SIZE) if random.random() < 0.4 else None
        scale = float(np.float32(1 / random.choice([1.0, 0.7])))
        if row % 4 == 3:
            needs.append(Need("top1", key=key, position=position, inverse_temperature=scale))
            continue
        ids = np.sort(random.choice(SIZE, 200, replace=False)).astype(np.int32)
        dim = (logits[row][ids] + 0.5 * random.standard_normal(200)).astype(np.float32)
        scores = dim.astype(np.float64) * scale + random.gumbel(size=200)
        proposal = None if row % 4 == 2 else Proposal(ids, dim, scale)
        guess = GuessTest(int(ids[scores.argmax()]), proposal)
        needs.append(
            Need(
                "dense",
                key=key,
                position=position,
                inverse_temperature=scale,
                adjustment=adjustment,
                guess=guess,
            )
        )
    return needs


def emitted_by_all_logits(need: Need, raw: np.ndarray) -> int:
    assert need.guess is not None
    adjusted = adjust(EVERY, raw, np.array([0, SIZE]), flatten_adjustments([need.adjustment]))
    return verified_token(need.guess, adjusted, need.inverse_temperature, need.key, need.position)


@pytest.mark.parametrize("screen", [DENSE, "int8", "int4"])
def test_bounds_emit_what_all_logits_emit(screen: str) -> None:
    """And they nearly always tell, whatever screens: the dense screen's are tight."""
    random = np.random.default_rng(8)
    shard = shard_of(screen)
    decided = tested = stood = 0
    for _ in range(8):
        hidden = random.standard_normal((ROWS, COLUMNS)).astype(np.float32)
        dense = shard.rescore(shard.screen(hidden, RowTable.of([Need("dense")] * ROWS)))
        logits = dense.raw.reshape(ROWS, SIZE)
        needs = needs_of(random, logits)
        found = shard.rescore(shard.screen(hidden, RowTable.of(needs)))
        for row, need in enumerate(needs):
            ids = found.ids[found.offsets[row] : found.offsets[row + 1]]
            if need.guess is None:
                assert len(ids) < SIZE
                continue
            tested += 1
            own = found.raw[found.offsets[row] : found.offsets[row + 1]]
            assert (own == logits[row][ids]).all()
            if len(ids) == SIZE:
                assert found.certificates[row].guarantee == "dense"
                continue
            decided += 1
            assert ids.tolist() == [emitted_by_all_logits(need, logits[row])]
            assert found.certificates[row].guarantee == "deterministic"
            stood += ids[0] == need.guess.token_id
    assert decided > 0.9 * tested
    assert 0.1 * tested < stood < 0.9 * tested


def test_candidates_emit_what_all_logits_emit() -> None:
    """Of rows that truncation leaves little of; a nucleus is cut no further."""
    random = np.random.default_rng(9)
    shard = shard_of("int8")
    kinds = (
        Need("topk", k=20, top_p=0.9),
        Need("topk", k=5, min_p=0.02),
        Need("minp", min_p=0.05),
        Need("nucleus", top_p=0.7),
    )
    decided = 0
    for _ in range(4):
        hidden = random.standard_normal((ROWS, COLUMNS)).astype(np.float32)
        logits = shard.rescore(shard.screen(hidden, RowTable.of([Need("dense")] * ROWS))).raw
        logits = logits.reshape(ROWS, SIZE)
        tested = needs_of(random, logits)
        guesses = {row: each.guess for row, each in enumerate(tested) if each.guess is not None}
        needs = [
            replace(
                kinds[row % len(kinds)],
                key=each.key,
                position=each.position,
                inverse_temperature=each.inverse_temperature,
                adjustment=each.adjustment,
            )
            for row, each in enumerate(tested)
        ]
        found = shard.rescore(shard.screen(hidden, RowTable.of(needs)))
        # The guesses of one call are all of a drafter that is certain, or none is.
        for certain in (True, False):
            tests = {row: g for row, g in guesses.items() if (g.proposal is None) == certain}
            emitted = decide_by_candidates(found, RowTable.of(needs), tests, SIZE)
            for row in range(ROWS):
                ids = emitted.ids[emitted.offsets[row] : emitted.offsets[row + 1]]
                before = found.ids[found.offsets[row] : found.offsets[row + 1]]
                if row not in tests or len(before) == SIZE:
                    assert (ids == before).all()
                    continue
                decided += 1
                need = needs[row]
                [expected] = emitted_tokens(
                    logits[row : row + 1],
                    [tests[row]],
                    Controls(
                        np.array([need.inverse_temperature]),
                        np.array([need.k]),
                        np.array([need.top_p]),
                        np.full(1, -np.inf),
                        np.array([need.key], np.uint64),
                        np.array([need.position], np.uint64),
                    ),
                    [need.min_p],
                    flatten_adjustments([need.adjustment]),
                    None,
                )
                assert ids.tolist() == [expected]
    assert decided > 40


def test_a_shard_of_some_tokens_gives_all_of_them() -> None:
    """What the others have is not known to it."""
    weight = torch.randn(SIZE // 2, COLUMNS, generator=torch.Generator().manual_seed(4))
    owned = OwnedRows.of_tokens(np.arange(0, SIZE, 2), SIZE)
    shard = Shard(weight, None, None, 1.0, SIZE, owned=owned)
    need = Need("dense", inverse_temperature=1.0, guess=GuessTest(4))
    hidden = np.ones((1, COLUMNS), np.float32)
    assert len(shard.rescore(shard.screen(hidden, RowTable.of([need]))).ids) == SIZE // 2

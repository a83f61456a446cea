"""One call from hidden states to candidates: the very results of the calls it replaces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lexshard.actors.head import plain_steps
from lexshard.actors.head.ladder import Ladder
from lexshard.actors.head.plain_steps import DecidedRows
from lexshard.actors.head.shard import Shard
from lexshard.actors.states.mask import Mask
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels import pool
from lexshard.kernels.certified import certified_candidates
from lexshard.kernels.linear import pack
from lexshard.kernels.quantize import quantize
from lexshard.kernels.rows import canonical_logits
from lexshard.kernels.screen.tile import PANEL
from tests.support.certificate_needs import random_needs
from tests.support.certificate_oracle import truth, violations
from tests.support.search_cases import random_adjustment

pytestmark = pytest.mark.vectors

KINDS = ("greedy", "gumbel", "topk", "minp", "nucleus-draw")
SHARES = (0.2,) * 5


def shards(
    random: np.random.Generator, size: int, columns: int, half: bool, tier: str = "int8"
) -> tuple[Shard, Shard]:
    """One that decides plain rows at once, and one that takes every step."""
    weight = torch.from_numpy(random.standard_normal((size, columns)).astype(np.float32))
    weight = weight.bfloat16() if half else weight
    ladder = Ladder({tier: quantize(weight.float(), tier)}, ((1, tier),))
    head, packed = (weight, None, None, 1.0, size), pack(weight)
    both = [Shard(*head, linear=packed, ladder=ladder) for _ in range(2)]
    both[1]._plain._rows.clear()
    return both[0], both[1]


@pytest.mark.parametrize("tier", ["int8", "int4"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_candidates_and_certificates(
    seed: int, half: bool, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of few tokens aside."""
    monkeypatch.setattr(plain_steps, "SCREENED_BESIDE", 0)
    random = np.random.default_rng(seed)
    size = int(random.integers(PANEL, 3000))
    at_once, in_steps = shards(random, size, int(random.integers(3, 150)), half, tier)
    try:
        for rows in (1, 2, 3, 4, 5, 8, 13, 33):
            pool.set_threads(int(random.integers(1, 4)))
            batch = random_needs(random, size, rows, kinds=KINDS, shares=SHARES, adjusted=0.3)
            table = RowTable.of(batch.needs)
            hidden = random.standard_normal((rows, at_once.weight.shape[1])).astype(np.float32)
            found, expected = at_once.screen(hidden, table), in_steps.screen(hidden, table)
            np.testing.assert_array_equal(found.tau, expected.tau)
            ours, theirs = at_once.rescore(found), in_steps.rescore(expected)
            for name in ("ids", "raw", "offsets"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            assert ours.certificates == theirs.certificates
    finally:
        pool.set_threads(1)


def _draws(
    random: np.random.Generator, shard: Shard, adjusted: float
) -> tuple[str, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Of rows that draw from their nucleus: what is wrong, which of them took products with all
    weights, and of which not even these told."""
    size, columns = shard.weight.shape
    batch = random_needs(random, size, 60, kinds=KINDS[-1:], shares=(1.0,), adjusted=adjusted)
    table = RowTable.of(batch.needs)
    hidden = random.standard_normal((60, columns)) * random.uniform(0.1, 1.0, (60, 1))
    hidden = hidden.astype(np.float32)
    [rows] = shard._plain._rows.values()
    found = certified_candidates(
        hidden, rows, table.search(), table.flat, table.controls.top_p.copy()
    )
    assert found is not None
    raw = canonical_logits(hidden, shard._rescorer.weight).reshape(60, size)
    screened = shard.screen(hidden, table)
    assert isinstance(screened.screening, DecidedRows)
    wrong = violations(truth(raw, batch), batch, shard.rescore(screened))
    return "".join(wrong), found.again, ~found.members


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_what_bounds_of_a_screen_leave_open_of_draws_those_of_all_products_tell(
    seed: int, half: bool
) -> None:
    """Of tokens inside and outside of a nucleus, in flat rows and steep ones."""
    random = np.random.default_rng(seed)
    shard, _ = shards(random, int(random.integers(300, 3000)), 64, half)
    try:
        pool.set_threads(1 + seed % 3)
        wrong, again, left = _draws(random, shard, 0.3)
    finally:
        pool.set_threads(1)
    assert not wrong
    assert again.mean() > 0.15
    assert left.mean() < 0.1


def test_wrong_products_of_all_weights_are_noticed() -> None:
    """Half as large again as they are."""
    random, wrong = np.random.default_rng(3), ""
    for _ in range(4):
        shard, _ = shards(random, 2000, 64, True)
        [(name, honest)] = shard._plain._rows.items()
        larger = (honest.panels.astype(np.uint32) << 16).view(np.float32) * np.float32(1.5)
        panels = (larger.view(np.uint32) >> 16).astype(np.uint16)
        shard._plain._rows[name] = honest._replace(panels=panels)
        wrong += _draws(random, shard, 0.0)[0]
    assert wrong


@pytest.mark.parametrize("tier", ["int8", "int4"])
@pytest.mark.parametrize("seed", range(4))
def test_masks_of_many_tokens_are_decided_at_once(seed: int, tier: str) -> None:
    """With every other processor, and more wanted than a mask leaves."""
    random = np.random.default_rng(seed)
    size = int(random.integers(PANEL, 3000))
    at_once, in_steps = shards(random, size, 64, True, tier)
    for rows in (1, 3, 8):
        batch = random_needs(random, size, rows, kinds=KINDS, shares=SHARES)
        needs = []
        for need in batch.needs:
            share = float(random.choice([0.02, 0.3, 0.9, 1.0]))
            held = random.choice(size, int(share * size), replace=False)
            adjustment = replace(random_adjustment(random, size), mask=Mask.of_ids(held, size))
            needs.append(replace(need, adjustment=adjustment, k=need.k and size // 32))
        hidden = random.standard_normal((rows, 64)).astype(np.float32)
        table = RowTable.of(needs)
        found, expected = at_once.screen(hidden, table), in_steps.screen(hidden, table)
        assert isinstance(found.screening, DecidedRows)
        np.testing.assert_array_equal(found.tau, expected.tau)
        ours, theirs = at_once.rescore(found), in_steps.rescore(expected)
        for name in ("ids", "raw", "offsets"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert ours.certificates == theirs.certificates


@pytest.mark.parametrize("seed", range(12))
def test_masks_of_few_tokens_are_decided_at_once_beside_others(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few, and if all of them are banned. Where none is beside, or a screen of theirs takes
    longer than calls for them, each of their tokens is computed."""
    random = np.random.default_rng(seed)
    size = int(random.integers(PANEL, 3000))
    shard, _ = shards(random, size, 64, half=True)
    at_once = 0
    for rows in (2, 3, 8):
        batch = random_needs(random, size, rows, kinds=KINDS, shares=SHARES, adjusted=0.3)
        needs = list(batch.needs)
        masked = random.choice(rows, int(random.integers(1, rows)), replace=False)
        for row in masked.tolist():
            held = random.choice(size, int(random.integers(1, size // 64 + 1)), replace=False)
            adjustment = replace(random_adjustment(random, size), mask=Mask.of_ids(held, size))
            if random.random() < 0.2:
                adjustment = replace(adjustment, banned=np.sort(held).astype(np.int32))
            needs[row] = replace(needs[row], adjustment=adjustment)
        adjusted = np.array([need.adjustment is not None for need in needs])
        batch = replace(batch, needs=tuple(needs), adjusted=adjusted)
        table = RowTable.of(needs)
        hidden = random.standard_normal((rows, 64)).astype(np.float32)
        found = shard.screen(hidden, table)
        at_once += isinstance(found.screening, DecidedRows)
        offsets = size * np.arange(rows + 1)
        every = np.tile(np.arange(size, dtype=np.int32), rows)
        raw = shard._rescorer.raw(hidden, every, offsets, range(rows)).reshape(rows, size)
        right = truth(raw, batch)
        assert not "".join(violations(right, batch, shard.rescore(found)))
        alone = table.some(masked.tolist())
        assert not isinstance(shard.screen(hidden[masked], alone).screening, DecidedRows)
        with monkeypatch.context() as other:
            other.setattr(plain_steps, "SCREENED_BESIDE", size * 64 - 1)
            by_calls = shard.screen(hidden, table)
            assert not isinstance(by_calls.screening, DecidedRows)
            assert not "".join(violations(right, batch, shard.rescore(by_calls)))
    assert at_once >= 2  # of three, if one has too many candidates


def test_a_threshold_from_elsewhere_is_used() -> None:
    at_once, in_steps = shards(np.random.default_rng(1), 500, 64, half=False)
    hidden = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    table = RowTable.of([Need("top1")] * 3)
    found, expected = at_once.screen(hidden, table), in_steps.screen(hidden, table)
    assert isinstance(found.screening, DecidedRows)
    higher = np.asarray(found.tau) + 100.0
    ours = at_once.rescore(replace(found, tau=higher))
    theirs = in_steps.rescore(replace(expected, tau=higher))
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    assert not len(ours.ids)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_hidden_states_that_say_nothing_are_left_to_the_steps(value: float) -> None:
    at_once, in_steps = shards(np.random.default_rng(1), 500, 64, half=True)
    hidden = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    hidden[1, 5] = value
    table = RowTable.of([Need("top1")] * 3)
    found: list[object] = []
    for shard in (at_once, in_steps):
        try:
            candidates = shard.rescore(shard.screen(hidden, table))
            found.append((candidates.ids.tolist(), candidates.certificates))
        except ValueError as error:
            found.append(str(error))
    assert found[0] == found[1]

"""Masks are sets of tokens: in words, in rows of a shard, and counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.states.mask import REMEMBERED, Mask, Masks, ToldMasks
from lexshard.kernels.masks import count_of, ids_of, mask_words, rows_of_mask

SIZES = st.integers(1, 300)


@given(SIZES, st.data())
def test_a_mask_holds_the_ids_it_was_made_of(size: int, data: st.DataObject) -> None:
    ids = data.draw(st.sets(st.integers(-3, size + 3)))
    words = mask_words(ids, size)
    held = sorted(each for each in ids if 0 <= each < size)
    assert ids_of(words, size).tolist() == held
    assert count_of(words) == len(held)
    assert len(words) == -(-size // 64)
    mask = Mask.unpack(Mask(words, size).pack())
    assert mask.ids.tolist() == held
    assert mask.count == len(held)


@given(SIZES, st.data())
def test_rows_of_a_shard_have_the_bits_of_their_tokens(size: int, data: st.DataObject) -> None:
    masks = np.stack([mask_words(data.draw(st.sets(st.integers(0, size - 1))), size) for _ in "ab"])
    owned = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))), np.int32)
    for words, rows in zip(masks, rows_of_mask(masks, owned), strict=True):
        held = owned[ids_of(rows, len(owned))]
        assert held.tolist() == [each for each in owned if each in ids_of(words, size)]


def test_rows_of_the_same_mask_share_one() -> None:
    masks = Masks(100)
    words = mask_words([3, 99], 100)
    first = masks.of(words)
    words[:] = 0  # the caller's own memory
    assert first.ids.tolist() == [3, 99]
    assert masks.of(mask_words([3, 99], 100)) is first
    assert masks.of(words) is not first
    assert masks.of(words).number != first.number


@pytest.mark.parametrize("seed", range(5))
def test_both_ends_know_the_same_masks(seed: int) -> None:
    """However many there are, and however often one comes back after it was forgotten."""
    random = np.random.default_rng(seed)
    masks = Masks(64)
    here, there = ToldMasks(), ToldMasks()
    told_often = 0
    for _ in range(400):
        used = [masks.of(mask_words([int(each)], 2**9)) for each in random.integers(0, 400, 3)]
        told = here.unknown(used)
        told_often += len(told)
        numbers = [mask.number for mask in used]
        here.see(numbers, told)
        there.see(numbers, told)
        for mask in used:
            assert mask.number is not None
            assert np.array_equal(there[mask.number], mask.words)
        assert [*here._known] == [*there._known]
        assert len(here._known) <= REMEMBERED
    assert told_often < 1200

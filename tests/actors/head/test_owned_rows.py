"""Shards of any tokens give the answers of one shard with all of them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.head.certificates import merge_certificates
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.messages import Certificate
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.blocks import blocks_of
from lexshard.loadtest.bench.contenders.shard_group import ShardGroup
from tests.support.sharded_cases import drawn, random_needs, shard_of

settings.register_profile("shards", deadline=None, max_examples=20)
settings.load_profile("shards")

COLUMNS = 32
Split = Callable[[np.random.Generator, int], list[OwnedRows]]


def by_blocks(random: np.random.Generator, size: int) -> list[OwnedRows]:
    """Blocks dealt out at random, in any order."""
    order = random.permutation(blocks_of(size))
    cuts = np.sort(random.integers(1, len(order), random.integers(0, 4))) if len(order) > 1 else []
    parts = [part for part in np.split(order, cuts) if len(part)]
    return [OwnedRows.of_blocks(part.tolist(), size) for part in parts]


def by_tokens(random: np.random.Generator, size: int) -> list[OwnedRows]:
    """Tokens dealt out at random."""
    owner = random.integers(0, 3, size)
    parts = [np.flatnonzero(owner == each) for each in range(3)]
    return [OwnedRows.of_tokens(random.permutation(part), size) for part in parts if len(part)]


def check(random: np.random.Generator, split: Split, screens: Sequence[str]) -> list[Certificate]:
    """One head, whole and in parts: the same tokens from the same numbers."""
    size = int(random.integers(65, 700))
    weight = torch.from_numpy(random.standard_normal((size, COLUMNS)).astype(np.float32))
    if random.random() < 0.3:
        weight = weight[torch.from_numpy(random.integers(0, size // 4, size))]  # ties
    bias = None
    if random.random() < 0.5:
        bias = torch.from_numpy(random.standard_normal(size).astype(np.float32))
    softcap = 20.0 if random.random() < 0.3 else None
    needs = random_needs(random, size, 24)
    hidden = (2.0 * random.standard_normal((24, COLUMNS))).astype(np.float32)
    whole = shard_of(weight, bias, OwnedRows.every(size), (), softcap)
    parts = split(random, size)
    group = ShardGroup(
        [shard_of(weight, bias, owned, screens, softcap) for owned in parts],
        [owned.ids for owned in parts],
    )
    every = whole.rescore(
        whole.screen(hidden, RowTable.of([replace(need, kind="dense") for need in needs]))
    )
    one = whole.rescore(whole.screen(hidden, RowTable.of(needs)))
    found = group.rescore(group.screen(hidden, RowTable.of(needs)))
    for row in range(24):
        own = slice(found.offsets[row], found.offsets[row + 1])
        ids = found.ids[own]
        assert (np.diff(ids) > 0).all()
        dense = every.raw[row * size : (row + 1) * size]
        assert found.raw[own].tobytes() == dense[ids].tobytes()
        adjusted = every.logits[row * size : (row + 1) * size]
        assert found.logits[own].tobytes() == adjusted[ids].tobytes()
    certain = [need.kind != "epsilon" for need in needs]
    theirs, ours = drawn(one, needs), drawn(found, needs)
    assert [t for t, sure in zip(ours, certain, strict=True) if sure] == [
        t for t, sure in zip(theirs, certain, strict=True) if sure
    ]
    return list(found.certificates)


@given(seed=st.integers(0, 2**32), screen=st.sampled_from([(), ("int8",), ("int4",)]))
def test_any_blocks_in_any_order_answer_like_one_shard(seed: int, screen: tuple) -> None:
    check(np.random.default_rng(seed), by_blocks, screen)


@given(seed=st.integers(0, 2**32), screen=st.sampled_from([(), ("int8",)]))
def test_arbitrary_tokens_answer_like_one_shard(seed: int, screen: tuple) -> None:
    check(np.random.default_rng(seed), by_tokens, screen)


def test_the_tests_see_certificates_of_every_kind() -> None:
    """Parts certify what they say together: thresholds, and bounds on the whole softmax."""
    random = np.random.default_rng(5)
    certificates = [each for _ in range(30) for each in check(random, by_blocks, ("int8",))]
    kinds = {each.need for each in certificates if each.guarantee == "deterministic"}
    assert {"top1", "topk", "minp", "nucleus", "epsilon"} <= kinds
    assert {each.need for each in certificates if each.guarantee == "dense"} >= {"dense"}


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_top_p_is_certified_wherever_one_shard_certifies_it(shards: int) -> None:
    """Also with shards whose own tokens hardly matter and are all alike: what must be known is
    planned for all of them together."""
    random = np.random.default_rng(shards)
    rows = random.standard_normal((1024, COLUMNS)).astype(np.float32)
    rows[64:] *= 0.05
    weight = torch.from_numpy(rows)
    needs = [Need("nucleus", top_p=0.9, key=row, inverse_temperature=1.0) for row in range(24)]
    hidden = (2.0 * random.standard_normal((24, COLUMNS))).astype(np.float32)
    blocks = np.array_split(np.arange(blocks_of(1024)), shards)
    parts = [OwnedRows.of_blocks(own.tolist(), 1024) for own in blocks]
    whole = shard_of(weight, None, OwnedRows.every(1024), ("int8",), None)
    group = ShardGroup(
        [shard_of(weight, None, owned, ("int8",), None) for owned in parts],
        [owned.ids for owned in parts],
    )
    one, several = (
        head.rescore(head.screen(hidden, RowTable.of(needs))) for head in (whole, group)
    )
    assert several.ids.tolist() == one.ids.tolist()
    certified = [each.guarantee == "deterministic" for each in one.certificates]
    assert [each.guarantee == "deterministic" for each in several.certificates] == certified
    assert sum(certified) >= 12
    rescored = [sum(each.rescored_rows for each in found.certificates) for found in (one, several)]
    assert rescored[1] <= 1.1 * rescored[0]


def test_a_threshold_of_another_shard_cannot_certify_what_is_not_known() -> None:
    """Estimates that overflow say nothing: a finite threshold from elsewhere must not be used."""
    weight = torch.full((128, 4), 3e37)
    weight[64:] = 0.5
    owned = [OwnedRows.of_blocks([block], 128) for block in range(2)]
    shards = [shard_of(weight, None, each, (), None) for each in owned]
    hidden = np.full((1, 4), 5.0, np.float32)
    needs = [Need("top1")]
    parts = [shard.screen(hidden, RowTable.of(needs)) for shard in shards]
    assert np.isnan(parts[0].tau).all()
    assert not np.isnan(parts[1].tau).any()
    answer = shards[0].rescore(replace(parts[0], tau=np.asarray(parts[1].tau)))
    assert answer.certificates[0].guarantee == "dense"
    assert len(answer.ids) == 64


@pytest.mark.parametrize("blocks", [[], [0, 0], [7], [-1]])
def test_blocks_that_cannot_be_owned_are_refused(blocks: list[int]) -> None:
    with pytest.raises(ValueError, match="block"):
        OwnedRows.of_blocks(blocks, 400)


def test_a_group_owns_every_token_once() -> None:
    weight = torch.randn(128, 4)
    owned = OwnedRows.of_blocks([0], 128)
    with pytest.raises(ValueError, match="every token"):
        ShardGroup([shard_of(weight, None, owned, (), None)], [owned.ids])


def test_merged_certificates_promise_no_more_than_the_weakest() -> None:
    strong = Certificate("topk", "deterministic", "int8", 10, 1000, 0.1, False, 0.9)
    likely = Certificate("topk", "probabilistic", "int4-dither", 5, 400, 0.05, True, 0.7, 1e-9)
    dense = Certificate("topk", "dense", "dense-fp32", 100, 9000, 1.0, True, 0.0)
    both = merge_certificates([strong, likely], 300)
    assert both == Certificate(
        "topk", "probabilistic", "int8+int4-dither", 15, 1400, 15 / 300, True, 0.7, 1e-9
    )
    assert merge_certificates([strong, dense], 300).guarantee == "deterministic"
    assert merge_certificates([dense, dense], 200).guarantee == "dense"
    assert merge_certificates([strong], 100) is strong

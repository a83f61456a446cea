"""Masks across shards: however much each of them gives, what is drawn is masked decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.messages import SamplerSettings
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.head.sharded.part import ShardPart, build_shard, cut_head
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.follower import FollowedSequence, Follower
from lexshard.actors.states.mask import Mask, Masks
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.masks import mask_words
from lexshard.loadtest.bench.contenders.shard_group import ShardGroup
from tests.support.sharded_cases import HeadCase, hidden_states
from tests.support.thread_shards import ThreadGang


def drawn(states: SequenceStates, names: RowNames, found: Candidates) -> list[int | None]:
    """The token of each row, as an engine decides it."""
    sampler = Sampler(SamplerSettings(states.vocabulary_size, ()), states)
    decided = OwnDecisions(sampler, states).submit(0, names, found).result()
    return [None if each is None else each.token_id for each in decided]


def none_is_excluded(found: Candidates, masks: tuple[Mask | None, ...], size: int) -> None:
    """Samplers hear the mask of a row that has every token, and of no other."""
    for row, mask in enumerate(masks):
        ids = found.ids[found.offsets[row] : found.offsets[row + 1]]
        assert mask is None or len(ids) == size or np.isin(ids, mask.ids).all()


def test_a_shard_that_gives_all_of_its_tokens_gives_none_that_the_mask_lacks() -> None:
    """Nearly all tokens of the first can win and so it gives every one, the likeliest, 5, which is
    excluded, too. None of the second can."""
    size, rows, columns = 256, 16, 16
    weight = torch.zeros(size, columns)
    weight[:, 0] = torch.linspace(10.0, 10.5, size)
    weight[size // 2 :, 0] -= 50.0
    weight[5, 0] = 18.0
    whole = ShardPart(weight, None, None, 1.0, OwnedRows.every(size), (), rows)
    halves = [OwnedRows.of_blocks(blocks, size) for blocks in ((0, 1), (2, 3))]
    own, *others = cut_head(whole, halves)
    gang = ThreadGang(others)
    head = CollectiveHead(build_shard(own), own.owned.ids, gang.form())
    mask = Masks(size).of(mask_words(np.delete(np.arange(size), 5), size))
    states, follower = SequenceStates(size, (), rows), Follower()
    for row in range(rows):
        request = Request(str(row), 0, (1,), SamplingParameters(min_p=1e-3, seed=row))
        follower.open(row, FollowedSequence(request, states.open(row, request).history))
    head.tell(follower.take())
    names = RowNames(tuple(range(rows)), masks=(mask,) * rows)
    hidden = torch.zeros(rows, columns)
    hidden[:, 0] = 1.0
    found = head.candidates(hidden, states.table(names), names)
    head.close()
    gang.close()
    none_is_excluded(found, names.masks, size)
    every = SequenceHead(build_shard(whole), states).whole_rows(hidden)
    tokens = drawn(states, names, found)
    assert tokens == drawn(states, names, every)
    assert 5 not in tokens


def sampling(random: np.random.Generator, size: int) -> SamplingParameters:
    """One of those that leave few tokens, or half of them, or nearly all."""
    kinds: tuple[dict[str, Any], ...] = (
        {"top_k": int(random.integers(1, size)), "top_p": float(random.uniform(0.5, 1.0))},
        {"min_p": float(10 ** -random.uniform(0.5, 4.0))},
        {"min_p": 0.05, "repetition_penalty": 1.3, "logit_bias": ((7, 2.0), (9, -100.0))},
        {"top_p": 0.9},
        {"temperature": 0.0},
    )
    plain = SamplingParameters(temperature=float(random.uniform(0.3, 2.0)), seed=size)
    return replace(plain, **kinds[int(random.integers(len(kinds)))])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_any_shards_draw_what_masked_decoding_draws(seed: int) -> None:
    random = np.random.default_rng(seed)
    case = HeadCase(
        int(random.integers(2, 5)),
        str(random.choice(["tokens", "round-robin", "contiguous", "uneven"])),
        ("int8",) if random.random() < 0.5 else (),
        seed=seed,
        bias=random.random() < 0.5,
        scale=float(random.choice([0.05, 0.3])),
    )
    size, rows, masks = case.size, 8, Masks(case.size)
    states = SequenceStates(size, (), rows)
    for row in range(rows):
        states.open(row, Request(str(row), 0, (1, 7), sampling(random, size)))
    allowed = [random.permutation(size)[: int(random.uniform(0.02, 1.0) * size)] for _ in range(5)]
    some = [masks.of(mask_words(ids, size)) for ids in allowed]
    chosen = tuple(some[place] if place < 5 else None for place in random.integers(0, 6, rows))
    names = RowNames(tuple(range(rows)), masks=chosen)
    hidden = torch.from_numpy(hidden_states(random, rows, case.columns))
    parts = case.parts()
    group = ShardGroup([case.shard(part) for part in parts], [part.ids for part in parts])
    found = SequenceHead(group, states).candidates(hidden, names)
    none_is_excluded(found, chosen, size)
    every = SequenceHead(case.shard(OwnedRows.every(size)), states).whole_rows(hidden)
    assert drawn(states, names, found) == drawn(states, names, every)

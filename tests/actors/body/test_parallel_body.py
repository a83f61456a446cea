"""A body on several ranks has the same bits on 1, 2, 4 and 8, and those of the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from lexshard.actors.body.errors import UnsupportedModelError
from lexshard.actors.body.families import FAMILIES
from lexshard.actors.body.loading import LoadedModel, load
from lexshard.actors.body.parallel.checks import RANKS, check_ranks, check_shared
from lexshard.actors.body.parallel.loading import ParallelOptions, load_parallel
from lexshard.actors.body.parallel.parallel_body import ATTEMPTS, ParallelBody
from lexshard.actors.body.parallel.rank import BodyRank
from lexshard.actors.body.parallel.share import RankShare
from lexshard.actors.body.parallel.slices import StoredSlices
from lexshard.actors.body.parallel.sums import RankLostError
from lexshard.actors.body.self_test import pack_batch
from lexshard.actors.configuration import EngineConfiguration
from lexshard.kernels.parallel import LEAVES
from tests.support.parallel_cases import (
    ALONE,
    BLOCKS,
    MIXED,
    OF_FAMILY,
    SHARED,
    computed,
    hidden_of,
)
from tests.support.paths import DEMO
from tests.support.thread_ranks import NeverFormed, ThreadRanks
from tests.support.tiny_models import save_tiny


def parallel(folder: Path, ranks: int, dtype: Literal["float32", "bfloat16"]) -> LoadedModel:
    return load_parallel(folder, ParallelOptions(ranks, dtype), ThreadRanks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_of_ranks_has_the_same_bits_and_the_models_numbers(
    family: str, dtype: Literal["float32", "bfloat16"], tmp_path: Path
) -> None:
    """Biases, norms of heads, windows; prompts in chunks, single tokens, other batches."""
    folder = save_tiny(family, tmp_path, **{**SHARED, **OF_FAMILY[family]})
    plain = hidden_of(load(folder, dtype, device="cpu").body, ALONE)
    bits: list[list[torch.Tensor]] = []
    for ranks in RANKS:
        model = parallel(folder, ranks, dtype)
        assert isinstance(model.body, ParallelBody)
        assert model.body.batch_invariant
        bits += [hidden_of(model.body, ALONE), hidden_of(model.body, MIXED)]
        model.body.close()
    for found in bits:
        assert all(torch.equal(a, b) for a, b in zip(found, bits[0], strict=True))
    whole, expected = torch.cat(bits[0]), torch.cat(plain)
    difference = float((whole - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    assert difference < (1e-5 if dtype == "float32" else 2e-2)


def test_ranks_hold_their_part_and_nothing_more() -> None:
    """Of the demo: half of the weights, of the embedding and of the cache each; norms and angles
    are every rank's. Four ranks share two key-value heads, which are held twice."""
    model = parallel(DEMO, 1, "bfloat16")
    assert isinstance(model.body, ParallelBody)
    own = model.body._own
    plan = load(DEMO, "bfloat16", device="cpu")
    assert plan.body.kv_bytes_per_block() == own.kv_bytes_per_block
    folder = StoredSlices(DEMO, torch.bfloat16)
    shape = own.share.whole
    own.allocate(BLOCKS)
    assert own._caches is not None
    shared = sum(each.nbytes for each in (own._weights.cosine, own._weights.sine))
    whole, cache = own.weight_bytes - shared, sum(each.nbytes for each in own._caches)
    for ranks, weights in ((2, 0.505), (4, 0.29)):
        for rank in range(ranks):
            share = RankShare(rank, ranks, shape, own.share.vocabulary_size)
            part = BodyRank(_plan(), share, folder)
            part.allocate(BLOCKS)
            assert part._caches is not None
            assert part.weight_bytes - shared < weights * whole
            assert sum(each.nbytes for each in part._caches) * 2 == cache
            assert part.kv_bytes_per_block * 2 == own.kv_bytes_per_block


def _plan() -> Any:
    from lexshard.actors.body.proven import recall_proven

    proven = recall_proven(DEMO, "bfloat16", "parallel")
    assert proven is not None
    return proven.plan


def test_what_a_lost_rank_had_is_computed_again_of_the_sequences_that_go_on(
    tmp_path: Path,
) -> None:
    """Those of one step at once, others when they come next, none twice; the same bits."""
    folder = save_tiny("llama", tmp_path, **SHARED, **OF_FAMILY["llama"])
    ranks: list[ThreadRanks] = []

    def start(parts: Any) -> ThreadRanks:
        ranks.append(ThreadRanks(parts))
        return ranks[-1]

    body = load_parallel(folder, ParallelOptions(4, "float32"), start).body
    expected = hidden_of(body, MIXED)
    body.allocate_cache(BLOCKS)
    found = computed(body, MIXED[:2])
    ranks[0].lose()
    before = ranks[0].computed_rows
    rest = computed(body, MIXED[2:])
    # The step that was lost; 15 + 30 tokens before it; three steps; 51 and 10 of the first one.
    assert ranks[0].computed_rows - before == 2 + (15 + 30) + 3 * 2 + 51 + 10
    assert ranks[0].formed == 2
    assert isinstance(body, ParallelBody)
    assert body.ranks_lost == 1
    again = [torch.cat([a, b]) if len(b) else a for a, b in zip(found, rest, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    body.close()


def test_a_token_is_exchanged_twice_a_layer_and_once_for_its_embedding() -> None:
    body = parallel(DEMO, 2, "bfloat16").body
    assert isinstance(body, ParallelBody)
    body.allocate_cache(1)
    counts = []
    for position in range(2):
        body.forward(pack_batch([[1, 2]], [(0, position, position + 1)], [[0]]))
        assert body._group is not None
        counts.append(int(body._group.counted[0]))
    assert counts[1] - counts[0] == 2 * body.num_layers + 1
    body.close()


def test_a_step_that_wants_no_hidden_state_writes_its_keys_and_values() -> None:
    """The first part of a prompt."""
    body = parallel(DEMO, 2, "bfloat16").body
    body.allocate_cache(2)
    tokens = [list(range(40, 60))]
    whole = body.forward(pack_batch(tokens, [(0, 0, 20)], [[0, 1]]))
    first = pack_batch(tokens, [(0, 0, 13)], [[1, 0]])
    none = body.forward(replace(first, output_rows=np.empty(0, np.int32)))
    assert none.shape == (0, body.hidden_size)
    rest = body.forward(pack_batch(tokens, [(0, 13, 20)], [[1, 0]]))
    assert torch.equal(rest, whole[13:])
    assert isinstance(body, ParallelBody)
    body.close()


def test_a_body_whose_ranks_never_come_says_so() -> None:
    model = parallel(DEMO, 1, "bfloat16")
    assert isinstance(model.body, ParallelBody)
    never = NeverFormed()
    model.body.others, model.body._group = never, None
    with pytest.raises(RankLostError, match="no peer came"):
        model.body.forward(pack_batch([[1]], [(0, 0, 1)], [[0]]))
    assert never.asked == ATTEMPTS


def test_models_that_cannot_be_shared_are_refused_by_what_cannot() -> None:
    demo = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    for ranks in (1, 2, 4):
        check_shared(demo, ranks)
    refused: list[tuple[dict[str, Any], int, str]] = [
        ({}, 8, "num_attention_heads of this llama are 4, which 8 ranks cannot share"),
        ({"num_attention_heads": 8, "num_key_value_heads": 6}, 4, "num_key_value_heads"),
        ({"model_type": "phi3"}, 2, "qwen3, smollm3, gemma, gemma2, gemma3_text, not phi3"),
        ({"intermediate_size": 712}, 2, "intermediate_size of this llama are 712"),
        ({"head_dim": 10}, 2, "num_attention_heads x head_dim of this llama are 40"),
        ({"hidden_size": None}, 2, "does not say its hidden_size"),
    ]
    for changes, ranks, told in refused:
        with pytest.raises(UnsupportedModelError, match=told):
            check_shared({**demo, **changes}, ranks)
    assert RANKS[-1] == LEAVES


def test_settings_that_no_parallel_body_has_are_refused() -> None:
    shared = EngineConfiguration("model", tensor_parallel=2)
    check_ranks(shared)
    for changes, told in (({"tensor_parallel": 3}, "1, 2, 4 or 8 ranks"),):
        with pytest.raises(ValueError, match=told):
            check_ranks(replace(shared, **changes))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give start_ranks"):
        load_parallel(DEMO, ParallelOptions(2, "bfloat16"), None)


def test_layers_that_ranks_do_not_compute_are_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, **SHARED, attention_bias=True, mlp_bias=False)
    with pytest.raises(UnsupportedModelError, match="has layers that --tensor-parallel"):
        load_parallel(tmp_path, ParallelOptions(1, "float32"), None)

"""Decoders of torch that have a rank's part of every weight compute the model they are parts of."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from lexshard.actors.body import paged_attention
from lexshard.actors.body.batch import Batch
from lexshard.actors.body.checkpoint import read_model_config
from lexshard.actors.body.errors import SelfTestError
from lexshard.actors.body.families import FAMILIES
from lexshard.actors.body.fused import plan_of
from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.gpu import checked
from lexshard.actors.body.gpu.graphed_body import GraphedBody
from lexshard.actors.body.loading import load
from lexshard.actors.body.parallel import general_rank
from lexshard.actors.body.parallel.general_rank import (
    FastLayers,
    GeneralRank,
    decoder_of,
    part_of,
    quicken,
)
from lexshard.actors.body.parallel.loading import ParallelOptions, load_parallel
from lexshard.actors.body.parallel.parallel_body import ParallelBody
from lexshard.actors.body.parallel.share import RankShare
from lexshard.actors.body.parallel.side_by_side import SideBySide
from lexshard.actors.body.parallel.slices import StoredSlices
from lexshard.actors.body.parallel.sums import GroupSums, RankLostError, RankSums, add_up
from lexshard.actors.body.self_test import run_alone, run_mixed
from tests.support import recorded_steps
from tests.support.parallel_cases import ALONE, MIXED, hidden_of, save_shared
from tests.support.quick import quick
from tests.support.recorded_steps import TOKENS, RecordingCapture, largest_difference
from tests.support.thread_ranks import ThreadRanks
from tests.support.tiny_models import VOCABULARY

CPU = torch.device("cpu")
# Biases; norms of heads and of sums, windows, a scaled embedding.
QUICK = ("qwen2", "gemma3_text")


def shares(folder: Path, ranks: int) -> list[RankShare]:
    shape = plan_of(AutoModelForCausalLM.from_pretrained(folder), "float32").shape
    return [RankShare(rank, ranks, shape, VOCABULARY) for rank in range(ranks)]


@pytest.mark.parametrize(
    "family",
    quick(FAMILIES, *QUICK),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_layers_in_parts_are_the_whole_model(
    family: str, dtype: Literal["float32", "bfloat16"], tmp_path: Path
) -> None:
    """2 and 8 ranks (two then have one key-value head); rows do not depend on those beside them."""
    folder = save_shared(family, tmp_path)
    plain = torch.cat(hidden_of(load(folder, dtype, body="general", device="cpu").body, ALONE))
    kind = getattr(torch, dtype)
    for ranks in (2, 8):
        body = SideBySide(
            [
                GeneralRank(read_model_config(folder), share, StoredSlices(folder, kind), kind, CPU)
                for share in shares(folder, ranks)
            ]
        )
        alone, mixed = hidden_of(body, ALONE), hidden_of(body, MIXED)
        assert all(torch.equal(a, b) for a, b in zip(alone, mixed, strict=True))
        difference = (torch.cat(alone) - plain).square().mean().sqrt()
        assert difference / plain.square().mean().sqrt() < (1e-5 if dtype == "float32" else 2e-2)


def test_parts_of_a_weight_are_all_of_it_once(tmp_path: Path) -> None:
    """But for key-value heads, which four of eight ranks have twice here, and for norms."""
    folder = save_shared("qwen3", tmp_path)
    config = read_model_config(folder)
    parts = [
        decoder_of(config, share, StoredSlices(folder, torch.float32), torch.float32).state_dict()
        for share in shares(folder, 8)
    ]
    whole = StoredSlices(folder, torch.float32)
    for name in parts[0]:
        stored = whole(f"model.{name}")
        assert stored is not None
        rows, columns = part_of(name, shares(folder, 8)[0])
        twice = 2 if "k_proj" in name or "v_proj" in name else 1
        found = [each[name] for each in parts[::twice]]
        if rows is not None:
            assert torch.equal(torch.cat(found), stored)
        elif columns is not None:
            assert torch.equal(torch.cat(found, 1), stored)
        else:
            assert all(torch.equal(each, stored) for each in found)


def test_a_part_that_is_read_wrongly_is_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank could tell by itself."""
    folder = save_shared("llama", tmp_path)

    def shifted(name: str, share: RankShare) -> tuple[range | None, range | None]:
        rows, columns = part_of(name, share)
        if "down_proj" in name and share.rank:
            columns = range(len(share.inner))
        return rows, columns

    monkeypatch.setattr(general_rank, "part_of", shifted)
    with pytest.raises(SelfTestError, match="differ from the plain forward pass"):
        load_parallel(folder, ParallelOptions(2, "float32", "general"), ThreadRanks)


@pytest.mark.timeout(30)
def test_a_part_that_fails_keeps_no_other_waiting() -> None:
    def adds(batch: Batch, sums: RankSums) -> None:
        with suppress(RankLostError):
            sums.add(torch.ones(1))

    fails = Mock(side_effect=ValueError("of another shape"))
    with pytest.raises(ValueError, match="of another shape"):
        SideBySide([Mock(forward=adds), Mock(forward=fails)]).forward(Mock())


def test_one_rank_is_the_general_body(tmp_path: Path) -> None:
    folder = save_shared("llama", tmp_path)
    loaded = load_parallel(folder, ParallelOptions(1, "float32", "general"), None)
    assert isinstance(loaded.body, ParallelBody)
    assert (loaded.body.name, loaded.body.batch_invariant) == ("parallel general of 1", True)
    plain = load(folder, "float32", body="general", device="cpu")
    ours, expected = hidden_of(loaded.body, ALONE), hidden_of(plain.body, ALONE)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert torch.equal(loaded.head.weight, plain.head.weight)


class TwoAlike:
    """`RankSums` of two ranks with the same parts, as an operator that a tape can hold."""

    def __init__(self) -> None:
        self.added = 0

    def add(self, values: torch.Tensor) -> None:
        self.added += 1
        values.mul_(2.0)

    def complete(self) -> bool:
        return True


@pytest.fixture
def one_of_two(tmp_path: Path) -> tuple[GeneralBody, TwoAlike]:
    """A rank as it would be on a GPU: torch's own functions."""
    folder = save_shared("gemma2", tmp_path)
    sums, group = GroupSums(), TwoAlike()
    sums.group = group
    share = shares(folder, 2)[0]
    weights = StoredSlices(folder, torch.float32)
    decoder = decoder_of(read_model_config(folder), share, weights, torch.float32)
    add_up(decoder, share.tokens.start, sums)
    body = GeneralBody(decoder, invariant=False)
    body.allocate_cache(8)
    return body, group


def test_a_recorded_step_has_its_sums_and_waits_for_nothing(
    one_of_two: tuple[GeneralBody, TwoAlike], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What replays is one tape, from fixed memory: sums twice a layer and once for embeddings."""
    monkeypatch.setattr(paged_attention, "write_cache", recorded_steps.write_cache)
    monkeypatch.setattr(paged_attention, "paged_attention", recorded_steps.paged_attention)
    body, _ = one_of_two
    expected = [*run_mixed(body, TOKENS), *run_alone(body, TOKENS)]
    capture = RecordingCapture()
    graphed = GraphedBody(body, lambda: capture)
    found = [*run_mixed(graphed, TOKENS), *run_alone(graphed, TOKENS)]
    assert not graphed.refusal
    assert largest_difference(found, expected) < 1e-4
    for tape in capture.tapes:
        added = [call for call in tape.calls if "add_up_ranks" in str(call[0])]
        assert len(added) == 2 * body.num_layers + 1


@pytest.mark.slow
def test_layers_compile_with_their_sums_and_products_of_one_input_are_one(
    one_of_two: tuple[GeneralBody, TwoAlike],
) -> None:
    body, group = one_of_two
    expected = run_mixed(body, TOKENS)
    quicken(body, 1e-4, FastLayers(compiled=True, flash=True), backend="aot_eager")
    assert (body.compiled, body.layers) == (True, "layers compiled")
    group.added = 0
    assert largest_difference(run_mixed(body, TOKENS), expected) < 1e-4
    assert group.added % (2 * body.num_layers + 1) == 0
    assert group.added


def test_layers_that_compile_to_something_else_are_left_as_they_are(
    one_of_two: tuple[GeneralBody, TwoAlike], monkeypatch: pytest.MonkeyPatch
) -> None:
    body, _ = one_of_two
    monkeypatch.setattr(checked, "check_body", Mock(side_effect=SelfTestError("another result")))
    quicken(body, 1e-4, FastLayers(compiled=True, flash=False), backend="aot_eager")
    assert (body.compiled, body.layers) == (False, "layers not compiled (another result)")

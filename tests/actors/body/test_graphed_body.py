"""Steps in graphs: what replays is what the body computes, from fixed memory alone.

A tape of torch's operators stands for a CUDA graph; attention is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lexshard.actors.body import paged_attention
from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.gpu.graphed_body import GraphedBody
from lexshard.actors.body.gpu.step_inputs import StaticInputs
from lexshard.actors.body.loading import load
from lexshard.actors.body.self_test import Piece, pack_batch, run_alone, run_mixed
from tests.support import recorded_steps
from tests.support.recorded_steps import TABLES, TOKENS, RecordingCapture, largest_difference
from tests.support.tiny_models import save_tiny


@pytest.fixture
def body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GeneralBody:
    """A body as it would be on a GPU: torch's own functions, attention that can be recorded."""
    monkeypatch.setattr(paged_attention, "write_cache", recorded_steps.write_cache)
    monkeypatch.setattr(paged_attention, "paged_attention", recorded_steps.paged_attention)
    save_tiny("gemma2", tmp_path)  # soft-cap and windows
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    made = GeneralBody(model.eval().requires_grad_(False), invariant=False)
    made.allocate_cache(8)
    return made


def test_replayed_steps_are_those_of_the_body(body: GeneralBody) -> None:
    """Chunks, decoding, several sequences: rows and blocks change from step to step."""
    expected = run_mixed(body, TOKENS)
    capture = RecordingCapture()
    graphed = GraphedBody(body, lambda: capture)
    assert largest_difference(run_mixed(graphed, TOKENS), expected) < 1e-5
    assert not graphed.refusal
    assert 1 < len(capture.tapes) < 6  # as many as shapes
    assert all(len(tape.calls) > 50 for tape in capture.tapes)


def test_a_replay_reads_what_was_sent_and_nothing_older(body: GeneralBody) -> None:
    """Other tokens through the same graph, from other blocks."""
    capture = RecordingCapture()
    graphed = GraphedBody(body, lambda: capture)
    graphed.allocate_cache(8)
    pieces: list[Piece] = [(0, 0, 7)]
    for tokens in (TOKENS, tuple(tuple(reversed(each)) for each in TOKENS)):
        ours = graphed.forward(pack_batch(tokens, pieces, TABLES))
        body_alone = body.forward(pack_batch(tokens, pieces, ((1, 4), (7, 0), (3, 6))))
        assert float((ours - body_alone).abs().max()) < 1e-5
    assert len(capture.tapes) == 1


@pytest.mark.parametrize("fixed_rows", [None, 2])
def test_tokens_that_only_the_device_knows_are_those_of_the_step(
    body: GeneralBody, fixed_rows: int | None
) -> None:
    """With padding beside them, in pieces, and without a graph."""
    batch = pack_batch(TOKENS, [(0, 0, 5)], TABLES)
    drawn = torch.tensor([*batch.token_ids.tolist()[:4], -1], dtype=torch.int32)
    known = replace(batch, token_ids=drawn.clamp(min=0).numpy())
    unknown = replace(batch, token_ids=np.zeros(5, np.int32), drawn=drawn)
    graphed = GraphedBody(body, RecordingCapture, fixed_rows=fixed_rows)
    graphed.allocate_cache(8)
    expected = graphed.forward(known)
    graphed.allocate_cache(8)
    assert torch.equal(graphed.forward(unknown), expected)
    assert float((body.forward(unknown) - expected).abs().max()) < 1e-5


def test_decoding_finds_its_graphs_recorded(body: GeneralBody) -> None:
    """Of one sequence or three, of short contexts and of those that need wider tables."""
    capture = RecordingCapture()
    graphed = GraphedBody(body, lambda: capture)
    graphed.allocate_cache(8)
    graphed.record(1, 10)
    assert list(graphed._graphs) == [(1, 1, 64)]
    graphed.record(3, 100)
    assert sorted(graphed._graphs) == [
        (rows, rows, width) for rows in (1, 2, 4) for width in (64, 128)
    ]
    for count, width in ((1, 2), (2, 64), (3, 65), (1, 100)):
        step = pack_batch(TOKENS, [(row, 0, 1) for row in range(count)], TABLES[:count])
        tables = np.zeros((count, width), np.int32)
        tables[:, :2] = step.block_tables
        graphed.forward(replace(step, block_tables=tables))
    assert len(capture.tapes) == 6
    graphed = GraphedBody(body, RecordingCapture, fixed_rows=8)
    graphed.allocate_cache(8)
    graphed.record(8, 10)
    assert list(graphed._graphs) == [(8, 8, 64)]


def test_results_outlive_the_next_step(body: GeneralBody) -> None:
    graphed = GraphedBody(body, RecordingCapture)
    graphed.allocate_cache(8)
    first = graphed.forward(pack_batch(TOKENS, [(0, 0, 2)], TABLES))
    kept = first.clone()
    graphed.forward(pack_batch(TOKENS, [(1, 0, 2)], TABLES))
    assert torch.equal(first, kept)


def test_padding_touches_no_block_but_its_own(body: GeneralBody) -> None:
    graphed = GraphedBody(body, RecordingCapture)
    graphed.allocate_cache(8)
    assert body._caches is not None
    for keys, values in body._caches:
        keys.fill_(7.0)
        values.fill_(7.0)
    graphed.forward(pack_batch(TOKENS, [(0, 0, 5)], TABLES))  # three rows of padding
    for cache in (each for pair in body._caches for each in pair):
        touched = {block for block in range(9) if bool((cache[block] != 7.0).any())}
        assert touched == {TABLES[0][0], 8}


@pytest.mark.parametrize("rows", [2, 8])
def test_a_fixed_shape_makes_rows_their_own(body: GeneralBody, rows: int) -> None:
    """Bit for bit, in chunks beside others and alone, also where steps have more rows than that."""
    capture = RecordingCapture()
    graphed = GraphedBody(body, lambda: capture, fixed_rows=rows)
    mixed, alone = run_mixed(graphed, TOKENS), run_alone(graphed, TOKENS)
    assert all(torch.equal(a, b) for a, b in zip(mixed, alone, strict=True))
    assert largest_difference(mixed, run_mixed(body, TOKENS)) < 1e-5
    assert len(capture.tapes) == 2  # one for either cache
    assert graphed.description.startswith(f"every step in CUDA graphs of {rows} rows, layers as")


@pytest.mark.parametrize("fixed_rows", [None, 8])
def test_a_model_that_waits_is_computed_without_graphs(
    body: GeneralBody, monkeypatch: pytest.MonkeyPatch, fixed_rows: int | None
) -> None:
    expected = run_mixed(body, TOKENS)
    compute = body.compute

    def waiting(inputs: Any, planned: Any = None) -> torch.Tensor:
        int(inputs.positions.max())
        return compute(inputs, planned)

    monkeypatch.setattr(body, "compute", waiting)
    capture = RecordingCapture()
    graphed = GraphedBody(body, lambda: capture, fixed_rows=fixed_rows)
    assert largest_difference(run_mixed(graphed, TOKENS), expected) < 1e-5
    assert "the host waits" in graphed.description
    assert not capture.tapes


class FullOnce(RecordingCapture):
    """One that has no memory left for its second graph."""

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Any:
        if len(self.tapes) == 1 and not self.refused:
            self.refused = True
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(compute)

    refused = False


def test_a_shape_without_room_for_its_graph_leaves_the_others_theirs(
    body: GeneralBody, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run_mixed(body, TOKENS)
    capture = FullOnce()
    graphed = GraphedBody(body, lambda: capture)
    for _ in range(2):
        assert largest_difference(run_mixed(graphed, TOKENS), expected) < 1e-5
    assert capture.refused
    assert len(capture.tapes) > 1
    assert not graphed.refusal
    assert [each.message for each in caplog.records if "out of memory" in each.message] != []


def test_a_step_that_could_not_be_recorded_is_tried_again_with_another_cache(
    body: GeneralBody, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a driver says for once, of a first step, does not end graphs for good, nor silently."""
    failed: list[RecordingCapture] = []

    class FailingOnce(RecordingCapture):
        def __call__(self, compute: Callable[[], torch.Tensor]) -> Any:
            if not failed:
                failed.append(self)
                raise RuntimeError("CUDA driver error: out of memory")
            return super().__call__(compute)

    expected = run_mixed(body, TOKENS)
    graphed = GraphedBody(body, FailingOnce)
    assert largest_difference(run_mixed(graphed, TOKENS), expected) < 1e-5
    assert graphed.refusal == "CUDA driver error: out of memory"
    assert not graphed._graphs
    [told] = [each.message for each in caplog.records if "out of memory" in each.message]
    assert told.startswith("all steps")
    assert largest_difference(run_mixed(graphed, TOKENS), expected) < 1e-5
    assert not graphed.refusal
    assert graphed._graphs


@pytest.mark.parametrize("fixed_rows", [None, 8])
def test_a_body_that_fails_fails(
    body: GeneralBody, monkeypatch: pytest.MonkeyPatch, fixed_rows: int | None
) -> None:
    def failing(inputs: Any, planned: Any = None) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(body, "compute", failing)
    graphed = GraphedBody(body, RecordingCapture, fixed_rows=fixed_rows)
    graphed.allocate_cache(8)
    with pytest.raises(RuntimeError, match="out of memory"):
        graphed.forward(pack_batch(TOKENS, [(0, 0, 5)], TABLES))


def test_the_largest_steps_go_without(body: GeneralBody, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lexshard.actors.body.gpu.graphed_body.ROWS", (1, 2, 4))
    capture = RecordingCapture()
    graphed = GraphedBody(body, lambda: capture)
    graphed.allocate_cache(8)
    assert len(graphed.forward(pack_batch(TOKENS, [(0, 0, 5)], TABLES))) == 5
    assert not capture.tapes


def test_inputs_of_a_step_are_one_piece_of_memory() -> None:
    inputs = StaticInputs(4, 4, 3, 64, torch.device("cpu"))
    inputs.fill(pack_batch(TOKENS, [(0, 0, 2), (1, 0, 1)], TABLES[:2]), scratch_block=9)
    own = inputs.tensors
    assert own.token_ids.tolist() == [*TOKENS[0][:2], TOKENS[1][0], 0]
    assert own.positions.tolist() == [0, 1, 0, 0]
    assert own.slots.tolist() == [80, 81, 112, 144]
    assert own.row_sequence.tolist() == [0, 0, 1, 2]
    assert own.output_rows.tolist() == [0, 1, 2, 0]
    assert own.block_tables[:, :2].tolist() == [[5, 2], [7, 0], [9, 0]]
    storages = {tensor.untyped_storage().data_ptr() for tensor in (own.slots, own.block_tables)}
    assert len(storages) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_replayed_steps_wait_for_nothing_on_a_gpu(tmp_path: Path, compiled: bool) -> None:
    save_tiny("llama", tmp_path)
    made = load(tmp_path, "bfloat16", device="cuda", compiled=compiled).body
    assert isinstance(made, GraphedBody)
    assert not made.refusal
    assert compiled == ("layers compiled; " in made.description)
    made.allocate_cache(8)
    batch = pack_batch(TOKENS, [(0, 0, 5), (1, 0, 3)], TABLES)
    made.forward(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        replayed = made.forward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(replayed, made.forward(batch))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_fixed_shape_makes_rows_their_own_on_a_gpu(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    assert load(tmp_path, "bfloat16", device="cuda", batch_invariant=True).body.batch_invariant

"""FlashInfer attends where it is installed and right, and nothing changes where it is not.

A stand-in that does what its documentation says takes its place; on a GPU it is the library itself.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from lexshard.actors.body import loading, paged_attention
from lexshard.actors.body.batch import Batch
from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.gpu import checked
from lexshard.actors.body.gpu.capture import compute_each_time
from lexshard.actors.body.gpu.flash_attention import requests_of
from lexshard.actors.body.gpu.graphed_body import GraphedBody
from lexshard.actors.body.self_test import Expected, plain_forward, run_alone, run_mixed
from tests.support import flash_infer, recorded_steps
from tests.support.quick import quick
from tests.support.recorded_steps import RecordingCapture
from tests.support.tiny_models import save_tiny

TOLERANCE = 1e-4


@pytest.fixture
def made(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[GeneralBody, Expected]:
    """A body as it would be on a GPU, and what it must compute."""
    monkeypatch.setattr(paged_attention, "write_cache", recorded_steps.write_cache)
    save_tiny(getattr(request, "param", "gemma2"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model = model.eval().requires_grad_(False)
    expected = plain_forward(model)
    body = GeneralBody(model, invariant=False)
    run_alone(body, expected.token_ids)  # from which it knows what its layers ask for
    return body, expected


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(checked, "import_module", lambda name: flash_infer)


def refused(*arguments: Any, **options: Any) -> torch.Tensor:
    raise AssertionError("our kernel attends")


def differences(ours: list[torch.Tensor], expected: Expected) -> float:
    pairs = zip(ours, expected.hidden, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("made", quick(["gemma2", "llama", "mistral"], "llama"), indirect=True)
@pytest.mark.usefixtures("installed")
def test_steps_in_graphs_are_planned_and_attended_by_it(
    made: tuple[GeneralBody, Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soft-caps and windows; chunks, decoding and padding; shapes used again for other steps."""
    body, expected = made
    checked.attend_checked(body, expected, TOLERANCE)
    assert body.attention == "attention by FlashInfer"
    monkeypatch.setattr(paged_attention, "paged_attention", refused)
    capture = RecordingCapture()
    graphed = GraphedBody(body, lambda: capture)
    assert differences(run_mixed(graphed, expected.token_ids), expected) < TOLERANCE
    assert differences(run_alone(graphed, expected.token_ids), expected) < TOLERANCE
    assert not graphed.refusal
    assert capture.tapes
    assert graphed.description.endswith("layers as they are written; attention by FlashInfer")


@pytest.mark.usefixtures("installed")
def test_steps_of_any_context_are_one_shape(made: tuple[GeneralBody, Expected]) -> None:
    """Which says where keys lie without the tables: no graph is made for longer ones."""
    body, expected = made
    body.max_positions = 2048
    checked.attend_checked(body, expected, TOLERANCE)
    graphed = GraphedBody(body, RecordingCapture)
    graphed.allocate_cache(128)
    assert body._caches is not None
    for cache in (each for pair in body._caches for each in pair):
        cache.normal_()
    graphed.record(1, 128)
    one = np.zeros(1, np.int32)
    for position in (3, 1500):
        table = np.arange(position // 16 + 1, dtype=np.int32)[None, ::-1].copy()
        slots = np.array([position % 16], np.int64)
        batch = Batch(one + 7, one + position, slots, one, table, one)
        assert torch.allclose(graphed.forward(batch), body.forward(batch), atol=TOLERANCE)
    assert len(graphed._graphs) == 1


@pytest.mark.usefixtures("installed")
def test_steps_without_graphs_are_too(
    made: tuple[GeneralBody, Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    body, expected = made
    checked.attend_checked(body, expected, TOLERANCE)
    monkeypatch.setattr(paged_attention, "paged_attention", refused)
    assert differences(run_mixed(body, expected.token_ids), expected) < TOLERANCE


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_compiled_layers_attend_by_it(
    made: tuple[GeneralBody, Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    body, expected = made
    checked.attend_checked(body, expected, TOLERANCE)
    checked.compile_checked(body, expected, TOLERANCE, backend="aot_eager")
    monkeypatch.setattr(paged_attention, "paged_attention", refused)
    graphed = GraphedBody(body, lambda: compute_each_time)
    assert differences(run_mixed(graphed, expected.token_ids), expected) < TOLERANCE
    assert graphed.description.endswith("layers compiled; attention by FlashInfer")


def test_without_it_our_kernels_attend(made: tuple[GeneralBody, Expected]) -> None:
    body, expected = made
    checked.attend_checked(body, expected, TOLERANCE, name="no_such_library")
    assert body.flash is None
    assert body.attention == "attention by Triton"


@pytest.mark.parametrize(
    ("fault", "told"), [("window", "differs from ours"), ("compiler", "no compiler here")]
)
@pytest.mark.usefixtures("installed")
def test_where_it_is_wrong_or_fails_our_kernels_attend_and_the_banner_says_why(
    made: tuple[GeneralBody, Expected], monkeypatch: pytest.MonkeyPatch, fault: str, told: str
) -> None:
    """A window that is off by one is seen, which the short texts of the self-test cannot show."""
    body, expected = made
    plan = flash_infer.BatchPrefillWithPagedKVCacheWrapper.plan

    def wrong(self: Any, *arguments: Any, window_left: int, **options: Any) -> None:
        if fault == "compiler":
            raise OSError("no compiler here")
        plan(self, *arguments, window_left=window_left + (window_left >= 0), **options)

    monkeypatch.setattr(flash_infer.BatchPrefillWithPagedKVCacheWrapper, "plan", wrong)
    checked.attend_checked(body, expected, TOLERANCE)
    assert body.flash is None
    assert body.attention.startswith("attention by Triton (FlashInfer: ")
    assert told in body.attention
    assert differences(run_mixed(body, expected.token_ids), expected) < TOLERANCE


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    before=st.lists(st.integers(0, 100), min_size=6, max_size=6),
    padding=st.integers(0, 40),
    idle=st.integers(0, 3),
)
def test_requests_say_of_every_row_what_the_batch_says(
    lengths: list[int], before: list[int], padding: int, idle: int
) -> None:
    """Each row's position and the blocks it reads; padding reads the scratch block alone."""
    sequences, count, scratch = len(lengths), sum(lengths), 999
    pairs = list(zip(before, lengths, strict=False))
    tables = np.arange(sequences * 9, dtype=np.int32).reshape(sequences, 9)
    batch = Batch(
        token_ids=np.zeros(count, np.int32),
        positions=np.concatenate([np.arange(b, b + n, dtype=np.int32) for b, n in pairs]),
        slots=np.zeros(count, np.int64),
        row_sequence=np.repeat(np.arange(sequences, dtype=np.int32), lengths),
        block_tables=tables,
        output_rows=np.zeros(0, np.int32),
    )
    rows, requests = count + padding, sequences + idle + 1
    planned = requests_of(batch, rows=rows, requests=requests, scratch_block=scratch)
    alone = requests_of(batch)
    assert planned.row_starts[-1] == rows
    assert len(planned.last_page_lengths) == requests
    for own, extra in ((planned, idle + 1), (alone, 0)):
        assert len(own.row_starts) == sequences + extra + 1
        for sequence, (first, length) in enumerate(pairs):
            pages = own.pages[own.page_starts[sequence] : own.page_starts[sequence + 1]]
            tokens = 16 * (len(pages) - 1) + own.last_page_lengths[sequence]
            assert tokens == first + length
            assert pages.tolist() == tables[sequence, : len(pages)].tolist()
            assert own.row_starts[sequence + 1] - own.row_starts[sequence] == length
    assert set(planned.pages[planned.page_starts[sequences] :].tolist()) == {scratch}
    assert len(planned.pages) <= sequences * 9 + requests + -(-rows // 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs FlashInfer")
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_the_library_itself_attends_on_a_gpu(tmp_path: Path, kind: str) -> None:
    save_tiny(kind, tmp_path, head_dim=64)  # narrower heads it does not have
    body = loading.load(tmp_path, "bfloat16", attention="auto", device="cuda").body
    assert isinstance(body, GraphedBody)
    assert not body.refusal
    assert body.description.endswith("attention by FlashInfer")

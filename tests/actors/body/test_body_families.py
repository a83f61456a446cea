"""Bodies are right and batch-invariant for every family they serve.

Random tiny checkpoints (`tiny_models`) are loaded and compared with transformers' own plain
forward pass: prompts in chunks, single tokens, several sequences in one batch, scattered blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lexshard.actors.body import fused
from lexshard.actors.body.batch import Body
from lexshard.actors.body.families import FAMILIES
from lexshard.actors.body.loading import LoadedModel, load
from lexshard.actors.body.self_test import Piece, pack_batch
from lexshard.kernels import linear, pool
from lexshard.kernels.linear import compact
from lexshard.kernels.processor import sums_as_matrices
from tests.support.paths import DEMO
from tests.support.quick import slow
from tests.support.tiny_models import SERVED, VOCABULARY, save_tiny

LENGTHS = (45, 18, 33)
BLOCKS = 12
LIMIT = 1e-5
RELATIVE = 5e-6  # of the largest hidden state, as float32 rounds


def _token_ids(seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCABULARY, length).tolist() for length in LENGTHS]


def _tables(seed: int) -> list[list[int]]:
    """Three blocks for every sequence, scattered over the cache."""
    return np.random.default_rng(seed).permutation(BLOCKS)[:9].reshape(3, 3).tolist()


def _run(
    body: Body,
    token_ids: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    steps: Sequence[Sequence[Piece]],
) -> list[torch.Tensor]:
    """Hidden states of every token of every sequence, computed in the given steps."""
    body.allocate_cache(BLOCKS)
    found: list[list[torch.Tensor]] = [[] for _ in token_ids]
    for pieces in steps:
        hidden = body.forward(pack_batch(token_ids, pieces, tables))
        first = 0
        for sequence, start, stop in pieces:
            found[sequence].append(hidden[first : first + stop - start])
            first += stop - start
    return [torch.cat(parts) for parts in found]


# Of layers that the fused body computes.
NO_BIAS: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
# Every sequence is computed once: chunks beside prompts, then decoding of all three together.
MIXED_STEPS: list[list[Piece]] = [
    [(0, 0, 16), (1, 0, 7)],
    [(0, 16, 17), (1, 7, 15), (2, 0, 30)],
    [(0, 17, 42)],
    *[[(s, LENGTHS[s] - 3 + i, LENGTHS[s] - 2 + i) for s in range(3)] for i in range(3)],
]
ALONE_STEPS: list[list[Piece]] = [[(s, 0, length)] for s, length in enumerate(LENGTHS)]


def _plain(folder: Path, token_ids: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """transformers' own hidden states and logits, one sequence at a time, no cache."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        rows = [torch.tensor([tokens]) for tokens in token_ids]
        hidden = [model.base_model(row, use_cache=False).last_hidden_state[0] for row in rows]
        logits = [model(row, use_cache=False).logits[0] for row in rows]
    return hidden, logits


def _load(family: str, folder: Path, **settings: Any) -> tuple[Path, LoadedModel]:
    save_tiny(family, folder / family, **(NO_BIAS if settings.get("body") == "fused" else {}))
    return folder / family, load(
        folder / family, "float32", **{"body": "general", "device": "cpu", **settings}
    )


# Of those that the general body alone computes.
QUICK = ("llama", "gemma3_text", "qwen3_moe", "cohere")


@pytest.mark.parametrize(
    ("family", "body"),
    [
        *((each, "general") if each in QUICK else slow(each, "general") for each in SERVED),
        *((each, "fused") for each in FAMILIES),
    ],
)
def test_rows_are_those_of_the_plain_forward_pass_with_bits_of_their_own(
    family: str, body: str, tmp_path: Path
) -> None:
    """In mixed steps and alone, from blocks that lie elsewhere."""
    folder, model = _load(family, tmp_path, body=body)
    assert model.body.name == body
    token_ids = _token_ids(1)
    hidden, logits = _plain(folder, token_ids)
    mixed = _run(model.body, token_ids, _tables(2), MIXED_STEPS)
    difference = max(float((a - b).abs().max()) for a, b in zip(mixed, hidden, strict=True))
    head_difference = max(
        float((model.head.logits(a) - b).abs().max()) for a, b in zip(hidden, logits, strict=True)
    )
    print(f"{family}: hidden states differ by {difference:.1e}, logits by {head_difference:.1e}")
    largest = max(float(each.abs().max()) for each in hidden)
    assert difference < RELATIVE * largest
    assert head_difference < LIMIT
    assert model.body.hidden_size == hidden[0].shape[1] == model.head.weight.shape[1]
    assert model.body.batch_invariant
    alone = _run(model.body, token_ids, _tables(5), ALONE_STEPS)
    assert all(torch.equal(a, b) for a, b in zip(mixed, alone, strict=True))


def test_long_batches_and_threads_do_not_change_bits(tmp_path: Path) -> None:
    """Enough elements that torch splits element-wise work among threads at odd places."""
    shape = {"hidden_size": 96, "intermediate_size": 168, "max_position_embeddings": 1024}
    save_tiny("llama", tmp_path, **shape)
    body = load(tmp_path, "float32", body="general", device="cpu").body
    token_ids = [np.random.default_rng(6).integers(3, VOCABULARY, 611).tolist()]
    tables = [np.random.default_rng(7).permutation(40).tolist()]
    body.allocate_cache(40)
    batch = pack_batch(token_ids, [(0, 0, 611)], tables)
    whole = body.forward(batch)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        pool.set_threads(3)
        assert torch.equal(body.forward(batch), whole)
    finally:
        torch.set_num_threads(threads)
        pool.set_threads(1)
    for start, stop in ((0, 1), (1, 300), (300, 303), (303, 611)):
        part = body.forward(pack_batch(token_ids, [(0, start, stop)], tables))
        assert torch.equal(part, whole[start:stop])


def test_only_wanted_rows_come_back(tmp_path: Path) -> None:
    _, model = _load("llama", tmp_path)
    token_ids, tables = _token_ids(8), _tables(9)
    model.body.allocate_cache(BLOCKS)
    batch = pack_batch(token_ids, [(0, 0, 20), (1, 0, 5)], tables)
    every = model.body.forward(batch)
    some = model.body.forward(replace(batch, output_rows=np.array([3, 19, 24], np.int32)))
    assert torch.equal(some, every[[3, 19, 24]])


BODIES = pytest.mark.parametrize("body", ["general", "fused"])
BodyName = Literal["general", "fused"]


@pytest.mark.parametrize("body", ["general", pytest.param("fused", marks=pytest.mark.slow)])
def test_bfloat16_rounds_weights_and_what_they_multiply(body: BodyName, tmp_path: Path) -> None:
    """With heads of 24 places, whose keys and values stay float32."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "head_dim": 24}
    save_tiny("qwen3", tmp_path, **shape)
    model = load(tmp_path, "bfloat16", body=body, device="cpu")
    token_ids = _token_ids(12)
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    ).float()
    for module in plain.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, x: (x[0].bfloat16().float(),))
    with torch.inference_mode():
        expected = plain.base_model(torch.tensor([token_ids[0]]), use_cache=False)
    ours = _run(model.body, token_ids, _tables(13), ALONE_STEPS)
    assert model.dtype == "bfloat16"
    assert model.head.weight.dtype == torch.bfloat16
    # A value between two bfloat16 may be rounded to either; nearly all are rounded alike.
    differences = (ours[0] - expected.last_hidden_state[0]).abs()
    assert float(differences.median()) < LIMIT
    assert float(differences.max()) < 1e-2


@BODIES
def test_keys_and_values_are_bfloat16_where_weights_are(body: BodyName, tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)  # 2 layers, 2 kv heads of 32
    bytes_of = {
        dtype: load(tmp_path, dtype, body=body, device="cpu").body.kv_bytes_per_block()
        for dtype in ("float32", "bfloat16")
    }
    assert bytes_of == {"float32": 2 * 2 * 16 * 2 * 32 * 4, "bfloat16": 2 * 2 * 16 * 2 * 32 * 2}


@BODIES
def test_yarn_lengthens_the_context(body: BodyName, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    save_tiny("llama", tmp_path, max_position_embeddings=32, rope_parameters=rope, **NO_BIAS)
    model = load(tmp_path, "float32", body=body, device="cpu")
    assert model.max_positions == 128
    hidden, _ = _plain(tmp_path, _token_ids(18))  # of which one is longer than 32
    ours = _run(model.body, _token_ids(18), _tables(19), MIXED_STEPS)
    differences, values = torch.cat(ours) - torch.cat(hidden), torch.cat(hidden)
    assert float(differences.abs().max()) < RELATIVE * float(values.abs().max())


@pytest.mark.skipif(sums_as_matrices(), reason="words are summed in another order there")
@BODIES
def test_compact_weights_change_no_bit(
    body: BodyName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    save_tiny("qwen3", tmp_path, **shape)
    made: list[bool] = []

    def compacted(panels: Any) -> Any:
        smaller = compact.compacted(panels)
        made.append(smaller is not None)
        return smaller

    monkeypatch.setattr(linear, "compacted", compacted)
    monkeypatch.setattr(fused, "compacted", compacted)
    monkeypatch.setattr(compact, "WORTH", 2.0)  # of weights as small as these
    plain = load(tmp_path, "bfloat16", body=body, device="cpu").body
    assert not made
    monkeypatch.setattr(compact, "FROM_BYTES", 0)
    monkeypatch.setattr(compact, "_ENOUGH_VECTORS", True)
    small = load(tmp_path, "bfloat16", body=body, device="cpu").body
    assert made
    assert all(made)
    token_ids = _token_ids(16)
    expected, found = (_run(each, token_ids, _tables(17), MIXED_STEPS) for each in (plain, small))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.vectors
def test_the_fused_body_agrees_with_the_general_one(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    save_tiny("qwen3", tmp_path, **shape)
    fused = load(tmp_path, body="fused", device="cpu").body
    general = load(tmp_path, body="general", device="cpu").body
    assert (fused.name, general.name) == ("fused", "general")
    assert load(tmp_path, device="cpu").body.name == "fused"
    token_ids = _token_ids(14)
    results = [_run(body, token_ids, _tables(15), MIXED_STEPS) for body in (fused, general)]
    assert all(float((a - b).abs().max()) < LIMIT for a, b in zip(*results, strict=True))


def test_ends_and_sampling_defaults_come_from_the_folder(tmp_path: Path) -> None:
    """Every end of generation_config.json and config.json; ids beyond the head are dropped."""
    save_tiny("llama", tmp_path)  # config.json: eos 2
    settings = {"eos_token_id": [5, 2, 4000], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model = load(tmp_path)
    assert model.eos_token_ids == (5, 2)
    assert model.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert (model.vocabulary_size, model.max_positions) == (VOCABULARY, 128)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load(tmp_path).eos_token_ids == (7, 2)


def test_the_demo_model_loads_as_it_is_stored() -> None:
    model = load(DEMO, device="cpu")
    assert (model.body.name, model.dtype, model.vocabulary_size) == ("fused", "bfloat16", 16384)
    assert model.body.batch_invariant
    assert model.parameters == 7_145_728
    assert model.eos_token_ids == (0, 4)


def test_the_cache_costs_what_it_says(tmp_path: Path) -> None:
    _, model = _load("llama", tmp_path)  # 2 layers, 2 kv heads of 8, float32
    assert model.body.kv_bytes_per_block() == 2 * 2 * 16 * 2 * 8 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "qwen3_moe"])
def test_equals_the_plain_forward_pass_on_a_gpu(family: str, tmp_path: Path) -> None:
    """float32 on both sides; the sums differ in order only."""
    folder, model = _load(family, tmp_path, device="cuda")
    token_ids = _token_ids(16)
    hidden, _ = _plain(folder, token_ids)
    ours = _run(model.body, token_ids, _tables(17), MIXED_STEPS)
    assert max(float((a.cpu() - b).abs().max()) for a, b in zip(ours, hidden, strict=True)) < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bfloat16_passes_its_self_test_on_a_gpu(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    model = load(tmp_path, "bfloat16", device="cuda")
    assert model.body.name == "general"
    assert model.body.device.type == "cuda"

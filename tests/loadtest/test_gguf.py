"""A checkpoint as a GGUF file has all weights, in the order that llama.cpp's attention wants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from lexshard.loadtest.bench.peers.gguf import write_gguf
from tests.support.paths import DEMO
from tests.support.tiny_models import save_tiny


def test_the_demo_as_gguf_has_every_weight_bit_for_bit(tmp_path: Path) -> None:
    write_gguf(DEMO, tmp_path / "model.gguf")
    reader = GGUFReader(tmp_path / "model.gguf")
    weights = load_file(DEMO / "model.safetensors")
    found = {each.name: each for each in reader.tensors}
    assert len(found) == len(weights)
    embedding = found["token_embd.weight"]
    expected = weights["model.embed_tokens.weight"]
    assert embedding.shape.tolist() == list(reversed(expected.shape))
    np.testing.assert_array_equal(
        np.asarray(embedding.data).view(np.uint16).reshape(expected.shape),
        expected.bfloat16().view(torch.uint16).numpy(),
    )
    heads, width = 4, 64
    asked = weights["model.layers.1.self_attn.q_proj.weight"].bfloat16().view(torch.uint16).numpy()
    ours = np.asarray(found["blk.1.attn_q.weight"].data).view(np.uint16).reshape(asked.shape)
    for head in range(heads):
        for place in range(width):
            half, pair = place % 2, place // 2
            source = head * width + half * (width // 2) + pair
            np.testing.assert_array_equal(ours[head * width + place], asked[source])
    assert reader.fields["llama.attention.head_count_kv"].contents() == 2
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == 16384


def test_a_gemma_as_gguf_has_its_windows_and_the_one_that_norms_add(tmp_path: Path) -> None:
    folder = save_tiny("gemma3_text", tmp_path)
    write_gguf(folder, tmp_path / "model.gguf")
    reader = GGUFReader(tmp_path / "model.gguf")
    weights = load_file(folder / "model.safetensors")
    found = {each.name: each for each in reader.tensors}
    assert len(found) == len(weights)
    for ours, theirs in (
        ("blk.1.attn_q_norm", "model.layers.1.self_attn.q_norm"),
        ("blk.0.post_ffw_norm", "model.layers.0.post_feedforward_layernorm"),
        ("output_norm", "model.norm"),
    ):
        norm = np.asarray(found[f"{ours}.weight"].data)
        np.testing.assert_array_equal(norm, weights[f"{theirs}.weight"].numpy() + np.float32(1))
    asked = weights["model.layers.1.self_attn.q_proj.weight"].bfloat16().view(torch.uint16).numpy()
    ours = np.asarray(found["blk.1.attn_q.weight"].data).view(np.uint16).reshape(asked.shape)
    np.testing.assert_array_equal(ours, asked)
    assert reader.fields["gemma3.attention.sliding_window"].contents() == 7


def test_other_models_are_refused(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    with pytest.raises(ValueError, match="not qwen3"):
        write_gguf(folder, tmp_path / "model.gguf")

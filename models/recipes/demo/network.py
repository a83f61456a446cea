"""The Llama network as a plain function of Hugging Face named weights."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from models.recipes.demo.recipe import NetworkShape

NetworkWeights = dict[str, Tensor]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"


def _layer_shapes(shape: NetworkShape) -> dict[str, tuple[int, ...]]:
    keys = shape.kv_heads * shape.head_size
    return {
        "self_attn.q_proj.weight": (shape.hidden, shape.hidden),
        "self_attn.k_proj.weight": (keys, shape.hidden),
        "self_attn.v_proj.weight": (keys, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, shape.hidden),
        "mlp.gate_proj.weight": (shape.intermediate, shape.hidden),
        "mlp.up_proj.weight": (shape.intermediate, shape.hidden),
        "mlp.down_proj.weight": (shape.hidden, shape.intermediate),
        "input_layernorm.weight": (shape.hidden,),
        "post_attention_layernorm.weight": (shape.hidden,),
    }


def initial_weights(shape: NetworkShape, seed: int) -> NetworkWeights:
    """Seeded initial weights under their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: tuple[int, ...], deviation: float) -> Tensor:
        return torch.randn(size, generator=generator) * deviation

    weights: NetworkWeights = {EMBEDDING: normal((shape.vocabulary, shape.hidden), 0.02)}
    residual = 1.0 / (2 * shape.layers) ** 0.5
    for layer in range(shape.layers):
        for name, size in _layer_shapes(shape).items():
            key = f"model.layers.{layer}.{name}"
            if len(size) == 1:
                weights[key] = torch.ones(size)
            else:
                scale = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                weights[key] = normal(size, scale * 0.6 / size[1] ** 0.5)
    weights[FINAL_NORM] = torch.ones(shape.hidden)
    return weights


def rotary_table(shape: NetworkShape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the first ``length`` positions, half a head wide."""
    half = shape.head_size // 2
    frequency = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def _rotate(heads: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = table
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def hidden_states(
    weights: NetworkWeights, shape: NetworkShape, tokens: Tensor, table: tuple[Tensor, Tensor]
) -> Tensor:
    """Final normalised hidden states, shape ``[batch * length, hidden]``."""
    batch, length = tokens.shape
    width, size = shape.hidden, shape.head_size
    state = functional.embedding(tokens.reshape(-1), weights[EMBEDDING])

    def norm(value: Tensor, name: str) -> Tensor:
        return functional.rms_norm(value, (width,), weights[name], shape.norm_epsilon)

    def heads(value: Tensor, count: int) -> Tensor:
        return value.view(batch, length, count, size).transpose(1, 2)

    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        normed = norm(state, prefix + "input_layernorm.weight")
        query, key, value = (
            heads(normed @ weights[f"{prefix}self_attn.{part}_proj.weight"].t(), count)
            for part, count in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        )
        query, key = _rotate(query, table), _rotate(key, table)
        repeats = shape.heads // shape.kv_heads
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch * length, width)
        state = torch.addmm(state, mixed, weights[prefix + "self_attn.o_proj.weight"].t())
        normed = norm(state, prefix + "post_attention_layernorm.weight")
        gate = functional.silu(normed @ weights[prefix + "mlp.gate_proj.weight"].t())
        raised = gate * (normed @ weights[prefix + "mlp.up_proj.weight"].t())
        state = torch.addmm(state, raised, weights[prefix + "mlp.down_proj.weight"].t())
    return norm(state, FINAL_NORM)

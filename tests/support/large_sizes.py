"""Sizes of models that are too large for tests."""

from __future__ import annotations

from lexshard.cluster.topology.sizes import ModelSizes

LLAMA = ModelSizes(
    name="large",
    family="llama",
    vocabulary_size=128_256,
    hidden_size=4096,
    layers=32,
    kv_heads=8,
    head_dim=128,
    max_positions=8192,
    parameters=8_030_261_248,
    embedding_parameters=128_256 * 4096,
    output_parameters=128_256 * 4096,
    weight_bytes=2,
    cpu_kv_bytes=2,
    fused=True,
)

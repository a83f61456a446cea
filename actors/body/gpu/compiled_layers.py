"""A decoder's layers compiled: norms, rotations, activations and additions fused between products.

Each layer is one function of torch.compile, in which attention, its cache write included, is one
custom operator: what it needs of the step it finds where it runs, as the plain one does. Layers of
one kind share their machine code, for what tells them apart, weights and cache, are its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lexshard.actors.body import paged_attention
from lexshard.actors.body.attention_step import AttentionSettings
from lexshard.actors.body.errors import UnsupportedModelError

NAME = "lexshard_paged_compiled"
# Layers of every kind and model of a process count together: of each a step of one row, of several,
# and of a larger cache.
COMPILED_KINDS = 64
# Pointwise work of one place is one launch: the rotations of queries and of keys.
TOGETHER = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
# Where attention modules keep their caches.
KEYS, VALUES = "paged_keys", "paged_values"


@torch.library.custom_op("lexshard::paged_attention", mutates_args=("key_cache", "value_cache"))
def _paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    settings = AttentionSettings(scale, window, softcap)
    return paged_attention.attend_in_step(query, key, value, key_cache, value_cache, settings)


@_paged_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    _, heads, rows, width = query.shape
    return query.new_empty(1, rows, heads, width)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """`paged_attention.attend` where it has already been seen that it computes this model's."""
    settings = paged_attention.settings_of(query, scaling, arguments)
    caches = getattr(module, KEYS), getattr(module, VALUES)
    return _paged_attention(query, key, value, *caches, *settings), None


def compile_layers(decoder: Any, backend: str = "inductor") -> None:
    """From its next step on ``decoder``, whose attention is paged, computes compiled layers; each
    must compile as a whole. Raises UnsupportedModelError where it is not made of layers."""
    from transformers import AttentionInterface

    layers = _layers(decoder)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_KINDS)
    AttentionInterface.register(NAME, _attend)
    decoder.set_attn_implementation(NAME)
    options = TOGETHER if backend == "inductor" else None
    for layer in layers:
        layer.compile(fullgraph=True, backend=backend, options=options)


def interpret_layers(decoder: Any) -> None:
    """Undoes `compile_layers`."""
    decoder.set_attn_implementation(paged_attention.NAME)
    for layer in _layers(decoder):
        layer._compiled_call_impl = None
    forget_caches(decoder)


def place_caches(decoder: Any, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Where the attention of compiled layers finds keys and values."""
    for layer in _layers(decoder):
        for module in layer.modules():
            number = getattr(module, "layer_idx", None)
            if isinstance(number, int):
                keys, values = caches[number]
                setattr(module, KEYS, keys)
                setattr(module, VALUES, values)


def forget_caches(decoder: Any) -> None:
    """Their memory is let go of."""
    for module in decoder.modules():
        module.__dict__.pop(KEYS, None)
        module.__dict__.pop(VALUES, None)


def _layers(decoder: Any) -> Sequence[torch.nn.Module]:
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise UnsupportedModelError(f"{type(decoder).__name__} has no list of layers to compile")
    return list(layers)

"""Paged attention as an attention function of transformers.

transformers calls the function with queries and keys of one layer (rotary embedding applied); what
it cannot pass (caches, block tables, slots) stands in the `AttentionStep` of the running forward
pass. Whatever else a model hands to its attention is refused, not ignored: a bias or a sink that
is silently lost gives fluent, wrong text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from lexshard.actors.body.attention_step import AttentionSettings, AttentionStep
from lexshard.actors.body.errors import UnsupportedModelError
from lexshard.kernels.attention import paged_attention, write_cache

NAME = "lexshard_paged"

# Arguments with a meaning here, or that say nothing about the values.
_KNOWN_ARGUMENTS = frozenset(
    {"position_ids", "use_cache", "is_causal", "sliding_window", "softcap", "output_attentions"}
)


_running: ContextVar[AttentionStep | None] = ContextVar("attention_step", default=None)


@contextmanager
def running(step: AttentionStep) -> Iterator[AttentionStep]:
    """Make ``step`` the one that attention functions see. Steps do not nest."""
    assert _running.get() is None, "a forward pass started inside another one"
    token = _running.set(step)
    try:
        yield step
    finally:
        _running.reset(token)


def register() -> None:
    """Make the function known to transformers under `NAME`.

    No mask function is registered under that name, so transformers builds no [T, T] mask.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """``query [1, H, T, D]``, ``key, value [1, Hkv, T, D]`` to ``[1, T, H, D]``.

    Raises UnsupportedModelError for anything that paged attention does not compute.
    """
    step = _step()
    layer = _check(module, query, key, value, attention_mask, arguments, step)
    settings = step.settings[layer] = settings_of(query, scaling, arguments)
    key_cache, value_cache = step.caches[layer]
    return attend_in_step(query, key, value, key_cache, value_cache, settings), None


def settings_of(
    query: torch.Tensor, scaling: float | None, arguments: dict[str, Any]
) -> AttentionSettings:
    """What a model's attention asks for."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window, softcap = arguments.get("sliding_window") or 0, arguments.get("softcap") or 0.0
    return AttentionSettings(scale, int(window), float(softcap))


def attend_in_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    settings: AttentionSettings,
) -> torch.Tensor:
    """`attend` of the running step with one layer's caches, in which keys and values are put."""
    step = _step()
    rows, out = _written(query, key, value, key_cache, value_cache, step)
    queries = query[0, :, :rows].transpose(0, 1)
    if step.planned is not None:
        step.planned.attend(queries, key_cache, value_cache, settings, out[:rows])
        return out[None]
    paged_attention(
        queries,
        key_cache,
        value_cache,
        step.block_tables,
        step.row_sequence,
        step.positions,
        *settings,
        out[:rows],
    )
    return out[None]


def _written(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    step: AttentionStep,
) -> tuple[int, torch.Tensor]:
    """How many rows are no padding, whose keys and values are in the caches now, and memory for
    what they attend to [T, H, D], which is 0 for padding."""
    rows = step.rows
    _, heads, padded_rows, width = query.shape
    kind = key_cache.dtype if key_cache.is_floating_point() else key.dtype  # or words of two
    keys = key[0, :, :rows].transpose(0, 1).to(kind)  # [rows, Hkv, D]
    values = value[0, :, :rows].transpose(0, 1).to(kind)
    write_cache(keys, values, step.slots, key_cache, value_cache)
    out = query.new_empty(padded_rows, heads, width)
    out[rows:] = 0.0
    return rows, out


def _step() -> AttentionStep:
    step = _running.get()
    assert step is not None, "paged attention was called outside of a body's forward pass"
    return step


def _check(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    arguments: dict[str, Any],
    step: AttentionStep,
) -> int:
    """The layer that attends. Raises UnsupportedModelError."""
    kind = type(module).__name__
    unknown = [
        name
        for name, given in arguments.items()
        if name not in _KNOWN_ARGUMENTS and given is not None
    ]
    if unknown:
        raise UnsupportedModelError(
            f"{kind} passes {', '.join(sorted(unknown))} to its attention, which paged attention "
            "does not compute (attention sinks, biases and sparse indices change the result): "
            "serve a model without it"
        )
    if arguments.get("is_causal") is False or attention_mask is not None:
        raise UnsupportedModelError(
            f"{kind} attends with a mask of its own or not causally: only causal decoders are "
            "served"
        )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < len(step.caches) or layer in step.settings:
        raise UnsupportedModelError(
            f"{kind} is layer {layer} of {len(step.caches)} and not called once per layer: models "
            "that share keys and values between layers or loop over layers are not served"
        )
    _, heads, _, width = step.caches[layer][1].shape
    expected = heads, width
    if query.shape[0] != 1 or key.shape != value.shape or (key.shape[1], key.shape[3]) != expected:
        raise UnsupportedModelError(
            f"{kind} of layer {layer} has keys {tuple(key.shape)} and values {tuple(value.shape)} "
            f"where the cache holds {expected[0]} heads of {expected[1]}: latent attention, "
            "values of another width and head sizes that differ by layer are not served"
        )
    return layer

"""Tiny configurations of any family: its own defaults with every size made small.

Sizes are told by the names of fields, which families largely share; what a family counts in a way
of its own stands in `_OWN`. Layers are chosen so that every kind of layer that the full model has
is there once. Windows and chunks are longer than the sequences of the self-test at load
(`actors.body.self_test`) and shorter than those of `probe`: what the loader overlooks shows there.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

VOCABULARY = 97
LAST_TOKEN = VOCABULARY - 1  # stands for images and other things that are in no prompt here
WINDOW = 24

# The first pattern found in a field's name bounds its value.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab", VOCABULARY),
    (r"token_id$|token_index$", LAST_TOKEN),
    (r"^(n|num|encoder|decoder)_(hidden_|encoder_|decoder_|lstm_)?(layers?|blocks)$|^depth$", 2),
    (r"num_hidden_layers|layers_per_stack|num_global_layers", 2),
    (r"position_embeddings|n_positions|n_ctx|seq_len|_positions$|context_length|max_distance", 128),
    (r"window|chunk_size|chunk_length|local_attention$|index_block_size", WINDOW),
    (r"per_tok|moe_topk|moe_k$|top_k$|index_topk_blocks", 2),
    (r"index_topk", 16),
    (r"n_group$|topk_group|n_groups|o_groups", 1),
    (r"(num|local|routed)_experts|zero_expert_num", 4),
    (r"first_k_dense|dense_layers|max_window_layers", 1),
    (r"(kv|key_value|num_key)_heads", 2),
    (r"rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 24),
    (r"head_dim|head_size|d_head|dim_head|d_kv|kv_channels", 16),
    (r"heads$|n_head$|heads_per", 4),
    (r"_rank$|lowrank|state|mamba_d|codebook", 16),
    (r"moe.*intermediate|expert.*size|shared.*size", 32),
    (r"intermediate_size|ffn_dim|ffn_hidden|d_ff|dff|dim_ff|d_inner|feed_forward|mlp_dim", 96),
    (r"size|dim|width|d_model|n_embd|channels?$", 64),
)
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")

# What a family counts in a way of its own, or cannot be without.
_DATA = Path(__file__).parents[1] / "data" / "model_families.json"
_OWN: dict[str, dict[str, Any]] = json.loads(_DATA.read_text(encoding="utf-8")) | {
    "emu3": {"vocabulary_map": {"<image>": LAST_TOKEN, "<|extra_200|>": LAST_TOKEN - 1}},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 16)},
}


def tiny_configuration(family: str) -> Any:
    """A configuration of the family that makes a model of a few hundred kilobytes."""
    from transformers import CONFIG_MAPPING

    return _tiny(CONFIG_MAPPING[family], _OWN.get(family, {}))


def _tiny(kind: Any, own: dict[str, Any]) -> Any:
    from transformers import PreTrainedConfig

    full = kind(**{name: value for name, value in own.items() if name.endswith("_config")})
    common = {field.name for field in fields(PreTrainedConfig)}
    settings: dict[str, Any] = {}
    for field in fields(kind):
        name = field.name
        value = full.__dict__.get(full.attribute_map.get(name, name))
        if name in common:
            continue
        if isinstance(value, PreTrainedConfig):
            settings[name] = _tiny(type(value), own.get(name, {}))
        elif name in ("head_dim", "num_key_value_heads") and value is None:
            settings[name] = _bound(name)
        elif type(value) is int and (field.default is not None or name == "num_key_value_heads"):
            settings[name] = min(value, _bound(name, value))
        elif name == "is_decoder":
            settings[name] = True
    settings.update(_layers(full, {field.name for field in fields(kind)}))
    settings.update({name: value for name, value in own.items() if not name.endswith("_config")})
    return kind(**settings)


def _bound(name: str, otherwise: int = 0) -> int:
    return next((bound for pattern, bound in _SIZES if re.search(pattern, name)), otherwise)


def _layers(full: Any, names: set[str]) -> dict[str, Any]:
    """Settings by layer, cut to one layer of every kind and at least two layers."""
    count = next((name for name in _LAYER_COUNTS if name in full.__dict__), None)
    if count is None:
        return {}
    by_layer = {
        name: value
        for name, value in full.__dict__.items()
        if name in names
        and isinstance(value, (list, tuple))
        and len(value) == getattr(full, count)
        and list(value) != list(range(len(value)))  # these are numbers of layers
    }
    kinds = list(zip(*by_layer.values(), strict=True))
    chosen = sorted({kinds.index(each) for each in kinds})
    if not chosen:
        return {}
    if len(chosen) == 1:
        chosen.append(chosen[0] + 1)
    return {count: len(chosen)} | {
        name: [value[layer] for layer in chosen] for name, value in by_layer.items()
    }

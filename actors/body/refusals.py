"""Models that a paged body would compute wrongly, told from their configuration alone."""

from __future__ import annotations

from typing import Any

from lexshard.actors.body.errors import InsufficientMemoryError, UnsupportedModelError
from lexshard.actors.body.model_code import model_code

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
# Their "dynamic" angles are the same at every length where there is an alpha.
_FIXED_BY_ALPHA = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_SHAPE = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
# What the cache is made of: it has one shape for all layers.
_SAME_IN_ALL_LAYERS = {*_SHAPE, "num_key_value_heads", "head_dim", "kv_lora_rank"}
_FLOAT_TYPES = frozenset({"F32", "BF16", "F16", "F64"})


def model_class(config: Any) -> Any:
    """The transformers class of a configuration, if its attention can be replaced.

    Raises UnsupportedModelError for everything that is known not to work.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{kind} is an encoder-decoder model: only decoders that continue a text are served"
        )
    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UnsupportedModelError(
            f"{kind} is no causal language model: choose a model that generates text"
        ) from None
    if _uses_alibi(config):
        raise UnsupportedModelError(
            f"{kind} adds a bias by distance (ALiBi) to its attention, which paged attention does "
            "not compute: choose a model with rotary or learned positions"
        )
    if not found._supports_attention_backend:
        raise UnsupportedModelError(
            f"the attention of {kind} cannot be replaced in this version of transformers "
            "(_supports_attention_backend is off): choose a model of another family"
        )
    with model_code(f"the configuration of {kind} describes no text model of its own"):
        text_config = config.get_text_config(decoder=True)
    _check_shape(kind, text_config)
    _check_rope(kind, text_config)
    _check_layers(kind, text_config)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"this {kind} checkpoint is quantized: serve the original float32 or bfloat16 weights"
        )
    return found


def check_stored_types(stored: frozenset[str]) -> None:
    """Raises UnsupportedModelError unless all weights are plain floating-point numbers."""
    odd = sorted(stored - _FLOAT_TYPES - {"I64", "BOOL"})  # integer buffers of positions and masks
    if odd:
        raise UnsupportedModelError(
            f"weights are stored as {', '.join(odd)}: serve float32, bfloat16 or float16 weights"
        )


def check_memory(needed: int, given: int) -> None:
    """Raises InsufficientMemoryError where ``needed`` bytes exceed what is ``given``."""
    if needed > given:
        raise InsufficientMemoryError(
            f"the weights need {needed} bytes ({needed / 2**30:.1f} GiB) and {given} bytes "
            f"({given / 2**30:.1f} GiB) are there: use a machine with more memory or a smaller "
            "model"
        )


def _uses_alibi(config: Any) -> bool:
    attention = getattr(config, "attn_config", None)
    return bool(
        config.model_type in ("bloom", "mpt")
        or getattr(config, "alibi", False)
        or getattr(attention, "alibi", False)
    )


def _check_shape(kind: str, config: Any) -> None:
    by_layer = config._heterogeneity_spec.per_layer_attributes if config.is_heterogeneous else ()
    differing = sorted(_SAME_IN_ALL_LAYERS.intersection(by_layer))
    if differing:
        raise UnsupportedModelError(
            f"{kind} has layers that differ in {', '.join(differing)}, and paged blocks have one "
            "shape for all layers: choose another model"
        )
    missing = [name for name in _SHAPE if not isinstance(getattr(config, name, None), int)]
    if missing:
        raise UnsupportedModelError(
            f"{kind} has no {', '.join(missing)} in its configuration, so it is no transformer of "
            "equal attention layers over known positions: choose another model"
        )


def _check_rope(kind: str, config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        rope_type = rope.get("rope_type", "default")
        if rope_type in _ROPE_TYPES or (kind in _FIXED_BY_ALPHA and rope.get("alpha")):
            continue
        # Without others, which are scaled within the original context, too, that model computes.
        remedy = "remove the scaling from config.json (and stay within the original context) or "
        raise UnsupportedModelError(
            f"{kind} uses {rope_type} rotary embeddings, whose angles change with the length of "
            "the sequence and so disagree with keys already cached: "
            f"{remedy if rope_type == 'dynamic' else ''}choose another model"
        )


def _check_layers(kind: str, config: Any) -> None:
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"{kind} shares keys and values between layers, which paged blocks do not hold: "
            "choose another model"
        )
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{kind} caches a latent instead of keys and values (MLA), which paged blocks do not "
            "hold: choose another model"
        )
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if odd:
        raise UnsupportedModelError(
            f"{kind} has layers of type {', '.join(odd)}: only full and sliding attention are "
            "served"
        )

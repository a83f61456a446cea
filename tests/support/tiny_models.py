"""Random checkpoints of many families, small enough to build in a test, nasty where they can be:
windows shorter than the prompts, soft-caps that bend, scales that are not one, odd shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

VOCABULARY = 97

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}

# config class, changes to the common settings
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_GROUPED, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 11, "head_dim": 16}),
    "qwen2": (
        "Qwen2Config",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_GROUPED,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            **_GROUPED,
            "head_dim": 16,
            "sliding_window": 8,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 10,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            **_GROUPED,
            "head_dim": 16,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        },
    ),
    "phi": ("PhiConfig", {**_GROUPED, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", {**_GROUPED, "sliding_window": 13}),
    "olmo2": ("Olmo2Config", _GROUPED),
    "granite": (
        "GraniteConfig",
        {
            **_GROUPED,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 7.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 5.0,
        },
    ),
    "cohere": ("CohereConfig", {**_GROUPED, "logit_scale": 0.35, "use_qk_norm": True}),
    "starcoder2": ("Starcoder2Config", {**_GROUPED, "sliding_window": 10, "use_bias": True}),
    "gpt_neox": ("GPTNeoXConfig", {**_COMMON, "rotary_pct": 0.5}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 6,
            "n_positions": 128,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "opt": (
        "OPTConfig",
        {
            **_COMMON,
            "ffn_dim": 80,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": True,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3Config", {**_GROUPED, "no_rope_layers": [1, 0]}),
    # A router that looks at the type of its own linear layer's weight.
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        {**_GROUPED, "head_dim": 16, "num_experts": 5, "moe_topk": 2},
    ),
    # Routers and gates that call torch's sigmoid, which has no place of its own in the model.
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **_GROUPED,
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_GROUPED,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
}

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "GptOssConfig",
        {
            **_GROUPED,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 6},
    ),
    "mpt": (
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 128},
    ),
    "falcon": ("FalconConfig", {**_COMMON, "alibi": False}),
    "gptj": (
        "GPTJConfig",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 6,
            "n_positions": 128,
            "rotary_dim": 8,
        },
    ),
    "stablelm": ("StableLmConfig", _GROUPED),
    "llama_dynamic_rope": (
        "LlamaConfig",
        {
            **_GROUPED,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_COMMON,
            "num_key_value_heads": 6,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
        },
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            **_GROUPED,
            "head_dim": 16,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "mamba": ("MambaConfig", {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2}),
    "xmod": ("XmodConfig", {**_COMMON, "is_decoder": True}),
    "t5": ("T5Config", {"vocab_size": VOCABULARY, "d_model": 48, "num_layers": 1, "num_heads": 2}),
    "bert": ("BertConfig", {**_COMMON, "is_decoder": False}),
}


def save_tiny(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of the family and return its folder."""
    name, settings = {**SERVED, **REFUSED}[family]
    config = getattr(transformers, name)(**{**settings, **changes})
    torch.manual_seed(seed)
    kind = (
        transformers.AutoModelForSeq2SeqLM
        if config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    model = kind.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms of a fresh model are 0 and 1
            scale = 0.25 if parameter.ndim > 1 else 0.3
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter.ndim == 1) * 0.5)
    model.save_pretrained(folder)
    return folder

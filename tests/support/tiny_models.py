"""Random checkpoints of many families, small enough to build in a test, nasty where they can be:
windows shorter than the prompts, soft-caps that bend, scales that are not one, odd shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

VOCABULARY = 97

COMMON: dict[str, Any] = {
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
TINY_GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 6}
Family = tuple[str, dict[str, Any]]  # the class of its configuration, and its settings


def grouped(config: str, **settings: Any) -> Family:
    """A family whose heads share keys and values."""
    return config, {**COMMON, "num_key_value_heads": 2, **settings}


def mixture(config: str, experts: str = "num_experts", **settings: Any) -> Family:
    """One of six experts, two a token."""
    usual = {experts: 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return grouped(config, **usual, **settings)


SERVED: dict[str, Family] = {
    "llama": grouped("LlamaConfig", attention_bias=True, mlp_bias=True),
    "mistral": grouped("MistralConfig", sliding_window=11, head_dim=16),
    "qwen2": grouped("Qwen2Config", use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": grouped("Qwen3Config", head_dim=32, tie_word_embeddings=True),
    "qwen3_moe": mixture("Qwen3MoeConfig", head_dim=16, norm_topk_prob=True),
    "gemma": grouped("GemmaConfig", head_dim=16, tie_word_embeddings=True),
    "gemma2": grouped(
        "Gemma2Config",
        head_dim=16,
        sliding_window=8,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0,
        query_pre_attn_scalar=10,
        tie_word_embeddings=True,
    ),
    "gemma3_text": grouped(
        "Gemma3TextConfig",
        head_dim=16,
        sliding_window=7,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
        tie_word_embeddings=True,
    ),
    "phi": grouped("PhiConfig", partial_rotary_factor=0.5),
    "phi3": grouped("Phi3Config", sliding_window=13),
    "olmo2": grouped("Olmo2Config"),
    "granite": grouped(
        "GraniteConfig",
        attention_multiplier=0.3,
        embedding_multiplier=7.0,
        residual_multiplier=0.4,
        logits_scaling=5.0,
    ),
    "cohere": grouped("CohereConfig", logit_scale=0.35, use_qk_norm=True),
    "starcoder2": grouped("Starcoder2Config", sliding_window=10, use_bias=True),
    "gpt_neox": ("GPTNeoXConfig", {**COMMON, "rotary_pct": 0.5}),
    "gpt2": (
        "GPT2Config",
        {**TINY_GPT, "n_positions": 128, "scale_attn_by_inverse_layer_idx": True},
    ),
    "opt": (
        "OPTConfig",
        {**COMMON, "ffn_dim": 80, "word_embed_proj_dim": 32, "tie_word_embeddings": True},
    ),
    "smollm3": grouped("SmolLM3Config", no_rope_layers=[1, 0]),
    # A router that looks at the type of its own linear layer's weight.
    "hunyuan_v1_moe": grouped("HunYuanMoEV1Config", head_dim=16, num_experts=5, moe_topk=2),
    # Routers and gates that call torch's sigmoid, which has no place of its own in the model.
    "glm4_moe": mixture(
        "Glm4MoeConfig",
        "n_routed_experts",
        head_dim=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "qwen2_moe": mixture("Qwen2MoeConfig", shared_expert_intermediate_size=40),
}

REFUSED: dict[str, Family] = {
    "gpt_oss": grouped(
        "GptOssConfig",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 6},
    ),
    "mpt": (
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 128},
    ),
    "falcon": ("FalconConfig", {**COMMON, "alibi": False}),
    "gptj": ("GPTJConfig", {**TINY_GPT, "n_positions": 128, "rotary_dim": 8}),
    "stablelm": grouped("StableLmConfig"),
    "llama_dynamic_rope": grouped(
        "LlamaConfig",
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    ),
    "deepseek_v3": mixture(
        "DeepseekV3Config",
        "n_routed_experts",
        num_key_value_heads=6,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_group=1,
        topk_group=1,
    ),
    "gemma4_text": grouped(
        "Gemma4TextConfig",
        head_dim=16,
        global_head_dim=32,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
    ),
    "mamba": ("MambaConfig", {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2}),
    "xmod": ("XmodConfig", {**COMMON, "is_decoder": True}),
    "t5": ("T5Config", {"vocab_size": VOCABULARY, "d_model": 48, "num_layers": 1, "num_heads": 2}),
    "bert": ("BertConfig", {**COMMON, "is_decoder": False}),
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

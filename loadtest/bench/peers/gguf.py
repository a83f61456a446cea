"""A checkpoint of Llama or of Gemma 3 as a GGUF file, which llama.cpp reads.

Weights stay bfloat16, norms float32. Of a Llama llama.cpp pairs neighbouring places of a head for
rotary embeddings where the checkpoint pairs its halves, so queries and keys change their order; of
a Gemma it wants the weights of norms with the one that is added to them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from lexshard.actors.stored_tensors import stored_tensors

# A checkpoint's names within a layer, and llama.cpp's.
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_IN_GEMMA_LAYER = _IN_LAYER | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(folder: Path, target: Path) -> None:
    """The model in ``folder`` as the file ``target``.

    Raises ValueError for a model of another type, and ImportError without the package gguf.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    config = AutoConfig.from_pretrained(folder)
    if config.model_type not in ("llama", "gemma3_text"):
        raise ValueError(
            f"models of the types llama and gemma3_text become GGUF here, not {config.model_type}"
        )
    gemma = config.model_type == "gemma3_text"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer = GGUFWriter(target, "gemma3" if gemma else "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    rotations = config.rope_parameters
    writer.add_rope_freq_base((rotations["full_attention"] if gemma else rotations)["rope_theta"])
    if gemma:
        writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, folder, config)
    for file in sorted({each.file for each in stored_tensors(folder)}):
        for name, tensor in load_file(file).items():
            value = tensor
            if not gemma and name.endswith(("q_proj.weight", "k_proj.weight")):
                value = _neighbours(tensor, heads if "q_proj" in name else kv_heads)
            own = _name(name, gemma)
            if value.dim() == 1:
                writer.add_tensor(own, value.float().numpy() + np.float32(gemma))
            else:
                writer.add_tensor(own, _bits(value), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str, gemma: bool) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    names = _IN_GEMMA_LAYER if gemma else _IN_LAYER
    return f"blk.{number}.{names[rest.removesuffix('.weight')]}.weight"


def _neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of every head in the order of halves side by side."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _bits(value: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of bfloat16 values, row by row, as the format wants them."""
    return value.bfloat16().contiguous().view(torch.uint8).numpy()


def _add_tokenizer(writer: Any, folder: Path, config: Any) -> None:
    """The byte-level pairs of tokenizer.json; without one, none: benches of llama.cpp need none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        writer.add_tokenizer_model("none")
        return
    described = json.loads(path.read_text(encoding="utf-8"))
    special = {each["id"]: each["content"] for each in described["added_tokens"]}
    tokens = {number: token for token, number in described["model"]["vocab"].items()} | special
    every = range(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(number, f"[unused {number}]") for number in every])
    # Of llama.cpp: 1 is a token of text, 3 one that steers.
    writer.add_token_types([3 if number in special else 1 for number in every])
    merges = described["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    end = config.eos_token_id
    writer.add_eos_token_id(end[0] if isinstance(end, list) else end)

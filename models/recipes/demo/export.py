"""Writing a trained network as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from models.recipes.demo.network import NetworkWeights
from models.recipes.demo.recipe import NetworkShape
from models.recipes.demo.texts.tokenizer import END_OF_TEXT, END_OF_TURN, as_fast_tokenizer

TEMPERATURE = 0.8
TOP_K = 50
TOP_P = 0.95


def llama_config(shape: NetworkShape, end_of_text: int) -> LlamaConfig:
    """The Hugging Face configuration of a shape."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.positions,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )


def export_checkpoint(
    weights: NetworkWeights, shape: NetworkShape, tokenizer: Tokenizer, folder: Path
) -> None:
    """Write configuration, bfloat16 weights, tokenizer and generation defaults."""
    end_of_text, end_of_turn = (
        tokenizer.encode(token).ids[0] for token in (END_OF_TEXT, END_OF_TURN)
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(shape, end_of_text))
    half = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    model.load_state_dict(half, strict=False, assign=True)
    model.tie_weights()
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        top_p=TOP_P,
        eos_token_id=[end_of_text, end_of_turn],
        pad_token_id=end_of_text,
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    _save_tokenizer(tokenizer, shape.positions, folder)


def _save_tokenizer(tokenizer: Tokenizer, positions: int, folder: Path) -> None:
    """Save under the class name that every version of transformers knows."""
    as_fast_tokenizer(tokenizer, positions).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

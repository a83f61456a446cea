"""A checkpoint with random weights and the dimensions of a small model with a large vocabulary.

Such models (Gemma 3 270M, Qwen 2.5 0.5B) spend a third to a half of their weights on the output
head, which is where a certified head has the most to gain. How fast a step is does not depend on
what the weights mean; how many rows a certified head must rescore does, so the weights are scaled
to give logits with the spread of a trained model's.

    write_random_model(folder)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEMO = Path(__file__).parents[3] / "models" / "lexshard-demo"
# Every linear layer keeps the size of its input (standard deviation 1 / sqrt(inputs)), so 18 layers
# bury the embedding they started from; with this root mean square a token's own row is no likelier
# than others to follow it (the weights are tied), and logits have a standard deviation of about
# 0.1 * sqrt(640) = 2.5.
EMBEDDING_SIZE = 0.1
# Queries and keys are larger than that, so that every position attends to a few tokens of its own
# choice: without it greedy text soon repeats itself.
ATTENTION_GAIN = 2.0
# Of a head with rows of its own: at temperature 0.8 some fifty tokens are a top-p of 0.95.
LOGIT_SPREAD = 4.0
# Gemma multiplies embeddings by the root of their width and norms what a layer adds to them, so
# that they are buried only where they are this small; the last norm then spreads the logits.
GEMMA_EMBEDDING_SIZE, GEMMA_SPREAD = 0.04, 2.5

Family = Literal["llama", "gemma3"]

LARGE_VOCABULARY: dict[str, Any] = {
    "hidden_size": 640,
    "num_hidden_layers": 18,
    "vocab_size": 262_144,
    "intermediate_size": 2_048,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 2_048,
}


def write_random_model(
    folder: Path,
    *,
    seed: int = 0,
    family: Family = "llama",
    device: str = "cpu",
    **dimensions: Any,
) -> None:
    """Write a model in bfloat16, and a tokenizer, to ``folder``; ``device`` draws the weights.

    ``dimensions`` are fields of the configuration that are to differ from `LARGE_VOCABULARY`, which
    with ``family`` gemma3 are those of Gemma 3 270M, windows and norms included. Embeddings are
    tied unless ``tie_word_embeddings`` is false. The tokenizer is
    the demo's, with unused tokens up to the vocabulary's size: text becomes the same ids, and no
    row of the head counts as padding.
    """
    from transformers import AutoModelForCausalLM

    config = _configuration(family, {**LARGE_VOCABULARY, **dimensions})
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, config.vocab_size)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator(device).manual_seed(seed)
    gemma = family == "gemma3"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                size = GEMMA_SPREAD if gemma and name == "model.norm.weight" else 1.0
                weight.fill_(size - gemma)  # Gemma's norms add one to their weights
            elif "embed_tokens" in name:
                size = GEMMA_EMBEDDING_SIZE if gemma else EMBEDDING_SIZE
                weight.normal_(0.0, size, generator=generator)
            elif name == "lm_head.weight":
                weight.normal_(0.0, LOGIT_SPREAD * weight.shape[1] ** -0.5, generator=generator)
            else:
                gain = ATTENTION_GAIN if "q_proj" in name or "k_proj" in name else 1.0
                weight.normal_(0.0, gain * weight.shape[1] ** -0.5, generator=generator)
    model.bfloat16().save_pretrained(folder)


def _configuration(family: Family, dimensions: dict[str, Any]) -> PretrainedConfig:
    from transformers import Gemma3TextConfig, LlamaConfig

    common: dict[str, Any] = {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": 0,
        **dimensions,
    }
    if family == "llama":
        return LlamaConfig(**common)
    return Gemma3TextConfig(
        **common, sliding_window=512, query_pre_attn_scalar=dimensions["head_dim"]
    )


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    description = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = description["model"]["vocab"]
    used = set(tokens.values())
    tokens.update((f"<unused{token}>", token) for token in range(vocabulary) if token not in used)
    (folder / "tokenizer.json").write_text(
        json.dumps(description, ensure_ascii=False), encoding="utf-8"
    )
    shutil.copy(DEMO / "tokenizer_config.json", folder)

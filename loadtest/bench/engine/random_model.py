"""A checkpoint with random weights and the dimensions of a small model with a large vocabulary.

Such models (Gemma 3 270M, Qwen 2.5 0.5B) spend a third to a half of their weights on the output
head, which is where a certified head has the most to gain. How fast a step is does not depend on
what the weights mean; how many rows a certified head must rescore does, so the weights are scaled
to give logits with the spread of a trained model's.

    write_random_model(folder)

``python -m lexshard.loadtest.bench.engine.random_model FOLDER`` does the same from a shell.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

DEMO = Path(__file__).parents[3] / "models" / "lexshard-demo"
# Every linear layer keeps the size of its input (standard deviation 1 / sqrt(inputs)), so 18 layers
# bury the embedding they started from; with this root mean square a token's own row is no likelier
# than others to follow it (the weights are tied), and logits have a standard deviation of about
# 0.1 * sqrt(640) = 2.5.
EMBEDDING_SIZE = 0.1
# Queries and keys are larger than that, so that every position attends to a few tokens of its own
# choice: without it greedy text soon repeats itself.
ATTENTION_GAIN = 2.0


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """The dimensions of a Llama model with tied embeddings."""

    hidden: int = 640
    layers: int = 18
    vocabulary: int = 262_144
    intermediate: int = 2_048
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 256
    positions: int = 2_048


LARGE_VOCABULARY = ModelDimensions()


def write_random_model(
    folder: Path,
    dimensions: ModelDimensions = LARGE_VOCABULARY,
    *,
    seed: int = 0,
    tokenizer: Path = DEMO,
) -> None:
    """Write ``config.json``, ``model.safetensors`` (bfloat16) and a tokenizer to ``folder``.

    The tokenizer is the one in the folder ``tokenizer``, with unused tokens up to the vocabulary's
    size: text becomes the same ids, and no row of the head counts as padding. Raises
    FileNotFoundError without a tokenizer there, ValueError if it has more tokens than the model's
    vocabulary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(tokenizer, folder, dimensions.vocabulary)
    (folder / "config.json").write_text(
        json.dumps(_configuration(dimensions), indent=1) + "\n", encoding="utf-8"
    )
    generator = torch.Generator().manual_seed(seed)
    save_file(
        dict(_tensors(dimensions, generator)),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _configuration(dimensions: ModelDimensions) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": dimensions.hidden,
        "num_hidden_layers": dimensions.layers,
        "vocab_size": dimensions.vocabulary,
        "intermediate_size": dimensions.intermediate,
        "num_attention_heads": dimensions.heads,
        "num_key_value_heads": dimensions.kv_heads,
        "head_dim": dimensions.head_dim,
        "max_position_embeddings": dimensions.positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def _tensors(
    dimensions: ModelDimensions, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * deviation).bfloat16()

    def linear(outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return normal(outputs, inputs, gain * inputs**-0.5)

    ones = torch.ones(dimensions.hidden, dtype=torch.bfloat16)
    queries = dimensions.heads * dimensions.head_dim
    keys = dimensions.kv_heads * dimensions.head_dim
    embedding = normal(dimensions.vocabulary, dimensions.hidden, EMBEDDING_SIZE)
    yield "model.embed_tokens.weight", embedding
    for layer in range(dimensions.layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", ones.clone()
        yield f"{name}.self_attn.q_proj.weight", linear(queries, dimensions.hidden, ATTENTION_GAIN)
        yield f"{name}.self_attn.k_proj.weight", linear(keys, dimensions.hidden, ATTENTION_GAIN)
        yield f"{name}.self_attn.v_proj.weight", linear(keys, dimensions.hidden)
        yield f"{name}.self_attn.o_proj.weight", linear(dimensions.hidden, queries)
        yield f"{name}.post_attention_layernorm.weight", ones.clone()
        yield f"{name}.mlp.gate_proj.weight", linear(dimensions.intermediate, dimensions.hidden)
        yield f"{name}.mlp.up_proj.weight", linear(dimensions.intermediate, dimensions.hidden)
        yield f"{name}.mlp.down_proj.weight", linear(dimensions.hidden, dimensions.intermediate)
    yield "model.norm.weight", ones.clone()


def _write_tokenizer(source: Path, folder: Path, vocabulary: int) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (source / name).is_file():
            raise FileNotFoundError(f"{source / name} is missing: name a folder with a tokenizer")
    description = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = description["model"]["vocab"]
    if len(tokens) > vocabulary:
        raise ValueError(f"the tokenizer in {source} has more than {vocabulary} tokens")
    used = set(tokens.values())
    tokens.update((f"<unused{token}>", token) for token in range(vocabulary) if token not in used)
    (folder / "tokenizer.json").write_text(
        json.dumps(description, ensure_ascii=False), encoding="utf-8"
    )
    shutil.copy(source / "tokenizer_config.json", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="write a random checkpoint of a small model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_random_model(arguments.folder, seed=arguments.seed)


if __name__ == "__main__":
    main()

"""How large the parts of a model are, from its folder: no weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lexshard.actors.body.checkpoint import read_checkpoint
from lexshard.actors.body.refusals import check_stored_types, model_class
from lexshard.actors.kv_cache import BLOCK_TOKENS

FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """``parameters`` are all stored weights, ``output_parameters`` those of an output head that is
    not the input embedding, too. ``weight_bytes`` is what one takes in memory."""

    name: str
    family: str
    vocabulary_size: int  # the tokenizer's
    hidden_size: int
    layers: int
    kv_heads: int
    head_dim: int
    max_positions: int
    parameters: int
    embedding_parameters: int
    output_parameters: int
    weight_bytes: int
    fused: bool  # whether a CPU runs the fused body

    @property
    def body_parameters(self) -> int:
        """All but the output head's own."""
        return self.parameters - self.output_parameters

    def kv_block_bytes(self, number_bytes: int) -> int:
        """Keys and values of a block of 16 tokens, ``number_bytes`` each."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BLOCK_TOKENS * number_bytes


def read_model_sizes(
    folder: str | Path, dtype: Literal["auto", "float32", "bfloat16"] = "auto"
) -> ModelSizes:
    """The sizes of the model in ``folder`` if it is loaded as ``dtype``.

    Raises a ModelRefusedError where it could not be served.
    """
    from lexshard.actors.body.fused import supports

    checkpoint = read_checkpoint(folder)
    check_stored_types(checkpoint.stored_dtypes)
    model_class(checkpoint.config)
    config = checkpoint.config.get_text_config(decoder=True)
    rows, columns = config.vocab_size, config.hidden_size
    heads = config.num_attention_heads
    half = dtype == "bfloat16" or (dtype == "auto" and "BF16" in checkpoint.stored_dtypes)
    return ModelSizes(
        name=Path(folder).resolve().name,
        family=config.model_type,
        vocabulary_size=min(rows, checkpoint.tokenizer_size or rows),
        hidden_size=columns,
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or columns // heads,
        max_positions=config.max_position_embeddings,
        parameters=checkpoint.parameters,
        embedding_parameters=rows * columns,
        output_parameters=0 if config.tie_word_embeddings else rows * columns,
        weight_bytes=BFLOAT16 if half else FLOAT32,
        fused=supports(checkpoint.config),
    )

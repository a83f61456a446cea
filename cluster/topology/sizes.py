"""How large the parts of a model are, from its folder, and what the roles of a gang keep in memory.

No weight is read. What an interpreter, CUDA's context and the activations of a step take comes on
top, and is what `cluster.topology.nodes.USABLE_SHARE` leaves room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lexshard.actors.body.checkpoint import positions_of, read_checkpoint
from lexshard.actors.body.refusals import check_stored_types, model_class
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.start.memory import default_kv_bytes
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.cluster.samplers.dense_slots import slot_bytes
from lexshard.cluster.samplers.process import ROWS, SLOTS
from lexshard.cluster.topology.processes import Parts
from lexshard.kernels.quantize.layout import BLOCK, GROUP, padded

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
    cpu_kv_bytes: int  # a number of a key or a value, on a CPU
    fused: bool  # whether a CPU runs the fused body

    def kv_block_bytes(self, *, on_gpu: bool) -> int:
        """Keys and values of a block of 16 tokens."""
        number = self.weight_bytes if on_gpu else self.cpu_kv_bytes
        return 2 * self.layers * self.kv_heads * self.head_dim * BLOCK_TOKENS * number

    def runs_fused(self, configuration: EngineConfiguration) -> bool:
        """Whether ``configuration`` runs it on the fused body, if it runs on a CPU."""
        return self.fused and configuration.body != "general"


def read_model_sizes(
    folder: str | Path, dtype: Literal["auto", "float32", "bfloat16"] = "auto"
) -> ModelSizes:
    """The sizes of the model in ``folder`` if it is loaded as ``dtype``.

    Raises a ModelRefusedError where it could not be served.
    """
    from lexshard.actors.body.fused import supports
    from lexshard.kernels.attention.layout import kept_on_cpu

    checkpoint = read_checkpoint(folder)
    check_stored_types(checkpoint.stored_dtypes)
    model_class(checkpoint.config)
    config = checkpoint.config.get_text_config(decoder=True)
    rows, columns = config.vocab_size, config.hidden_size
    heads = config.num_attention_heads
    half = dtype == "bfloat16" or (dtype == "auto" and "BF16" in checkpoint.stored_dtypes)
    width = getattr(config, "head_dim", None) or columns // heads
    return ModelSizes(
        name=Path(folder).resolve().name,
        family=config.model_type,
        vocabulary_size=min(rows, checkpoint.tokenizer_size or rows),
        hidden_size=columns,
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=width,
        max_positions=positions_of(config),
        parameters=checkpoint.parameters,
        embedding_parameters=rows * columns,
        output_parameters=0 if config.tie_word_embeddings else rows * columns,
        weight_bytes=BFLOAT16 if half else FLOAT32,
        cpu_kv_bytes=kept_on_cpu(width, rounds=half).itemsize,
        fused=supports(checkpoint.config),
    )


def kv_blocks(
    sizes: ModelSizes, configuration: EngineConfiguration, memory: int, *, on_gpu: bool
) -> int:
    """Blocks of the KV cache on a node with ``memory`` bytes: as the engine decides on a CPU. On a
    GPU it takes what it measures to be left, which nothing tells before; this is planned."""
    block = sizes.kv_block_bytes(on_gpu=on_gpu)
    length = min(configuration.max_model_len or sizes.max_positions, sizes.max_positions)
    wanted = configuration.kv_cache_bytes or default_kv_bytes(
        block, length, configuration.max_running, memory
    )
    return wanted // block


def body_memory(
    sizes: ModelSizes, configuration: EngineConfiguration, memory: int, *, on_gpu: bool
) -> Parts:
    """The body with its KV cache, on a node with ``memory`` bytes."""
    weights = (sizes.parameters - sizes.output_parameters) * sizes.weight_bytes
    if not on_gpu and not sizes.runs_fused(configuration):
        # The general body looks embeddings up in fp32.
        weights += sizes.embedding_parameters * (FLOAT32 - sizes.weight_bytes)
    blocks = kv_blocks(sizes, configuration, memory, on_gpu=on_gpu)
    return (("body", weights), ("KV cache", blocks * sizes.kv_block_bytes(on_gpu=on_gpu)))


def loading_bytes(sizes: ModelSizes, configuration: EngineConfiguration, *, on_gpu: bool) -> int:
    """What the body's process needs while it loads (`actors.body.loading`)."""
    if on_gpu:
        return sizes.parameters * sizes.weight_bytes
    kept = sizes.weight_bytes if sizes.runs_fused(configuration) else 0
    return sizes.parameters * (FLOAT32 + kept)


def shard_memory(
    sizes: ModelSizes, rows: int, configuration: EngineConfiguration, *, on_gpu: bool
) -> Parts:
    """A shard with ``rows`` of the output rows, and what screens them."""
    own = rows * sizes.hidden_size * sizes.weight_bytes
    parts = [("output rows", own)]
    if not on_gpu:
        parts.append(("packed rows", own + 2 * FLOAT32 * rows))  # of the dense screen
    if configuration.head != "dense":
        parts += [
            (name, rows * tier_row_bytes(name, sizes.hidden_size))
            for name in configuration.tiers_of(on_gpu=on_gpu)
        ]
    # Estimates of a step's rows; on a GPU their maxima and graphs' buffers, too.
    parts.append(("a step's logits", configuration.max_running * rows * (8 if on_gpu else 4)))
    return tuple(parts)


def tier_row_bytes(tier: str, columns: int) -> int:
    """Bytes of one row of a tier (`kernels.quantize.tiers`), with the product of the common
    direction that most tiers have."""
    scales = FLOAT32 + 2 * FLOAT32 + FLOAT32  # scale, two slacks, product
    wide = padded(columns, BLOCK)
    if tier == "int8":
        return padded(columns, 64) + scales
    if tier == "int4":
        return wide + wide // GROUP + scales + 2 * FLOAT32
    if tier == "int4-dither":
        return wide // 2 + wide // GROUP + scales
    return wide // 8 + wide // BLOCK + scales


def sampler_memory(sizes: ModelSizes, configuration: EngineConfiguration) -> Parts:
    """One of at least one sampler: tables of penalised sequences, a ring of dense rows."""
    sequences = -(-configuration.max_running // configuration.samplers)
    return (
        ("penalty tables", sequences * sizes.vocabulary_size * 4),
        ("dense rows", SLOTS * slot_bytes(sizes.vocabulary_size, ROWS)),
    )


def drafter_memory(draft: ModelSizes, blocks: int) -> Parts:
    """A draft model, which has as many KV blocks as the target."""
    return (
        ("draft model", draft.parameters * draft.weight_bytes),
        ("draft KV cache", blocks * draft.kv_block_bytes(on_gpu=False)),
    )

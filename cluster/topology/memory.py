"""What the roles of a gang keep in memory, in bytes, part by part.

Weights, caches and tables: what an interpreter, CUDA's context and the activations of a step take
comes on top, and is what `cluster.topology.nodes.USABLE_SHARE` leaves room for.
"""

from __future__ import annotations

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.memory import default_kv_bytes
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.cluster.samplers.dense_slots import slot_bytes
from lexshard.cluster.samplers.process import COLUMNS, SLOTS
from lexshard.cluster.topology.model_sizes import FLOAT32, ModelSizes
from lexshard.cluster.topology.placement import Parts
from lexshard.kernels.quantize.layout import BLOCK, GROUP, padded


def kv_blocks(
    sizes: ModelSizes, configuration: EngineConfiguration, memory: int, *, on_gpu: bool
) -> int:
    """Blocks of the KV cache on a node with ``memory`` bytes: as the engine decides on a CPU. On a
    GPU it takes what it measures to be left, which nobody knows before; this is what is planned."""
    block = sizes.kv_block_bytes(sizes.weight_bytes if on_gpu else FLOAT32)
    length = min(configuration.max_model_len or sizes.max_positions, sizes.max_positions)
    wanted = configuration.kv_cache_bytes or default_kv_bytes(
        block, length, configuration.max_running, memory
    )
    return wanted // block


def body_memory(
    sizes: ModelSizes, configuration: EngineConfiguration, memory: int, *, on_gpu: bool
) -> Parts:
    """The body with its KV cache, on a node with ``memory`` bytes."""
    weights = sizes.body_parameters * sizes.weight_bytes
    if not on_gpu and not _is_fused(sizes, configuration):
        # The general body looks embeddings up in fp32.
        weights += sizes.embedding_parameters * (FLOAT32 - sizes.weight_bytes)
    blocks = kv_blocks(sizes, configuration, memory, on_gpu=on_gpu)
    number = sizes.weight_bytes if on_gpu else FLOAT32
    return (("body", weights), ("KV cache", blocks * sizes.kv_block_bytes(number)))


def loading_bytes(sizes: ModelSizes, configuration: EngineConfiguration, *, on_gpu: bool) -> int:
    """What the body's process needs while it loads (`actors.body.loading`)."""
    if on_gpu:
        return sizes.parameters * sizes.weight_bytes
    copies = 2 if _is_fused(sizes, configuration) else 1
    return sizes.parameters * FLOAT32 * copies


def _is_fused(sizes: ModelSizes, configuration: EngineConfiguration) -> bool:
    return sizes.fused and configuration.body != "general" and not configuration.fast_prefill


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
            (name, rows * tier_row_bytes(name, sizes.hidden_size)) for name in configuration.tiers
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
        ("dense rows", SLOTS * slot_bytes(sizes.vocabulary_size, COLUMNS)),
    )


def drafter_memory(draft: ModelSizes, blocks: int) -> Parts:
    """A draft model, which has as many KV blocks as the target."""
    return (
        ("draft model", draft.parameters * draft.weight_bytes),
        ("draft KV cache", blocks * draft.kv_block_bytes(FLOAT32)),
    )


def cached_tokens(blocks: int) -> int:
    """Tokens that ``blocks`` of a KV cache hold."""
    return blocks * BLOCK_TOKENS

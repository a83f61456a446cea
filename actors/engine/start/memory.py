"""How much memory there is, and how much of it the KV cache takes by default."""

from __future__ import annotations

from typing import NamedTuple

from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.actors.machine import physical_memory

SHARE_OF_MEMORY = 0.1


class DeviceMemory(NamedTuple):
    """Bytes of a GPU: those that are free, and all."""

    free: int
    total: int


def default_kv_bytes(
    block_bytes: int, max_model_len: int, max_running: int, memory: int | None = None
) -> int:
    """Blocks for ``max_running`` sequences of full length, at most a tenth of ``memory`` bytes
    (None: this machine's).

    Always at least one sequence of full length.
    """
    memory = physical_memory() if memory is None else memory
    blocks_per_sequence = -(-max_model_len // BLOCK_TOKENS)
    most = int(SHARE_OF_MEMORY * memory) // block_bytes
    return max(blocks_per_sequence, min(blocks_per_sequence * max_running, most)) * block_bytes


def device_kv_bytes(
    block_bytes: int, max_model_len: int, max_running: int, memory: DeviceMemory, share: float
) -> int:
    """Blocks for ``max_running`` sequences of full length, at most what is left of ``share`` of a
    GPU's memory beside all that is in use now.

    Raises ValueError where that is less than one sequence of full length.
    """
    blocks_per_sequence = -(-max_model_len // BLOCK_TOKENS)
    used = memory.total - memory.free
    left = max(0, int(share * memory.total) - used)
    if left < blocks_per_sequence * block_bytes:
        raise ValueError(
            f"{share:.0%} of the GPU's {memory.total / 2**30:.1f} GiB leave "
            f"{left / 2**20:,.0f} MiB for the KV cache beside the {used / 2**30:.1f} GiB in use, "
            f"but one sequence of {max_model_len} tokens takes "
            f"{blocks_per_sequence * block_bytes / 2**20:,.0f} MiB: raise "
            "--gpu-memory-utilization, lower --max-model-len, or free memory of the GPU"
        )
    return min(blocks_per_sequence * max_running, left // block_bytes) * block_bytes

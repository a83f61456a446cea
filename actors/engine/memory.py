"""How much memory there is, and how much of it the KV cache takes when nobody says."""

from __future__ import annotations

import os

from actors.kv_cache import BLOCK_TOKENS

SHARE_OF_MEMORY = 0.1


def physical_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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

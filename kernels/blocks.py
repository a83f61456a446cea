"""Token ids in blocks of 64: what shares a draw of noise, a bound and a maximum.

Block ``b`` has the ids ``64 b`` to ``64 b + 63``; the last one of a vocabulary may be partly empty.
Noise depends on it (`kernels.noise.reference`), so another number would be other tokens.
"""

from __future__ import annotations

BLOCK = 64


def blocks_of(size: int) -> int:
    """How many blocks hold the ids 0 .. ``size - 1``."""
    return -(-size // BLOCK)

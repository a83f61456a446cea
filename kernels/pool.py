"""One pool of threads for the CPU kernels, which are serial and release the interpreter lock.

Like ``torch.set_num_threads``: one setting for the process. Kernels hand in independent pieces
(rows of different sequences, panels of a weight); how many there are changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_threads = 1
_executor: ThreadPoolExecutor | None = None


def set_threads(count: int) -> None:
    """Use ``count`` threads from now on, the caller's among them. Raises ValueError below 1."""
    global _threads, _executor
    if count < 1:
        raise ValueError(f"{count} threads cannot compute anything; give at least 1")
    if _executor is not None:
        _executor.shutdown()
    _threads = count
    _executor = ThreadPoolExecutor(count - 1, "kernels") if count > 1 else None


def threads() -> int:
    return _threads


def run(pieces: Sequence[Callable[[], None]]) -> None:
    """Run every piece, the first in this thread; returns when all are done."""
    if _executor is None or len(pieces) == 1:
        for piece in pieces:
            piece()
        return
    others = [_executor.submit(piece) for piece in pieces[1:]]
    pieces[0]()
    for other in others:
        other.result()


def even_shares(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Cut a list of sizes into at most ``parts`` runs ``(first, last)`` of about equal sums."""
    shares: list[tuple[int, int]] = []
    total, first, reached = sum(sizes), 0, 0
    for index, size in enumerate(sizes):
        reached += size
        if reached * parts >= total * (len(shares) + 1):
            shares.append((first, index + 1))
            first = index + 1
    return shares

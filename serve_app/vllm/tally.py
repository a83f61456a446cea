"""What the plugin decided and what it left to vLLM, counted; every reason is logged once."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger("vllm.lexshard")  # vLLM's handlers and levels hold for it


class Tally:
    """Rows by how they were decided: ``certified``, or ``refused`` by the reason."""

    def __init__(self) -> None:
        self.certified = 0
        self.refused: Counter[str] = Counter()

    def refuse(self, reason: str, rows: int = 1) -> None:
        """So many ``rows`` were left to vLLM; the first with a ``reason`` is logged."""
        if reason not in self.refused:
            logger.warning("lexshard leaves to vLLM: %s", reason)
        self.refused[reason] += rows

    def as_words(self) -> str:
        """All counts in one line."""
        left = "".join(f"; {rows} left to vLLM: {reason}" for reason, rows in self.refused.items())
        return f"{self.certified} rows certified{left}"


TALLY = Tally()  # of this process

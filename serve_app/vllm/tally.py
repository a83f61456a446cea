"""What the plugin decided and what it left to vLLM, counted; every reason is logged once."""

from __future__ import annotations

import logging
import time
from collections import Counter
from multiprocessing.util import Finalize

logger = logging.getLogger("vllm.lexshard")  # vLLM's handlers and levels hold for it
TOLD_EVERY = 300.0  # seconds


class Tally:
    """Rows by how they were decided: ``certified``, or ``refused`` by the reason. All counts are
    logged now and then, and when the process ends."""

    def __init__(self) -> None:
        self.certified = 0
        self.refused: Counter[str] = Counter()
        self._due = 0.0

    def refuse(self, reason: str, rows: int = 1) -> None:
        """So many ``rows`` were left to vLLM; the first with a ``reason`` is logged."""
        if reason not in self.refused:
            logger.warning("lexshard leaves to vLLM: %s", reason)
        self.refused[reason] += rows
        self.tell_if_due()

    def as_words(self) -> str:
        """All counts in one line."""
        left = "".join(f"; {rows} left to vLLM: {reason}" for reason, rows in self.refused.items())
        return f"{self.certified} rows certified{left}"

    def tell(self) -> None:
        logger.info("lexshard: %s", self.as_words())

    def tell_if_due(self) -> None:
        """Asked at every step; at the first, sees to it that the end tells, too."""
        if (now := time.monotonic()) < self._due:
            return
        if self._due:
            self.tell()
        else:  # not `atexit`, of which forked processes run nothing
            Finalize(None, self.tell, exitpriority=0)
        self._due = now + TOLD_EVERY


TALLY = Tally()  # of this process

"""A team of threads that compute one compiled function together, without Python in between.

Handing a piece of work to a thread of Python takes as long as a step of a small model. Here the
threads are in compiled code from their start on, look for the next job for a while and then sleep:
a server at rest takes nothing.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import numpy.typing as npt

# Looks at what is posted before a thread sleeps, a third of a millisecond and more: a step comes
# sooner after the one before, and waking a thread takes up to 0.1 ms. Others may have its core.
PATIENCE = 2000
PAGE_WORDS = 512


class Team:
    """``members`` threads, the caller's among them: there are ``members - 1`` beside it.

    Compiled code takes ``words``. They last until `dismiss`, or until this is forgotten.
    """

    def __init__(self, members: int, patience: int = PATIENCE) -> None:
        from lexshard.kernels.team import jobs  # compiles; keep the import cheap

        self.members = members
        self.words = _own_pages(jobs.WORDS)
        jobs.prepare(self.words, patience)
        threads = [
            threading.Thread(
                target=jobs.serve, args=(self.words, rank), name=f"team-{rank}", daemon=True
            )
            for rank in range(1, members)
        ]
        for thread in threads:
            thread.start()
        # Also before the interpreter ends and takes away what they run.
        self.dismiss = weakref.finalize(self, _dismiss, self.words, threads)

    def rouse(self) -> None:
        """There will be a job in no time: whoever sleeps wakes up."""
        from lexshard.kernels.team import jobs

        jobs.rouse(self.words)


def _own_pages(count: int) -> npt.NDArray[np.int64]:
    """Zeros, with nothing else in their pages: what the caller has beside words that others watch
    makes them watch in vain, and a step take twice as long."""
    memory = np.zeros(count + 3 * PAGE_WORDS, np.int64)
    first = PAGE_WORDS + -(memory.ctypes.data // 8) % PAGE_WORDS
    return memory[first : first + count]


def _dismiss(words: npt.NDArray[np.int64], threads: list[threading.Thread]) -> None:
    from lexshard.kernels.team import jobs

    jobs.dismiss(words)
    for thread in threads:
        thread.join()

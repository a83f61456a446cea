"""A team of threads that compute one compiled function together, without Python in between.

Handing a piece of work to a thread of Python takes as long as a step of a small model. Here the
threads are in compiled code from their start on, look for the next job for a while and then sleep:
a server at rest takes nothing.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lexshard.kernels.team.cores import pin

PAGE_WORDS = 512
# Where too much was lost of so many nanoseconds of those beside the caller, it goes on alone for so
# many seconds: not for so many steps, of which a small model has thousands in one second and a
# large one ten. Where a neighbour keeps a core for 20 ms, that is what it takes to find out, so the
# caller is alone for longer then.
JUDGED = 2_000_000
LEAST_ALONE, MOST_ALONE = 0.1, 2.0
ALONE_FOR_LOST, MOST_FOR_LOST = 20.0, 0.5  # times one loss, and the most seconds for it
# So many nanoseconds more may be lost after a good while: a moment without a core, or a page that
# the system finds late, is no neighbour that stays.
MOST_CREDIT = 5_000_000
# What becomes of the time alone with each good moment: beside a neighbour that comes and goes, one
# such moment is no reason to forget the others.
SHORTER = 0.9


class Team:
    """``members`` threads, the caller's among them: there are ``members - 1`` beside it.

    Compiled code takes ``words``. They last until `dismiss`, or until this is forgotten. Those
    beside the caller are pinned to one of ``cores`` each, where there are any.
    """

    def __init__(self, members: int, cores: Sequence[int] = ()) -> None:
        from lexshard.kernels.team import jobs  # compiles; keep the import cheap

        self.words = _own_pages(jobs.WORDS)
        self.forgive()
        jobs.prepare(self.words)
        threads = [
            threading.Thread(
                target=_serve,
                args=(self.words, rank, cores[rank - 1 : rank]),
                name=f"team-{rank}",
                daemon=True,
            )
            for rank in range(1, members)
        ]
        for thread in threads:
            thread.start()
        # Also before the interpreter ends and takes away what they run.
        self.dismiss = weakref.finalize(self, _dismiss, self.words, threads)

    def forgive(self) -> None:
        """What was lost until now does not count."""
        from lexshard.kernels.team import jobs

        self._alone_until, self._longer, self._credit = 0.0, LEAST_ALONE, 0.0
        self.words[jobs.LOST] = self.words[jobs.SHARED] = 0

    def rouse(self) -> bool:
        """There will be a job in no time: members that sleep wake up, if they are worth it.

        They are not where most of their time went into waiting for each other: something else has
        the core of one. Then the caller is better off alone, and asks again and again, ever later.
        """
        from lexshard.kernels.team import jobs

        now = time.monotonic()
        if now < self._alone_until:
            return False
        lost, shared = self.words[jobs.LOST], self.words[jobs.SHARED]
        if shared >= JUDGED:
            self.words[jobs.LOST] = self.words[jobs.SHARED] = 0
            self._credit = min(self._credit + jobs.MOST_LOST * shared - lost, MOST_CREDIT)
            if self._credit < 0.0:
                for_lost = min(ALONE_FOR_LOST * lost / 1e9, MOST_FOR_LOST)
                self._alone_until, self._credit = now + max(self._longer, for_lost), 0.0
                self._longer = min(2 * self._longer, MOST_ALONE)
                return False
            self._longer = max(SHORTER * self._longer, LEAST_ALONE)
        jobs.rouse(self.words)
        return True


def _serve(words: npt.NDArray[np.int64], rank: int, cores: Sequence[int]) -> None:
    from lexshard.kernels.team import jobs

    if cores:
        pin(cores)
    jobs.serve(words, rank)


def _own_pages(count: int) -> npt.NDArray[np.int64]:
    """Zeros, with nothing else in their pages: a thread that writes beside a word that others watch
    takes it from them each time."""
    memory = np.zeros(count + 3 * PAGE_WORDS, np.int64)
    first = PAGE_WORDS + -(memory.ctypes.data // 8) % PAGE_WORDS
    return memory[first : first + count]


def _dismiss(words: npt.NDArray[np.int64], threads: list[threading.Thread]) -> None:
    from lexshard.kernels.team import jobs

    jobs.dismiss(words)
    for thread in threads:
        thread.join()

"""How many threads a step has: the fastest for its number of rows, on this machine.

More threads are not always faster: in a small step they wait for each other as long as they
compute. So an engine measures it when it starts, or is told. That changes no token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lexshard.actors.body.batch import Body
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.threads.measurement import ThreadTiming, time_threads
from lexshard.actors.head.output_head import OutputHead
from lexshard.kernels import pool
from lexshard.kernels.team.cores import available_cores

# A larger number of threads must take clearly less time than a smaller one to be chosen.
CLEARLY = 0.97

TimeThreads = Callable[[Body, OutputHead, Sequence[int]], Sequence[ThreadTiming]]


class EngineThreads:
    """The threads of an engine: those that ``configuration`` says, or else the fastest.

    Until they are chosen, there are as many as might be. ``time_threads`` measures them.
    """

    def __init__(
        self,
        configuration: EngineConfiguration,
        cores: int | None = None,
        time_threads: TimeThreads = time_threads,
    ) -> None:
        if configuration.threads is not None:
            self._candidates: tuple[int, ...] = (configuration.threads,)
        elif configuration.tensor_parallel is not None:
            # Each rank computes on one thread: others of the first would be in the way.
            self._candidates = (1,)
        else:
            self._candidates = thread_candidates(
                cores or available_cores(), samplers=configuration.samplers > 0
            )
        if configuration.pin_threads:
            pool.pin_threads()
        self._time_threads = time_threads
        self.timings: tuple[ThreadTiming, ...] = ()
        self._use(((1, self._candidates[-1]),))

    @property
    def most(self) -> int:
        """How many threads the steps have that have most."""
        return max(threads for _, threads in self.choices)

    def choose(self, body: Body, head: OutputHead) -> None:
        """Times steps of ``body``, whose cache it takes, and ``head`` if there is a choice."""
        if len(self._candidates) == 1 or body.device.type != "cpu":
            return
        self.timings = tuple(self._time_threads(body, head, self._candidates))
        self._use(choose_threads(self.timings))

    def _use(self, choices: pool.ThreadChoices) -> None:
        self.choices = tuple(choices)
        pool.set_threads_by_rows(choices)
        torch.set_num_threads(self.most)


def begin_step(rows: int) -> None:
    """The kernels and torch, in this thread, now use what was chosen for ``rows`` rows."""
    torch.set_num_threads(pool.begin_step(rows))


def thread_candidates(cores: int, *, samplers: bool) -> tuple[int, ...]:
    """Powers of two and as many as can be: one core is left to HTTP where there are more than two,
    and one to samplers."""
    most = max(1, cores - (cores > 2) - samplers)
    return (*(1 << power for power in range((most - 1).bit_length())), most)


def choose_threads(timings: Sequence[ThreadTiming]) -> tuple[tuple[int, int], ...]:
    """From so many rows on, so many threads: the fewest than which no others are clearly faster."""
    choices: list[tuple[int, int]] = []
    for rows in sorted({each.rows for each in timings}):
        own = sorted(
            (each for each in timings if each.rows == rows), key=lambda timing: timing.threads
        )
        best = own[0]
        for each in own[1:]:
            if each.milliseconds < CLEARLY * best.milliseconds:
                best = each
        if not choices or choices[-1][1] != best.threads:
            choices.append((rows, best.threads))
    return tuple(choices)

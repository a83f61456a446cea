"""Compiling what will be called before it is, on all cores: a first start takes less than half.

One process compiles one kernel at a time, whatever its threads do, and each that is called first
by the engine's own warm-up waits for the one before it. What will be called is known, so several
processes compile it into the cache that they share, and the engine loads it from there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from threading import Lock
from typing import IO, cast

from lexshard.kernels.ahead.calls import Call, Groups, is_compiled

__all__ = [
    "GUESSING",
    "ONE_CALL",
    "SEVERAL_STEPS",
    "WHOLE_ROWS",
    "compile_ahead",
    "compile_beside",
    "is_postponed",
    "postpone",
]

# Each takes up to 800 MB while it compiles, and finds fewer kernels that no other compiles, too.
MOST_PROCESSES = 4
LOWEST_PRIORITY = 19
# Half of all there is to compile, without which there are tokens, the same ones: plain rows decided
# by one call, steps taken several at once, rows of all logits, and what a draft model guesses.
ONE_CALL = "lexshard.kernels.certified.cpu:certified_candidates"
SEVERAL_STEPS = "lexshard.kernels.steps.cpu:take_steps"
WHOLE_ROWS = "lexshard.kernels.decision.cpu:decide_dense"
GUESSING = "lexshard.kernels.draft.cpu:_draft"

_postponed: set[str] = set()


def postpone(groups: Groups) -> None:
    """What ``groups`` call is done in another way until `compile_beside` has compiled it."""
    _postponed.update(call.function for call in chain.from_iterable(groups.values()))


def is_postponed(function: str) -> bool:
    """Whether ``function``, as ``module:name``, is still to be compiled beside what is served."""
    return function in _postponed


class _Work:
    """Calls by groups, for several processes."""

    def __init__(self, groups: Groups) -> None:
        self._new = deque(map(deque[Call], groups.values()))
        self._begun: list[deque[Call]] = []
        self._one_at_a_time = Lock()

    def calls(self) -> Iterator[Call]:
        """What one process compiles: group after group, and when all are begun what another would
        come to last."""
        own: deque[Call] = deque()
        while True:
            with self._one_at_a_time:
                if not own and self._new:
                    own = self._new.popleft()
                    self._begun.append(own)
                longest = own or max(self._begun, key=len, default=own)
                if not longest:
                    return
                call = longest.popleft() if longest is own else longest.pop()
            yield call


def compile_ahead(groups: Groups, cores: int, told: Callable[[int], None]) -> None:
    """Compile all ``groups`` into the cache in as many processes as there are ``cores`` for.

    Each takes a group at a time, the first ones first, and helps others in the end.

    ``told`` hears of every call that is done (1) and every second that time passes (0), from one
    thread at a time. Whatever keeps a process from compiling, what is left is compiled when called.
    """
    work = _Work(groups)
    processes = min(cores, sum(map(len, groups.values())), MOST_PROCESSES)
    one_at_a_time = Lock()

    def tell(done: int) -> None:
        with one_at_a_time:
            told(done)

    with ThreadPoolExecutor(max(1, processes), "compiling") as threads:
        each = [threads.submit(_compile_in_a_process, work.calls(), tell) for _ in range(processes)]
        while wait(each, timeout=1.0).not_done:
            tell(0)
        for process in each:
            process.result()  # raises what it raised


def compile_beside(groups: Groups) -> None:
    """Compile all ``groups`` into the cache in one process that leaves the cores to all others, and
    load what it made, one after the other. What it cannot compile stays postponed: this process
    would stand still for a minute where it did. Takes long: call it in a thread that the end of
    this process may end, too."""
    taken, loaded = (chain.from_iterable(groups.values()) for _ in range(2))

    def load(done: int) -> None:
        call = next(loaded)
        if is_compiled(call):
            call.dispatcher.compile(call.types)
            _postponed.discard(call.function)

    _compile_in_a_process(taken, load, LOWEST_PRIORITY)


def _compile_in_a_process(
    calls: Iterator[Call], tell: Callable[[int], None], niceness: int = 0
) -> None:
    """One process that takes call after call; without this one, whose pipe it reads, it ends."""
    # -P: nothing that lies in the current folder is taken for a module.
    command = [sys.executable, "-P", "-m", "lexshard.kernels.ahead.worker", str(niceness)]
    with (
        suppress(BrokenPipeError),  # it died
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        send, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
        for call in calls:
            print(json.dumps(asdict(call)), file=send, flush=True)
            if not answers.readline():
                return  # it died
            tell(1)

"""Compiling what will be called before it is, on all cores: a first start takes less than half.

One process compiles one kernel at a time, whatever its threads do, and each that is called first
by the engine's own warm-up waits for the one before it. What will be called is known, so several
processes compile it into the cache that they share, and the engine loads it from there.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from collections.abc import Callable
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


def compile_ahead(groups: Groups, cores: int, told: Callable[[int], None]) -> None:
    """Compile all ``groups`` into the cache in as many processes as there are ``cores`` for.

    Each takes a group at a time, the first ones first.

    ``told`` hears of every call that is done (1) and every second that time passes (0), from one
    thread at a time. Whatever keeps a process from compiling, what is left is compiled when called.
    """
    left: queue.SimpleQueue[list[Call]] = queue.SimpleQueue()
    for calls in groups.values():
        left.put(calls)
    processes = min(cores, len(groups), MOST_PROCESSES)
    one_at_a_time = Lock()

    def tell(done: int) -> None:
        with one_at_a_time:
            told(done)

    with ThreadPoolExecutor(max(1, processes), "compiling") as threads:
        each = [threads.submit(_compile_in_a_process, left, tell) for _ in range(processes)]
        while wait(each, timeout=1.0).not_done:
            tell(0)
        for process in each:
            process.result()  # raises what it raised


def compile_beside(groups: Groups) -> None:
    """Compile all ``groups`` into the cache in one process that leaves the cores to all others, and
    load what it made, one after the other. Takes long: call it in a thread that the end of this
    process may end, too."""
    left: queue.SimpleQueue[list[Call]] = queue.SimpleQueue()
    for calls in groups.values():
        left.put(calls)
    coming = chain.from_iterable(groups.values())

    def load(done: int) -> None:
        call = next(coming)
        if is_compiled(call):
            call.dispatcher.compile(call.types)
            _postponed.discard(call.function)

    try:
        _compile_in_a_process(left, load, LOWEST_PRIORITY)
    finally:
        # Whatever kept the process from compiling: the rest is compiled when it is called.
        _postponed.clear()


def _compile_in_a_process(
    left: queue.SimpleQueue[list[Call]], tell: Callable[[int], None], niceness: int = 0
) -> None:
    """One process that takes group after group; without this one, whose pipe it reads, it ends."""
    # -P: nothing that lies in the current folder is taken for a module.
    command = [sys.executable, "-P", "-m", "lexshard.kernels.ahead.worker", str(niceness)]
    with (
        suppress(BrokenPipeError, queue.Empty),  # it died; or there is nothing left
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        send, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
        while True:
            calls = left.get_nowait()
            print(json.dumps([asdict(call) for call in calls]), file=send, flush=True)
            for _ in calls:
                if not answers.readline():
                    return  # it died
                tell(1)

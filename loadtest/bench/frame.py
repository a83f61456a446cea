"""The command line of every benchmark: options, turns, the table, the file, the exit status.

A bench declares its options (``add_arguments``) and a function that measures into a report; this
runs it: ``run_bench("head", arguments, measure, checked="tokens")``.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from lexshard.loadtest.bench.machine import describe_machine, installed_versions, pinned_to_cores
from lexshard.loadtest.bench.record import Report

Run = TypeVar("Run")


def add_common_arguments(
    parser: argparse.ArgumentParser, *, runs: int, quick_runs: int, seed: int | None = None
) -> None:
    """How often, how quick, with which seed, and where to write it; without ``--runs``, `run_bench`
    puts the number that belongs to ``--quick`` or not there."""
    add = parser.add_argument
    add("--runs", type=count, metavar="N", help=f"default {runs}, quick {quick_runs}")
    add("--quick", action="store_true", help="the same cases, fewer runs: a minute")
    if seed is not None:
        add("--seed", type=int, default=seed, metavar="N")
    add("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.set_defaults(default_runs=(runs, quick_runs), **({"seed": 0} if seed is None else {}))


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=count, default=1, metavar="N", help="of every contender; pinned"
    )


def count(text: str) -> int:
    """A positive number, as a type of argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a positive whole number")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Positive numbers with commas between them, as a type of argument."""
    try:
        return tuple(map(count, text.split(",")))
    except argparse.ArgumentTypeError:
        message = f"{text!r}: give positive numbers, for example 1,8,32"
        raise argparse.ArgumentTypeError(message) from None


def names_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an argument that is some of the ``known`` names with commas between them."""
    choices = tuple(known)

    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        for name in found:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        return found

    return names


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """No contender pays for walking the imports of all."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def in_turns(
    contenders: Mapping[str, Callable[[int], Run]],
    runs: int,
    *,
    warm_up: int = 1,
    tell: Callable[[str], None] | None = None,
) -> dict[str, list[Run]]:
    """What ``runs`` runs of every contender gave, which take turns, the other way round in every
    second one. A contender is called with the number of the run, below 0 in those that warm up."""
    found: dict[str, list[Run]] = {name: [] for name in contenders}
    with frozen_garbage():
        for number in range(-warm_up, runs):
            order = list(contenders)[:: 1 if number % 2 == 0 else -1]
            for name in order:
                if tell is not None:
                    tell(f"run {number + 1} of {runs}: {name}")
                result = contenders[name](number)
                if number >= 0:
                    found[name].append(result)
    return found


def timed(call: Callable[[], Run]) -> tuple[float, Run]:
    """The milliseconds that a call takes, and what it returns."""
    started = time.perf_counter()
    result = call()
    return 1e3 * (time.perf_counter() - started), result


@contextmanager
def on_pinned_cores(report: Report, threads: int) -> Iterator[Sequence[int]]:
    """As many cores as ``threads``, which the report names; torch and our kernels use them."""
    import torch  # seconds, which options and their help do without

    from lexshard.kernels import pool

    with pinned_to_cores(threads) as cores:
        torch.set_num_threads(threads)
        pool.set_threads(threads)
        report.machine["pinned_to_cores"] = list(cores)
        yield cores


def run_bench(
    name: str,
    arguments: argparse.Namespace,
    measure: Callable[[Report, argparse.Namespace], int],
    *,
    checked: str = "figures",
    threads: int | None = None,
    report: Report | None = None,
) -> int:
    """``lexshard bench NAME``: the exit status, after what was measured has been told and written,
    be it that not everything was.

    ``measure`` fills the report and returns how many of what is ``checked`` came out wrong. It runs
    on as many cores as ``threads``, if that is given.
    """
    if getattr(arguments, "runs", 0) is None:
        arguments.runs = arguments.default_runs[arguments.quick]
    if report is None:
        report = new_report(arguments.seed)
    wrong, status = 0, 0
    try:
        with nullcontext() if threads is None else on_pinned_cores(report, threads):
            wrong = measure(report, arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"lexshard bench {name}: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print(f"lexshard bench {name}: interrupted", file=sys.stderr)
        status = 1
    table = ["", report.table(), ""] if report.results else []
    print("\n".join([*table, *report.notes]), end="\n" if table or report.notes else "")
    if report.results and arguments.json is not None:
        report.write(arguments.json)
        print(f"written: {arguments.json}")
    if wrong:
        print(f"lexshard bench {name}: {wrong} {checked} are wrong", file=sys.stderr)
    return 1 if wrong else status


def new_report(seed: int) -> Report:
    """An empty one of this machine and command."""
    command = shlex.join(["lexshard", *sys.argv[1:]])
    return Report(describe_machine(), installed_versions(), command, seed)
